"""Tools of the suite: timing of a call, files of results, and pictures."""

from __future__ import annotations

import datetime
import io
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from tiedattn_jax.base.files import write_whole
from tiedattn_jax.plotting.style import panels

from .published_method import machine

_LINE = "{:15} {:27} {:>7}  {:>9}  {:24} {:>19}  {}"
HEADER = _LINE.format(
    "benchmark", "case", "size", "compile s", "median s per", "quartiles s", "error; times as fast as"
)
_COLUMNS = 4  # columns of panels in a picture


@dataclass(frozen=True)
class Measurement:
    """Times of one call.

    Attributes:
        benchmark: name in `BENCHMARKS`.
        case: what is called.
        size: size as the benchmark defines it.
        unit: what the run times refer to, such as "iteration".
        compile: seconds of the first call minus the median of the later ones; None if nothing is compiled.
        seconds: run time per unit, median over the repeats.
        lower, upper: quartiles of the run time per unit.
        repeat: number of repeats.
        error: relative error, if there is a reference value.
        ratios: run time of comparators over that of this case, by the comparator's case, in the same unit and run.
            Above one, this case is faster.
        load: average number of busy processes in the minute before.
    """

    benchmark: str
    case: str
    size: int
    unit: str
    compile: float | None
    seconds: float
    lower: float
    upper: float
    repeat: int
    error: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    load: float = 0.0

    def __str__(self) -> str:
        """Return a line of the table below `HEADER`."""
        compiled, error = (f"{v:.2g}" if v is not None else "-" for v in (self.compile, self.error))
        run, spread = f"{self.seconds:.3g} {self.unit}", f"{self.lower:.3g} to {self.upper:.3g}"
        ratios = "".join(f"; {ratio:.3g} x {name}" for name, ratio in self.ratios.items())
        return _LINE.format(self.benchmark, self.case, self.size, compiled, run, spread, error + ratios)


def measure(
    benchmark: str,
    case: str,
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    repeat: int,
    unit: str = "call",
    units: int | Callable[[Any], int] = 1,
    compiled: bool = True,
    error: Callable[[Any], float] | None = None,
    against: Sequence[Measurement] = (),
) -> Measurement:
    """Time `fn(*args)`, each call until all arrays of its result are ready.

    Args:
        benchmark, case, size, unit: see `Measurement`.
        repeat: number of measured calls; a first call that compiles is not among them.
        units: number of units in one call, or a function that returns it for the result.
        compiled: whether the first call compiles; if not, it is measured like the others.
        error: function that returns the relative error of the result.
        against: measurements of comparators.
    """
    load = os.getloadavg()[0]
    times = []
    for _ in range(repeat + compiled):
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    first, runs = times[0], times[1:] if compiled else times
    lower, median, upper = np.quantile(runs, [0.25, 0.5, 0.75]).tolist()
    count = units(result) if callable(units) else units
    return Measurement(
        benchmark=benchmark,
        case=case,
        size=size,
        unit=unit,
        compile=first - median if compiled else None,
        seconds=median / count,
        lower=lower / count,
        upper=upper / count,
        repeat=repeat,
        error=None if error is None else float(error(result)),
        ratios={comparator.case: comparator.seconds / (median / count) for comparator in against},
        load=load,
    )


def about() -> dict[str, Any]:
    """Return what the times depend on (machine, versions, device), and the date."""
    device = {"device": jax.devices()[0].device_kind, "devices": jax.device_count()}
    return {"date": datetime.date.today().isoformat(), **machine(), **device}


def path_in(folder: Path, metadata: dict[str, Any]) -> Path:
    """Return the path of the file for a machine and a date."""
    name = metadata["cpu"] if metadata["device"] == "cpu" else metadata["device"]
    slug = re.sub(r"[^a-z0-9]+", "-", f"{name} {metadata['cores']} cores".lower())
    return folder / f"{metadata['date']}-{slug}.json"


def write(path: Path, metadata: dict[str, Any], measurements: Sequence[Measurement]) -> list[Measurement]:
    """Write measurements to a file; it keeps those of other benchmarks if its `about` is the same.

    Returns:
        All measurements in the file.
    """
    names = {m.benchmark for m in measurements}
    stored, earlier = read(path) if path.exists() else (None, [])
    unchanged = [m for m in earlier if stored == metadata and m.benchmark not in names]
    content = {"about": metadata, "measurements": [asdict(m) for m in [*unchanged, *measurements]]}
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
    return [*unchanged, *measurements]


def read(path: Path) -> tuple[dict[str, Any], list[Measurement]]:
    """Return the `about` of a file and its measurements."""
    content = json.loads(path.read_text())
    return content["about"], [Measurement(**row) for row in content["measurements"]]


def draw(path: Path, measurements: Sequence[Measurement], sizes: dict[str, str]) -> list[Path]:
    """Draw two pictures beside the file: error against time, if any errors are known, and time against size.

    Args:
        path: path of the file.
        measurements: measurements in the file.
        sizes: meaning of a size, by benchmark.

    Returns:
        Paths of the pictures.
    """
    pictures = {}
    if scored := [m for m in measurements if m.error]:
        pictures["precision"] = _picture(scored, "seconds", "error", {m.benchmark: "relative error" for m in scored})
    pictures["size"] = _picture(measurements, "size", "seconds", sizes)
    for name, content in pictures.items():
        write_whole(path.with_name(f"{path.stem}-{name}.png"), content)
    return [path.with_name(f"{path.stem}-{name}.png") for name in pictures]


def _picture(measurements: Sequence[Measurement], x: str, y: str, labels: dict[str, str]) -> bytes:
    """Return a PNG with a panel for each benchmark and a line for each case; `labels` are of the axis without time."""
    names = list(dict.fromkeys(m.benchmark for m in measurements))
    columns = min(len(names), _COLUMNS)
    rows = math.ceil(len(names) / columns)
    with panels(3.4 * columns, 3.4 * rows, names[:columns], rows=rows, legends=False) as (figure, axes):
        for name, axis in itertools.zip_longest(names, axes.flat):
            if name is None:
                axis.set_visible(False)
                continue
            group = [m for m in measurements if m.benchmark == name]
            for index, case in enumerate(dict.fromkeys(m.case for m in group)):
                line = sorted((m for m in group if m.case == case), key=lambda m: m.size)
                spread = np.array([[m.seconds - m.lower, m.upper - m.seconds] for m in line]).T
                bars: Any = {"xerr" if x == "seconds" else "yerr": spread}
                points = ([getattr(m, k) for m in line] for k in (x, y))
                style: Any = {"fmt": "os^v"[index // 4 % 4] + "-", "color": f"C{index % 4}", "ms": 3, "lw": 1}
                axis.errorbar(*points, **bars, **style, label=case)
            axis.set(xscale="log", yscale="log")
            for side in (axis.xaxis, axis.yaxis):
                low, high = side.get_view_interval()
                logarithmic = LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,))
                side.set_major_locator(MaxNLocator(2) if high < 2 * low else logarithmic)
                side.set_major_formatter("{x:.6g}")
                side.set_minor_locator(NullLocator())
            axis.set_title(name, loc="left")
            seconds = f"seconds a {group[0].unit}"
            axis.set(**{f"{k}label": seconds if v == "seconds" else labels[name] for k, v in (("x", x), ("y", y))})
            axis.legend(fontsize=6, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(-0.2, -0.2))
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
