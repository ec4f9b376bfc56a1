"""The notebooks name what exists; `-m full` runs them from first to last cell, at a small size."""

import ast
import importlib
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def shared_programs(monkeypatch):
    """Let the kernels use the programs of the tests, and of each other."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir or "")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def execute(name: str, folder: Path, parameters: str):
    """Run a notebook in `folder` with other values in its cell of parameters, and return it."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    names = [line.split(" = ")[0] for line in cell.source.splitlines()]
    assert names == [line.split(" = ")[0] for line in parameters.splitlines()]
    cell.source = parameters
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, startup_timeout=300, resources=resources).execute()
    return notebook


def all_outputs(notebook) -> list:
    """The outputs of the cells and of the widgets in them, which show the setting at their sliders."""
    widgets = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {"state": {}})
    holders = [*notebook.cells, *(widget["state"] for widget in widgets["state"].values())]
    return [output for holder in holders for output in holder.get("outputs", [])]


def outputs(notebook, kind: str) -> list[str]:
    return [output["data"][kind] for output in all_outputs(notebook) if kind in output.get("data", {})]


def names_of(source: str) -> set[tuple[str, str]]:
    """Return (module, name) of all that a cell takes from the package."""
    names = set()
    for node in ast.walk(ast.parse(re.sub(r"^( *)[%!].*", r"\1pass", source, flags=re.M))):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("tiedattn_jax"):
                names |= {(module, alias.name) for alias in node.names}
            case ast.Attribute(value=ast.Name(id="ta"), attr=name):
                names.add(("tiedattn_jax", name))
    return names


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_names_exist(path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    names = set().union(*map(names_of, cells))
    assert any(module == "tiedattn_jax" for module, _ in names)
    missing = [f"{module}.{name}" for module, name in names if not hasattr(importlib.import_module(module), name)]
    assert not missing


HOSTED = {"quick_start", "your_own_attention"}  # open in a hosted notebook


def repository() -> str:
    return tomllib.loads((NOTEBOOKS.parent / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def test_links_to_hosted_notebooks():
    """They lead to files of this repository: README and start to both notebooks, each of these to itself."""
    pages = [NOTEBOOKS.parent / "README.md", *(NOTEBOOKS.parent / "docs").rglob("*.md"), *NOTEBOOKS.glob("*.ipynb")]
    linked = {}
    for page in pages:
        for target in re.findall(r"https://colab\.research\.google\.com/github/([^)\s]+)", page.read_text()):
            owner, _, path = target.partition("/blob/main/")
            assert f"https://github.com/{owner}" == repository() and (NOTEBOOKS.parent / path).exists(), target
            linked.setdefault(page.stem, set()).add(Path(path).stem)
    assert linked == {"README": HOSTED, "start": HOSTED} | {name: {name} for name in HOSTED}


@pytest.mark.parametrize("name", sorted(HOSTED))
@pytest.mark.parametrize("gpu", [None, "/usr/bin/nvidia-smi"])
def test_hosted_notebooks_install_the_package(name, gpu, monkeypatch):
    """The cell behind the title installs the package where it is missing, with the extra of a GPU if there is one."""
    inputtransformer2 = pytest.importorskip("IPython.core.inputtransformer2")
    cell = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells[1]
    assert cell.metadata["tags"] == ["install"]
    code, calls = inputtransformer2.TransformerManager().transform_cell(cell.source), []
    shell = SimpleNamespace(run_line_magic=lambda *call: calls.append(call))
    monkeypatch.setattr("shutil.which", lambda program: gpu)
    exec(code, {"get_ipython": lambda: shell})
    assert calls == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(code, namespace := {"get_ipython": lambda: shell})
    assert calls == [("pip", f'install -q "tiedattn_jax{{extra}} @ git+{repository()}"')]
    assert namespace["extra"] == ("[cuda]" if gpu else "")


# By notebook: other values of its parameters, the number of its pictures, and words that it prints.
RUNS = {
    "quick_start": ("ORDER = 5\nSIZE = 4", 2, ["d alpha_c / d sigma = -13.0", "4 x 4 cells"]),
    "sensitivities": ("ORDER = 5\nPOINTS = 3\nSTEPS = 3", 5, ["d log alpha_c / d log sigma = -5.2", "sigma 0.49"]),
    "finite_size": ("DIMENSIONS = (60, 80)\nINSTANCES = 2\nORDER = 5\nALPHAS = 2", 3,
                    ["d = 80, 2 instances: converged"]),
    "optimal": ("D = 80\nINSTANCES = 2\nPOINTS = 5\nORDER = 5", 3, ["alpha = 0.4: overlap", "alpha = 2.0: cosine"]),
    "learning": (
        "D = 40\nRUNS = 2\nUNTIL = 48.0\nOMEGAS = (0.0, 0.1)\nSIZES = (0.1, 0.2)\nTRAINED = 40\nINSTANCES = 2", 4,
        ["kappa = 0.005: size R 0.085 0.098", "omega = 0.1: m 0.259, curvature -0.00282", "teacher first (converged)",
         "of 2"],
    ),
    "your_own_attention": ("ORDER = 5\nD = 60\nINSTANCES = 2", 1, ["beta = 1.5: Quantity(alpha_c = "]),
    "wide": ("D = 30\nINSTANCES = 2\nPOINTS = 4\nSIZE = 4", 5,
             ["content appears at alpha = 0.00712", "tied, share 0.20: content, shift 0.000",
              "untied, share 0.20: content and position", "2 instances: converged"]),
    "jumps": ("ORDERS = (5,)\nPOWERS = (10,)\nTRUTH = 7", 2, []),
    # The ground state alone, on coarse lines; other s would use the same programs.
    "breaking": (
        "S = ()\nORDER = 3\nREPLICATES = 2\nDIMENSIONS = (100, 120)\nINSTANCES = (2, 2)\nSTARTS = 2", 2,
        ["1RSB ground state", "(ground state), ", "complexity ", "d = 120, 2 instances"],
    ),
    "histogram_task": (
        'RUNS = 2\nEPOCHS = 2\nFREE_EPOCHS = 2\nSTANDARD_EPOCHS = 2\nSAMPLES = 200\nCHECKPOINTS = "some"', 6, [],
    ),
    "explore": ("SIZE = 4\nORDER = 3", 2, ["omega = 0.417, alpha = 1.87", "semantic branch at alpha = "]),
    "phase_diagram": (
        'SIZE = 4\nORDER = 5\nFINE = 5\nPOINTS = 3\nFOLDS = (2.174, 2.3, 1)\nBOUNDARIES = ("alpha_c",)', 6,
        ["the positional branch folds at omega = 0.23", "positional ", "semantic ", "mixed ", "uninformed "],
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_notebooks(tmp_path, monkeypatch, name):
    if name in ("jumps", "breaking", "histogram_task"):  # their programs take longer to compile than to run
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    parameters, pictures, words = RUNS[name]
    notebook = execute(f"{name}.ipynb", tmp_path, parameters)
    printed = "".join(output.get("text", "") for output in all_outputs(notebook))
    assert len(outputs(notebook, "image/png")) == pictures and all(word in printed for word in words)
    assert name != "phase_diagram" or printed.count(" cells  ") > 1  # the table of regions
    if name == "histogram_task":
        (table,) = outputs(notebook, "text/markdown")
        assert table.splitlines()[0] == "|  | semantic, 2 runs | positional, 2 runs |"
        assert len(list((tmp_path / "some").iterdir())) == 5
