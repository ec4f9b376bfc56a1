"""Recompute every figure of the paper.

    python -m benchmarks.paper                      # all figures, at reduced size
    python -m benchmarks.paper 2 3 --full           # Figs. 2 and 3, simulations at the published size
    python -m benchmarks.paper 2 --full --draw      # draw Fig. 2 again from its files

Computing writes files to DIR/data/reduced or DIR/data/full and resumes where an earlier call was interrupted. Drawing
reads these files and writes DIR/paper/figure_NAME.png and .pdf. It also writes the page DIR/paper.md, which has a
section for every figure that was drawn into this folder so far.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.files import write_whole
from tiedattn_jax.base.programs import use_compilation_cache

from .data import Bar, Task
from .figures import FIGURES, Entry, chosen
from .page import page, section

_LARGE = 110_000  # bytes above which a PNG is reduced to a palette


def main(argv: list[str] | None = None) -> int:
    """Compute and draw figures; return the exit code. Bad input ends with exit code 2 and one line on stderr."""
    formatter: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.paper", description=__doc__, formatter_class=formatter)
    names = ", ".join(entry.name for entry in FIGURES)
    parser.add_argument("figures", nargs="*", metavar="figure", help=f"{names}; all by default")
    parser.add_argument("--full", action="store_true", help="simulations at the published size")
    parser.add_argument("--draw", action="store_true", help="compute nothing, draw what is there")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="results by default")
    args = parser.parse_args(argv)
    try:
        entries = chosen(args.figures)
    except KeyError as unknown:
        parser.error(f"argument figure: must be among {names}, got {unknown}")
    jax.config.update("jax_enable_x64", True)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        use_compilation_cache()
    data = args.out / "data" / ("full" if args.full else "reduced")
    for entry in entries:
        start = time.perf_counter()
        try:
            if not args.draw:
                entry.compute(Task(args.full, data, _bars(entry.name)))
            _draw(entry, data, args.out, args.full)
        except InputError as problem:
            parser.error(str(problem))
        print(f"{entry.title}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def _draw(entry: Entry, data: Path, out: Path, full: bool) -> None:
    """Write the picture and the section of a figure, and the page of all existing sections."""
    picture, results = None, entry.load(data)
    if entry.draw is not None:
        figure, picture = entry.draw(results), f"figure_{entry.name}"
        for kind in ("png", "pdf"):
            write_whole(out / "paper" / f"{picture}.{kind}", _content(figure, kind))
        picture = f"paper/{picture}.png"
    text = section(entry.title, entry.caption(full), picture, entry.rows(results))
    write_whole(out / "data" / f"figure_{entry.name}.md", text.encode())
    paths = [out / "data" / f"figure_{entry.name}.md" for entry in FIGURES]
    write_whole(out / "paper.md", page(path.read_text() for path in paths if path.exists()).encode())


def _content(figure: Figure, kind: str) -> bytes:
    """Return a picture as the content of a file; a large PNG gets a palette, which reduces its size by two thirds."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    if kind != "png" or content.tell() < _LARGE:
        return content.getvalue()
    smaller = io.BytesIO()
    Image.open(content).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(smaller, "png", optimize=True)
    return smaller.getvalue()


def _bars(name: str) -> Callable[[str], Bar]:
    """Return a function that makes a progress bar for each computation; bars show on a terminal only."""

    def bar_for(part: str) -> Bar:
        bar = tqdm(desc=f"Fig. {name}, {part}", disable=None, leave=False)

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        return progress

    return bar_for


if __name__ == "__main__":
    raise SystemExit(main())
