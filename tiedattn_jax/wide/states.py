"""States of a wide layer: on one replicate, at one alpha, and the spectrum of the trained matrix."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ..averages.program import program
from ..base.errors import InputError, is_concrete, require
from ..base.report import Description, Printed, Row, picture, rows_of
from ..base.results import Column, InTable, Replicated, error_bar
from .layer import Layer
from .spectrum import convolution

_DENSE = 0.01  # share of the eigenvalues that a density may miss
_LEARNED = 1e-6  # shift of the scores by the encodings, over that by the content, from which on it counts as learned
# The regions: a state has learned one of these.
NOTHING, CONTENT, POSITION, BOTH = (
    "no attention to content",
    "content",
    "position, no attention to content",
    "content and position",
)


class WideNumbers(eqx.Module):
    """Numbers of a matrix S, of a state or of a run, in which a run and its theory are compared.

    Attributes:
        q: Tr S S^T / d.
        m: Tr S S*^T / d.
        trace: trace norm of S over d: Tr S / d of a tied layer, the mean singular value of an untied one.
        train_loss: loss of a training sentence.
        gen_error: loss on fresh sentences without noise.
        energy: least risk over d^2; that of the matrix, for a run.
        share: share of the eigenvalues, or singular values, of S that are not zero.
        largest: the largest of them.
    """

    q: Float[Array, "*R"]
    m: Float[Array, "*R"]
    trace: Float[Array, "*R"]
    train_loss: Float[Array, "*R"]
    gen_error: Float[Array, "*R"]
    energy: Float[Array, "*R"]
    share: Float[Array, "*R"]
    largest: Float[Array, "*R"]

    @classmethod
    def of(cls, owner: Any, **changed: Any) -> WideNumbers:
        """Return the numbers that a state or a run has, with some of them changed."""
        names = [field.name for field in fields(WideNumbers)]
        return WideNumbers(**{name: getattr(owner, name) for name in names} | changed)


class WideState(WideNumbers):
    """A fixed point on the averages of one replicate.

    Attributes:
        V: response.
        Lam, M, N: conjugates; the trained matrix is (Y - tau)_+ / Lam with Y = M S* + sqrt(N) G.
        offset: numbers of the encodings, (k,): the shift of the scores in the directions that the loss sees if the
            encodings are long, the spike R if their length is of order one.
        slack: distance of the offset from the boundary of the cone, see `_cone`; negative if it would cross it freely.
        distance: ||S - S*||^2 / d.
        replicon: below one in a state of stable replica symmetry; infinite where the bound on the rank cuts through
            eigenvalues, not in a gap between them.
        margin: least determinant of the proximal equations; proximal points are minima where it is positive.
        jumps: share of sentences, or of their rows if untied, at which two starts of the proximal operator differ; the
            lower point is taken.
        binds: whether the bound on the rank binds.
        residual: length of the last step, in logarithms of the conjugates and units of the teacher's scores.
        status: `Status` as an integer.
    """

    V: Float[Array, "*R"]
    Lam: Float[Array, "*R"]
    M: Float[Array, "*R"]
    N: Float[Array, "*R"]
    offset: Float[Array, "*R k"]
    slack: Float[Array, "*R"]
    distance: Float[Array, "*R"]
    replicon: Float[Array, "*R"]
    margin: Float[Array, "*R"]
    jumps: Float[Array, "*R"]
    binds: Array
    residual: Float[Array, "*R"]
    status: Int[Array, "*R"]


class WidePoint(Replicated):
    """The state of a wide layer at one alpha. Numbers are means over the replicates of the averages."""

    model: Layer
    alpha: Float[Array, "*batch"]
    replicates: WideState
    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    SHOWN: ClassVar = {
        "q": "Tr S S^T / d",
        "m": "Tr S S*^T / d, overlap with the teacher",
        "V": "response",
        "trace": "trace norm of S / d",
        "train_loss": "loss of a training sentence",
        "gen_error": "loss on fresh sentences without noise",
        "energy": "least risk over d^2",
        "distance": "||S - S*||^2 / d",
        "share": "rank of S / d",
        "largest": "largest eigenvalue or singular value of S",
        "replicon": "stability, below one",
    }

    @property
    def title(self) -> str:
        return f"wide {type(self.model).__name__} at alpha = {self.alpha:g}"

    @property
    def in_table(self) -> InTable:
        shown = "region", "q", "m", "trace", "train_loss", "gen_error", "share", "largest"
        figures = "theory.wide_figure", "diagrams.region_figure"
        headline = "states of a wide layer"
        return InTable(
            "distance", figures=figures, shown=shown, headline=lambda table: headline, summary=_count_regions
        )

    @property
    def shifts(self) -> Float[Array, "*batch L L"]:
        """Shift of the scores of every pair of tokens by the encodings, up to what the loss does not see."""
        return self._with_shifts(self.offset)

    def _with_shifts(self, offset: Array) -> Array:
        return jnp.tensordot(offset, self.model.shift_basis, 1)

    def position_shift(self) -> tuple[Array, Array]:
        """Return by how much the encodings raise the score of a token with itself over others, with its error bar."""
        L, shifts = self.model.tokens, self.model.shift_basis
        own = jnp.trace(shifts, axis1=1, axis2=2)
        weight = own / L - (jnp.sum(shifts, (1, 2)) - own) / max(L * (L - 1), 1)
        return self.offset @ weight, error_bar(self.replicates.offset @ weight)

    @property
    def learned_positions(self) -> int:
        """The number of directions, of L - 1, in which the encodings shift the scores of pairs of tokens.

        The shifts form a matrix T (L, L), positive semidefinite in a tied layer, of which the loss does not see a
        common shift. There, a direction c with sum c_a = 0 is learned if c^T T c > 0. A tied layer whose target asks
        for less cannot learn it and has zero there. An untied layer learns all directions that the loss sees.
        """
        if not self.offset.size:
            return 0
        L = self.model.tokens
        centre = np.eye(L) - 1 / L
        T = np.asarray(self.shifts) @ centre
        sizes = np.linalg.eigvalsh(centre @ T) if self.model.sides == 1 else np.linalg.svd(T, compute_uv=False)
        return int(np.sum(sizes > _LEARNED * np.sqrt(float(self.model.teacher.rho))))

    @property
    def region(self) -> str:
        """The name of what the state has learned."""
        content, position = bool(self.q > 0), self.learned_positions > 0
        return (NOTHING, CONTENT, POSITION, BOTH)[content + 2 * position]

    def numbers(self) -> dict[str, Column]:
        """Return alpha, what the state has learned, and all numbers with their error bars; NaN if it is not `ok`."""
        means, bars = self.shown()
        numbers = {name: (float(a), float(bars[name])) for name, a in means.items()}
        if self.offset.size and self.model.has_own_scores:
            value, bar = self.position_shift()
            numbers["position"] = float(value), float(bar)
        if not self.ok:
            numbers = dict.fromkeys(numbers, (np.nan, np.nan))
        return {"alpha": (float(self.alpha), None), "region": (self.region if self.ok else "", None), **numbers}

    @property
    def R(self) -> Float[Array, "*batch"]:
        """Spike of encodings whose length is of order one: sqrt(d) R is the eigenvalue of S along their line."""
        if self.model.length is None:
            raise InputError("encodings", f"must be a number for a spike R, got {self.model.encodings!r}")
        return self.offset[..., 0]

    def details(self) -> list[Row]:
        if self.model.length is None:
            numbers, bars = {"shifts": self.shifts}, {"shifts": error_bar(self._with_shifts(self.replicates.offset))}
        else:
            numbers, bars = {"R": self.offset[..., 0]}, {"R": self.stderr.offset[..., 0]}
        rows = rows_of(numbers, bars) if self.offset.size else []
        breaks = bool(jnp.isinf(self.replicates.replicon).any())
        bound = "rank", "bounded by kappa", "replica symmetry is weakly broken: the replicon is infinite" * breaks
        single = "float32", "", "about six digits; jax_enable_x64 gives the others"
        is_single = self.alpha.dtype == jnp.float32
        return [*rows, *[bound] * bool(self.replicates.binds.any()), *[single] * is_single]

    def spectrum(self) -> WideSpectrum:
        """Return the density of the eigenvalues of the trained matrix that are not zero, and the share of zeros.

        Raises:
            InputError: the result is a batch, or the eigenvalues fill more separate intervals than there are nodes for.
        """
        if jnp.ndim(self.alpha):
            raise InputError("alpha", "must be one number for a spectrum, got a batch: index it first")
        spectrum = replace(_spectrum(self), noun=self.model.LAW.NOUN)
        mass = jnp.sum(spectrum.weight) + spectrum.zeros
        if is_concrete(mass) and float(abs(mass - 1)) > _DENSE:
            text = "must have fewer separate eigenvalues for a density: `share`, `trace` and the like hold for it"
            raise InputError("teacher", f"{text}, got {self.model.teacher!r}")
        return spectrum


def _count_regions(table: Any) -> list[Row]:
    names, counts = np.unique(table.values("region")[table.found], return_counts=True)
    return [(f"{count:6d}", str(name)) for name, count in zip(names, counts, strict=True)]


class WideSpectrum(Printed):
    """Spectrum of the trained matrix S of a wide layer: of its eigenvalues, or its singular values if it is untied.

    Attributes:
        values: eigenvalues at the nodes of the density, (n,), increasing.
        density: density there; it integrates to one minus `zeros`.
        weight: share of the eigenvalues that a node stands for.
        zeros: share of the eigenvalues that are zero.
        edge: largest eigenvalue.
        noun: "eigenvalues" or "singular values".
    """

    values: Float[Array, " n"]
    density: Float[Array, " n"]
    weight: Float[Array, " n"]
    zeros: Float[Array, ""]
    edge: Float[Array, ""]
    noun: str = eqx.field(static=True, default="eigenvalues")

    def quantile(self, level: ArrayLike) -> Float[Array, "..."]:
        """Return the eigenvalues below which shares `level` of all eigenvalues lie; zero up to `zeros`.

        Raises:
            InputError: a level is not in [0, 1].
        """
        if is_concrete(level):
            levels = np.asarray(level)
            require((levels >= 0) & (levels <= 1), "level", levels, "in [0, 1]")
        mass = self.zeros + jnp.cumsum(self.weight) - 0.5 * self.weight
        return jnp.interp(jnp.asarray(level), mass, self.values, left=0.0, right=self.edge)

    def describe(self) -> Description:
        return Description("spectrum of the trained matrix", numbers=rows_of({"zeros": self.zeros, "edge": self.edge}))

    plot = picture("theory.spectrum_figure", "the density of the eigenvalues")


@program
def _spectrum(point: WidePoint) -> WideSpectrum:
    tau, curve = point.model.tau, convolution(point.model.teacher, point.M, point.N)
    Y = curve.nodes(curve.first_place(tau, point.model.kappa, jnp.any(point.replicates.binds)).real)
    density, weight = (curve.sides * a for a in (Y.density * point.Lam, Y.weight))
    return WideSpectrum((Y.y - tau) / point.Lam, density, weight, 1 - point.share, point.largest)
