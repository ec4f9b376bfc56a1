"""The programs of README, paper and pages run, print what is shown, and every link and name leads somewhere.

A page is one program: its ```python blocks, in order, in one namespace. A ```text block directly behind one of them
shows what it prints. A block behind the line `<!-- not run: reason -->` is left out.

    python tests/test_pages.py docs/start.md ...     # writes what the blocks print, and save, into the pages
"""

import ast
import builtins
import contextlib
import inspect
import io
import pkgutil
import re
import shutil
import sys
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib
import public
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base import programs as compiled

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "paper.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- not run: [^\n]+ -->\n+)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
# These numbers are rounding errors, or differ with them, and are not compared.
NOISE = re.compile(r"\b(?:residual|gradient|gradient_norm) +\S+|\bafter \d+ iterations")
# A number with a point, and its error bar: "1.2515(10)", "-8.1e-05".
NUMBER = re.compile(r"(?P<value>[-+]?\d*\.\d+(?:e[-+]?\d+)?)(?:\((?P<bar>\d+)\))?")


class Program(NamedTuple):
    """A block of code, the number of lines before it, what it prints, and where that output stands in the page."""

    code: str
    line: int
    shown: str | None
    span: tuple[int, int]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def programs(text: str) -> list[Program]:
    """The blocks of a page that are run."""
    blocks = list(BLOCK.finditer(text))
    runnable = []
    for block, after in zip(blocks, [*blocks, None][1:], strict=True):
        if block["kind"] != "python" or block["skip"]:
            continue
        has_output = after is not None and after["kind"] == "text" and not text[block.end() : after.start()].strip()
        shown, span = (after["text"], after.span("text")) if has_output else (None, (0, 0))
        runnable.append(Program(block["text"], text[: block.start("text")].count("\n"), shown, span))
    return runnable


def run(page: Path) -> list[tuple[Program, str]]:
    """Run every block of a page; return the blocks with what they print. Settings of its pictures end with the page."""
    namespace: dict = {"__name__": "__page__"}
    results = []
    with matplotlib.rc_context():
        for program in programs(page.read_text()):
            printed = io.StringIO()
            code = compile("\n" * program.line + program.code, name_of(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
            results.append((program, printed.getvalue()))
    return results


def texts_agree(printed: str, shown: str) -> bool:
    """Whether two texts are equal, up to small differences of numbers with a point.

    The numbers may differ by one in their last digit, or by their error bar if that is more; error bars may differ by
    one. Residuals, gradients and numbers of iterations are not compared: rounding changes them.
    """
    printed, shown = (NOISE.sub("", text) for text in (printed, shown))
    pairs = zip(NUMBER.finditer(printed), NUMBER.finditer(shown), strict=False)
    return NUMBER.sub("#", printed) == NUMBER.sub("#", shown) and all(numbers_agree(*pair) for pair in pairs)


def numbers_agree(printed: re.Match, shown: re.Match) -> bool:
    digits, _, power = shown["value"].partition("e")
    unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    bar, bar_shown = (int(number["bar"] or 0) for number in (printed, shown))
    difference = abs(float(printed["value"]) - float(shown["value"]))
    return abs(bar - bar_shown) <= 1 and difference <= 1.001 * unit * max(1, bar_shown)


@pytest.fixture
def isolated(tmp_path, monkeypatch):
    """A working folder and a home of the test's own; programs are stored where they were."""
    cache, traced = jax.config.jax_compilation_cache_dir, compiled.Traced.folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    jax.config.update("jax_compilation_cache_dir", cache)
    compiled.Traced.folder = traced
    jax.config.update("jax_disable_most_optimizations", False)


# Pages whose programs take longer to compile than to run.
QUICK = [f"docs/howto/{name}.md" for name in ("own_layer", "own_layer_hooks", "penalties")]


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if programs(page.read_text())], ids=name_of)
def test_programs_print_what_the_page_shows(page, isolated):
    jax.config.update("jax_disable_most_optimizations", name_of(page) in QUICK)
    for program, printed in run(page):
        if program.shown is not None:
            assert texts_agree(printed, program.shown), f"{name_of(page)}:{program.line} prints\n{printed}"


@pytest.mark.parametrize(
    ("printed", "shown", "expected"),
    [
        ("q 1.234\n", "q 1.235\n", True), ("q 1.234\n", "q 1.236\n", False),
        ("a = 1.2515(10)", "a = 1.2509(10)", True), ("a = 1.2515(10)", "a = 1.2515(14)", False),
        ("a = 1.2515(10)", "a = 1.2515", False), ("-8.11e-05", "-8.12e-05", True),
        ("-8.11e-05", "8.11e-05", False), ("-8.11e-05", "-8.11e-04", False),
        ("residual 1.2e-12, q 1.0", "residual 8.4e-13, q 1.0", True),
        ("after 102 iterations, q 1.0", "after 103 iterations, q 1.0", True),
        ("64 nodes", "65 nodes", False), ("converged .5", "stalled .5", False), ("1.5 2.5", "1.5", False),
    ],
)  # fmt: skip
def test_what_counts_as_the_same_output(printed, shown, expected):
    assert texts_agree(printed, shown) is expected


