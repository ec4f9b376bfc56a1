"""The figures' scripts at small size: computed to a file, drawn from it."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("quick_programs")

FOLDER = Path(__file__).parents[1] / "figures"
SIZES = {
    "minimum": ["--d", "40", "--alphas", "1", "2", "--instances", "2"],
    "scaling": ["--d", "20", "40", "--alphas", "2", "--instances", "2"],
    "adam": ["--d", "40", "--alphas", "2", "--instances", "2", "--steps", "500"],
}


def script(name):
    spec = importlib.util.spec_from_file_location(f"figures_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("figure", SIZES)
def test_figure(figure, tmp_path):
    data, picture = tmp_path / "data.csv", tmp_path / "picture.png"
    script("compute").main([figure, "--out", str(data), "--order", "5", *SIZES[figure]])
    rows = list(csv.DictReader(data.read_text().splitlines()))
    count, branches = {"minimum": (6, 2), "scaling": (20, 2), "adam": (2, None)}[figure]
    assert len(rows) == count and branches in (None, len({r["branch"] for r in rows if "branch" in r}))
    if figure == "minimum":
        assert [r["branch"] for r in rows if r["kind"] == "simulation"] == ["positional", "semantic"]
    script("draw").main([figure, str(data), str(picture)])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_fitted_exponent():
    d = np.array([10.0, 30.0, 100.0, 1000.0])
    amplitude, slope, error = script("draw").exponent(d, 3 * d**-0.5, 0.1 * d**-0.5)
    assert amplitude == pytest.approx(3) and slope == pytest.approx(-0.5) and 0 < error < 0.02


def test_where_a_run_ends():
    draw = script("draw")
    columns = ["branch", "train_loss", "positional_loss", "semantic_loss"]
    values = [["positional", 1.02, 1, 2], ["semantic", 2.02, 1, 2], ["positional", 2, 1, 2]]
    table = draw.Table([dict(zip(columns, map(str, row), strict=True)) for row in values])
    assert draw.ends(table).tolist() == ["positional", "semantic", "elsewhere"]
