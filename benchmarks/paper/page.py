"""The page of all figures; each section has a text, a picture, and a table with the published values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiedattn_jax.base.report import with_error


class Row(NamedTuple):
    """One number of a figure.

    Attributes:
        quantity: name of the number.
        published, published_error: published value and error, None if unknown.
        ours, error: our value and its error bar, None if it has none.
        reason: why the values differ, or why there is no published value.
    """

    quantity: str
    published: float | None
    published_error: float | None
    ours: float
    error: float | None
    reason: str = ""

    def cells(self) -> list[str]:
        """Return the row as text: quantity, published, here, difference, reason."""
        if self.published is None or math.isnan(self.ours):
            published, difference = "-", "-"
        else:
            published = _number(self.published, self.published_error)
            gap = self.ours - self.published
            difference = f"{gap:+.2g}" + (f" ({gap / self.published:+.1%})" if self.published else "")
        return [self.quantity, published, _number(self.ours, self.error), difference, self.reason]


def _number(value: float, error: float | None) -> str:
    if math.isnan(value):
        return "none in range"
    return f"{value:.5g}" if error is None else with_error(value, error)


def section(title: str, text: str, picture: str | None, rows: Sequence[Row]) -> str:
    """Return a figure's section of the page, in Markdown."""
    lines = [f"## {title}", "", text, ""]
    if picture is not None:
        lines += [f"![{title}]({picture})", ""]
    if rows:
        lines += ["| quantity | published | here | difference | reason |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(row.cells())} |" for row in rows]
        lines += [""]
    return "\n".join(lines)


HEAD = """# The paper's figures, recomputed

This page shows every figure of Cui, Behrens, Krzakala and Zdeborova, *A phase transition between positional and
semantic learning in a solvable model of dot-product attention* ([arXiv:2402.03902](https://arxiv.org/abs/2402.03902)),
computed with this library. `python -m benchmarks.paper FIGURE` computes one figure at reduced size, and with `--full`
at the published size. It writes data, pictures (PNG and PDF) and this page to the folder of `--out`.

The default setting has two tokens, omega = .3, sigma = .5, lambda = .01 and A = [[.6, .4], [.4, .6]]. Numbers in
brackets are in units of the last digits. For theory they are error bars of the averages. For simulations they are
standard errors over instances or runs, or the scatter where the table says so. Bands and bars in pictures reach two of
them to either side. "Published" is the number of the paper's text, of its figures or of its public data.

The published code trains Figs. 2, 3 and 7 to 9 by 5000 steps of gradient descent at rate .15, one instance a call, from
the teacher and from weights along the encodings with a norm of one. It is not at a minimum then. Here training goes on
to zero gradient, from both starts, unless a figure says otherwise. For Figs. 10, 12 and 13 there is no published code.
"""


def page(sections: Iterable[str]) -> str:
    """Return the whole page, in Markdown."""
    return "\n".join([HEAD, *sections])
