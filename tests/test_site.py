"""The hooks of the site: notebooks become pages, and the HTML of tables and of the API is repaired."""

import base64
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
griffe = pytest.importorskip("griffe")

DOCS = Path(__file__).parents[1] / "docs"


def hook(name):
    spec = importlib.util.spec_from_file_location(f"hook_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layout():
    """Groups of attributes keep their names, and numbers in tables stay on one line."""
    repaired = hook("layout").on_post_page
    wrong = '<b><code><span title="P.q,">q,</span></code></b>\n (<code>(<span title="P.V">V</span>, m)</code>)\n – all'
    assert repaired(wrong) == "<b><code>q, V, m</code></b>\n – all"
    right = "<b><code>alpha</code></b>\n (<code>float</code>)"
    assert repaired(right) == right
    for number in ("2.0e-4", ".050 s", "6.70(3)e-6", "1.5 ms", "−.03 %"):
        cell = f'<td>about <span class="number">{number}</span>, x</td> {number}'
        assert repaired(f"<td>about {number}, x</td> {number}") == cell
    for text in ("lines of order 5", "Fig. 3 small", "a 25 x 25 grid", "x2 s", "one-pass", "12-3"):
        assert repaired(f"<td>{text}</td>") == f"<td>{text}</td>"


def test_attributes_that_only_objects_have():
    """They have no type in the API, not that of the attribute before them; others keep theirs."""
    source = 'class Base:\n    size: int\nclass State(Base):\n    """All.\n\n    Attributes:\n' + "".join(
        f"        {name}: a number.\n" for name in ("known", "unknown", "size")
    )
    source += '\n    Raises:\n        Error: none.\n    """\n    known: float\n'
    with griffe.temporary_visited_package(
        "states", {"__init__.py": source}, extensions=griffe.load_extensions(hook("layout").Listed)
    ) as package:
        state = package["State"]
        (listed,) = (part.value for part in state.docstring.parse("google") if part.kind.value == "attributes")
        assert [(a.name, a.annotation and str(a.annotation)) for a in listed] == [
            ("known", "float"), ("unknown", None), ("size", "int")
        ]  # fmt: skip
        assert set(state.members) == {"known", "unknown"}


def test_a_notebook_as_a_page(tmp_path):
    outputs = [
        {"output_type": "stream", "text": ["one\n", "two\n"]},
        {"data": {"image/png": base64.b64encode(b"picture").decode(), "text/plain": "<Figure>"}},
        {"data": {"text/html": "<b>A</b>\n<table></table>", "text/plain": "A"}},
        {"data": {"text/plain": ["3"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["%pip install x"], "metadata": {"tags": ["install"]}},  # is left out
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": outputs},
    ]
    path = tmp_path / "example.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, pictures = hook("notebooks").converted(path)
    assert pictures == {"example_0.png": b"picture"}
    assert text == (
        "# Title\ntext\n\n```python\nx = 1\nx\n```\n\n```text\none\ntwo\n```\n\n"
        "![Output of the cell above](example_0.png)\n\n<b>A</b>\n\n<table></table>\n\n```text\n3\n```\n"
    )


def test_links_to_notebooks_lead_to_their_pages():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/simulation.md"))
    link = "[`a`](../../notebooks/learning.ipynb), [b](simulation.md)"
    expected = "[`a`](../notebooks/learning.md), [b](simulation.md)"
    assert hook("notebooks").on_page_markdown(link, page) == expected


def test_every_notebook_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for path in (DOCS.parent / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.stem}.md" in navigation