def test_blocks_of_the_readme_run_alone():
    """Every block of README defines or imports all names that it uses: readers copy single blocks."""
    for program in programs((ROOT / "README.md").read_text()):
        tree = ast.parse(program.code)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        known = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
        known |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        known |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        known |= {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
        assert {node.id for node in names} <= known, f"README.md:{program.line}"


def test_a_block_that_is_not_run_ends_where_it_ends():
    block = "```python\nprint({})\n```\n"
    text = "".join(("<!-- not run: long -->\n" if k % 2 else "") + block.format(k) for k in range(4))
    assert [program.code for program in programs(text)] == ["print(0)\n", "print(2)\n"]


def anchors(page: Path) -> set[str]:
    """The anchors that a link into a page can have: those of its headings, and explicit ones."""
    text = BLOCK.sub("", page.read_text())
    plain = [
        re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.+?)(?: \{.*\})?$", text, re.M)
    ]
    return {re.sub(r"[\s-]+", "-", title) for title in plain} | set(re.findall(r"\{#([\w-]+)\}", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.finditer(BLOCK.sub("", page.read_text())):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        destination = (page.parent / target).resolve() if target else page
        assert destination.exists(), link["target"]
        assert not anchor or destination.suffix != ".md" or anchor in anchors(destination), link["target"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_exist(page):
    """Every name on a page exists: `ta.NAME` is public, and full names can be imported."""
    text = page.read_text()
    for chain in re.findall(r"\bta((?:\.[A-Za-z_]\w*)+)", text):
        first, *attributes = chain[1:].split(".")
        assert first in dir(ta), f"ta.{first}"
        member = getattr(ta, first)
        if attributes and inspect.ismodule(member):
            assert hasattr(member, attributes[0]), f"ta{chain}"
    for full_name in re.findall(r"\]\[(tiedattn_jax\.[\w.]+)\]|^::: (tiedattn_jax\.[\w.]+)", text, re.M):
        pkgutil.resolve_name("".join(full_name))


WINGS = "|".join((*public.WINGS, "counting"))


def calls(code: str) -> list[tuple[str, ast.Call]]:
    """The calls of public functions in a block, `ta.NAME(...)` or `ta.counting.NAME(...)`, by their names."""
    found = [(ast.unparse(node.func), node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [(name, call) for name, call in found if re.fullmatch(rf"ta\.(({WINGS})\.)?\w+", name)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_calls_have_arguments_that_exist(page):
    """Every block of Python, also one that is not run, passes the functions arguments that they have."""
    blocks = [block["text"] for block in BLOCK.finditer(page.read_text()) if block["kind"] == "python"]
    for name, call in (call for block in blocks for call in calls(block)):
        if any(isinstance(value, ast.Starred) for value in call.args) or None in [k.arg for k in call.keywords]:
            continue  # the number of arguments is known when it runs
        signature = inspect.signature(attrgetter(name.removeprefix("ta."))(ta))
        try:
            signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
        except TypeError as error:
            pytest.fail(f"{name_of(page)}: {ast.unparse(call)}: {error}")


def test_api_page_names_everything_once():
    text = (ROOT / "docs" / "api.md").read_text()
    names = rf"^::: tiedattn_jax\.((?:(?:{WINGS})\.)?\w+)$"
    assert sorted(re.findall(names, text, re.M)) == sorted([*public.names(), "counting", "results"])
    classes = {name for name in vars(ta.results) if name[0] != "_"} - {*public.names(), "jaxtyping"}
    assert sorted(re.findall(r"^::: tiedattn_jax\.results\.(\w+)$", text, re.M)) == sorted(classes)


def test_the_table_of_questions_names_every_function():
    section = (ROOT / "docs" / "start.md").read_text().split("## Which call for which question?")[1].split("\n## ")[0]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section))))
    assert not {name.rpartition(".")[2] for name, _ in public.functions()} - named


def write(page: Path) -> None:
    """Write what the blocks of a page print into the text blocks behind them, and the pictures they save beside it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        results = run(page)
        for file in Path(folder).iterdir():
            if (page.parent / file.name).exists():
                shutil.copy(file, page.parent)
    text = page.read_text()
    for program, printed in reversed(results):
        if program.shown is not None:
            start, end = program.span
            text = text[:start] + printed + text[end:]
    page.write_text(text)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        write(path)
