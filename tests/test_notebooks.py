"""The notebooks run from their first cell to their last one, at a small size; CI does so after the other tests."""

import base64
from pathlib import Path

import jax
import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def kept_programs(monkeypatch):
    """The kernels find the programs of the tests, and of each other."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir or "")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def execute(name: str, folder: Path, parameters: str):
    """The notebook after a run in `folder`, with other values in its cell of parameters."""
    book = nbformat.read(NOTEBOOKS / name, as_version=4)
    (cell,) = [c for c in book.cells if "parameters" in c.metadata.get("tags", [])]
    names = [line.split(" = ")[0] for line in cell.source.splitlines()]
    assert names == [line.split(" = ")[0] for line in parameters.splitlines()]
    cell.source = parameters
    nbclient.NotebookClient(
        book, timeout=600, startup_timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return book


def outputs(book, kind: str) -> list[str]:
    shown = [output for cell in book.cells for output in cell.get("outputs", []) if "data" in output]
    return [output["data"][kind] for output in shown if kind in output["data"]]


def test_histogram_task(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # it runs shorter than it compiles
    small = 'RUNS = 2\nEPOCHS = 2\nFREE_EPOCHS = 2\nSTANDARD_EPOCHS = 2\nSAMPLES = 200\nCHECKPOINTS = "some"'
    book = execute("histogram_task.ipynb", tmp_path, small)
    pictures = [base64.b64decode(picture) for picture in outputs(book, "image/png")]
    assert len(pictures) == 6 and all(p.startswith(b"\x89PNG") for p in pictures)
    (table,) = outputs(book, "text/markdown")
    assert table.splitlines()[0] == "|  | semantic, 2 runs | positional, 2 runs |"
    assert len(list((tmp_path / "some").iterdir())) == 5


def test_jumps(tmp_path):
    book = execute("jumps.ipynb", tmp_path, "ORDERS = (5,)\nPOWERS = (10,)\nTRUTH = 7")
    assert len(outputs(book, "image/png")) == 2


def test_phase_diagram(tmp_path):
    book = execute("phase_diagram.ipynb", tmp_path, "SIZE = 4\nORDER = 5\nFINE = 5\nPOINTS = 3")
    assert len(outputs(book, "image/png")) == 6
    printed = "".join(o.get("text", "") for c in book.cells for o in c.get("outputs", []))
    assert printed.count(" cells  ") > 1  # the regions
    assert all(f"{name} " in printed for name in ("positional", "semantic", "mixed", "uninformed"))
