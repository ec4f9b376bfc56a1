"""A phase diagram as one page of HTML that needs no network: a map to point at and to click.

`diagram.html` holds the page, its style and its script. This module fills in the data: numbers as they are printed, and
curves. Places on the map are shares of its width and height, so that the script knows nothing of scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.colors import to_hex

from ..base.arrays import AnyArray
from ..base.report import by_token, entries, plain
from ..base.results import Status
from ..model.overlaps import PAIR
from ..phases.cells import runs_of
from .diagrams import cell_edges
from .style import COLOURS, LABELS, REGION_STYLES, is_geometric

_TEMPLATE = resources.files(__package__).joinpath("diagram.html")
_MARK = "/*data*/"  # where the data go
_TICKS = 6  # labels of an axis, at most
_ROWS = "q", "V", "theta", "m", "train_loss", "gen_error", "gen_error_linear", "replicon", "jump_mass"
_LETTERS = {r"\alpha": "α", r"\omega": "ω", r"\sigma": "σ", r"\lambda": "λ", r"\theta": "θ", r"\mathcal{R}": "R"}
_DASH = "6 3"
_Share = Callable[[Any], Any]  # from values to shares of the length of an axis


def diagram_page(diagram: Any) -> str:
    """Return the page of a `phases.diagram.PhaseDiagram`."""
    shares = [_share_of(np.asarray(values, float)) for _, values in (diagram.x, diagram.y)]
    states = {"positional": diagram.positional, "semantic": diagram.semantic, "global minimum": diagram.global_minimum}
    numbers = {name: state.numbers() for name, state in states.items()}
    statuses = dict(zip(states, (*diagram.branch_status, np.asarray(diagram.global_minimum.status)), strict=True))
    both, one = diagram.stable, diagram.winner  # the uninformed state is not tested for stability
    stable = dict(zip(states, (*both, np.select([one == 0, one == 1], [*both], one == len(PAIR))), strict=True))
    boundaries = [diagram.alpha_c(), diagram.alpha_l()] if "alpha" in (diagram.x[0], diagram.y[0]) else []
    size = f"{len(diagram.x[1])} x {len(diagram.y[1])} cells"
    data = {
        "title": f"Phase diagram over {diagram.x[0]} and {diagram.y[0]}, {size}",
        "setting": _setting(diagram.attrs),
        "axes": [_axis_data(diagram.x, shares[0]), _axis_data(diagram.y, shares[1])],
        "regions": [{"name": name.replace("\n", " "), "colour": to_hex(c)} for name, c in REGION_STYLES.values()],
        "region": diagram.region.tolist(),
        "trusted": diagram.trusted.tolist(),
        "rows": [*_ROWS, "stable", "status"],
        "columns": {name: _texts(numbers[name], stable[name], statuses[name]) for name in states},
        "panels": _panels(numbers, stable, diagram.winner == len(PAIR)),
        "boundaries": [_boundary(line, diagram.x[0] == "alpha", *shares) for line in boundaries],
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")  # ends no element of the page
    return _TEMPLATE.read_text("utf-8").replace(_MARK, text)


def _setting(attrs: dict[str, Any]) -> str:
    """Return the model, its numbers and the averages in words."""
    numbers, nodes = {**attrs.get("numbers", {}), "alpha": attrs.get("alpha")}, attrs.get("nodes")
    words = [f"{name} = {plain(value)}" for name, value in numbers.items() if value is not None]
    rule = f"{nodes['size']} nodes ({nodes['rule']}), {nodes['replicates']} replicates" if nodes else ""
    return ", ".join(filter(None, [attrs.get("model"), *words, rule]))


def _share_of(values: Float[np.ndarray, " n"]) -> _Share:
    """Return the function from values to shares of the length of the axis, which is logarithmic as in pictures."""
    scale: Any = np.log if is_geometric(values) else np.asarray
    low, high = scale(cell_edges(values))[[0, -1]]
    return lambda a: (scale(np.asarray(a, float)) - low) / (high - low)


def _axis_data(axis: tuple[str, Float[AnyArray, " n"]], share: _Share) -> dict[str, Any]:
    """Return name, label, values, and the places of cells and of ticks."""
    name, values = axis[0], np.asarray(axis[1], float)
    label = LABELS.get(name, name).replace("$", "")
    for tex, letter in _LETTERS.items():
        label = label.replace(tex, letter)
    ticks = range(0, len(values), -(-len(values) // _TICKS))
    return {
        "name": name,
        "label": label,
        "values": [f"{value:.4g}" for value in values],
        "centres": share(values).tolist(),
        "edges": share(cell_edges(values)).tolist(),
        "ticks": [[float(share(values[k])), f"{values[k]:.3g}"] for k in ticks],
    }


def _texts(numbers: dict[str, Any], stable: AnyArray, status: AnyArray) -> dict[str, list[list[str]]]:
    """Return the numbers of a state with their error bars, its stability and status, as text for every cell."""
    others = {
        "stable": lambda cell: "yes" if stable[cell] else "no",
        "status": lambda cell: Status.name_of(status[cell]),
    }

    def text(name: str, cell: tuple[int, int]) -> str:
        if name in others:
            return others[name](cell)
        value, bar = (part[cell] for part in numbers[name])
        return entries(*by_token(value, bar)) if np.isfinite(value).any() else "–"

    rows, columns = np.shape(status)
    names = (*_ROWS, *others)
    return {name: [[text(name, (j, i)) for i in range(columns)] for j in range(rows)] for name in names}


def _panels(numbers: dict[str, Any], stable: dict[str, Any], uninformed: AnyArray) -> list[dict[str, Any]]:
    """Return the curves of every panel: order parameters of the first token, losses, and errors."""

    def curve(branch: str, number: str, name: str, colour: str, dash: str = "", only: AnyArray | None = None) -> Any:
        arrays = [np.asarray(part).reshape(*np.shape(uninformed), -1)[..., 0] for part in numbers[branch][number]]
        value, bar = (np.where(np.isfinite(a) & (True if only is None else only), a, np.nan) for a in arrays)
        grids = {k: [[None if np.isnan(v) else v for v in row] for row in a.tolist()] for k, a in
                 (("value", value), ("bar", bar))}  # fmt: skip
        return {"name": name, "colour": to_hex(colour), "dash": dash, "stable": stable[branch].tolist(), **grids}

    pairs = [(branch, "m" if branch == "positional" else "theta") for branch in PAIR]
    orders = [curve(branch, order, f"{'θ' if order == 'theta' else order}, {branch}", COLOURS[branch])
              for branch, order in pairs]  # fmt: skip
    panels: list[dict[str, Any]] = [{"label": "order parameters", "lines": orders}]
    for number, label in (("train_loss", "training loss / d"), ("gen_error", "test error")):
        lines = [curve(branch, number, branch, COLOURS[branch]) for branch in PAIR]
        if np.any(uninformed):
            lines.append(curve("global minimum", number, "uninformed", COLOURS["uninformed"], _DASH, uninformed))
        panels.append({"label": label, "lines": lines})
    baseline = curve("positional", "gen_error_linear", "linear baseline", COLOURS["baseline"], _DASH)
    panels[-1]["lines"].append({**baseline, "stable": np.full(np.shape(uninformed), True).tolist()})
    return panels


def _boundary(line: Any, alpha_is_x: bool, x: _Share, y: _Share) -> dict[str, Any]:
    """Return a boundary as runs of neighbouring points, and bars of two error bars, in shares of both axes."""
    found = np.isfinite(line.alpha)
    bar = np.nan_to_num(line.stderr(), posinf=0.0)

    def points(alphas: AnyArray) -> Any:
        return np.stack([x(alphas), y(line.at)] if alpha_is_x else [x(line.at), y(alphas)], -1)

    runs = [points(line.alpha)[run].tolist() for run in runs_of(found)]
    bars = np.stack([points(line.alpha - 2 * bar), points(line.alpha + 2 * bar)], 1)[found].tolist()
    dash = "" if line.question == "alpha_c" else _DASH
    return {"name": line.question.replace("alpha", "α"), "dash": dash, "runs": runs, "bars": bars}
