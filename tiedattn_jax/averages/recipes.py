"""Recipes of averages: which nodes a function averages over.

A recipe, such as ``Lines(9)``, is a value: it makes its nodes for the fields of any model. `Lines` breaks lines where
the proximal operator jumps; `Sobol`, `MonteCarlo` and `GaussHermite` have single nodes. The default recipes and their
sizes follow, and `make_rule`, through which every function reads its argument `nodes`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Real

from ..base.arrays import AnyArray, Number
from ..base.errors import InputError, array_of, as_flag, require, require_count, require_kind
from ..model.model import Model
from .lines import LineNodes, NormalsAndWeights, line_count, polar
from .nodes import single_nodes, sobol_normals
from .rules import REPLICATES, Fields, Rule, block_size, block_width, check_memory, check_rule, hermite_grid

# Nodes of a rule of single nodes. Errors are 5e-4 in q and 3e-3 in V where the proximal operator jumps.
NODES = 2**16
DEFAULT_ORDER = 9  # of lines
# With 1, 2 and 4 points, 4, 8 and 2 of 16 replicates lose the semantic state at alpha = 2, and the mean q is off by 49,
# 34 and 10 %. With 8 points one loses the positional state. With 16 none is lost, and q scatters by 13 and 43 %.
LEAST_SOBOL = 16
_SOBOL_LINES = 2**11  # about as many nodes as the product rule of order 9 has
_REACH = (5.4, 6.6)  # the ends of a line are drawn from this range, in standard deviations
_MAX_POINTS = 256  # largest number of nodes on a line
MAX_NODES = 2**24  # largest number of nodes of a product rule


@dataclass(frozen=True, repr=False)
class Recipe(abc.ABC):
    """A recipe of an averaging rule. Recipes compare by value, and are hashable.

    Attributes:
        seed: seed of all that differs between replicates.
        replicates: independent replicates of the nodes; their scatter gives the error bar.
        block: nodes that are solved together, which bounds the memory; by default as many as the caches hold.
    """

    _: KW_ONLY
    seed: int = 0
    replicates: int = REPLICATES
    block: int | None = None

    def __post_init__(self) -> None:
        require_count(self.replicates, "replicates")
        require_count(self.seed, "seed", 0)
        require(self.seed < 2**63, "seed", self.seed, "below 2^63")
        if self.block is not None:
            require_count(self.block, "block")

    def __repr__(self) -> str:
        """Return the call that makes the recipe, without options that have their default values."""
        first, *options = sorted(dataclasses.fields(self), key=lambda field: bool(field.kw_only))
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in options if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join([repr(getattr(self, first.name)), *changed])})"

    @abc.abstractmethod
    def rule(self, model: Model | Fields) -> Rule:
        """Return the rule for the fields of a model, in its dtype.

        Raises:
            InputError: the rule would not fit into the memory, or an option does not fit the number of fields.
        """

    @abc.abstractmethod
    def about(self, n: int, model: Model | Fields) -> Recipe:
        """Return this recipe with about `n` nodes in a replicate, and default blocks.

        Raises:
            InputError: there cannot be so many nodes.
        """


@dataclass(frozen=True, repr=False)
class Sobol(Recipe):
    """Scrambled Sobol points, mapped to Gaussians by the inverse cumulative distribution.

    Args:
        n: nodes in a replicate, a power of two, and at least 16.
        seed, replicates, block: see `Recipe`; every replicate has a scramble of its own.

    Raises:
        InputError: `n` is not such a power of two, or another argument is out of range.
    """

    n: int = NODES

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_power_of_two(self.n, "n", LEAST_SOBOL)

    def rule(self, model: Model | Fields) -> Rule:
        fields = Fields.of(model)
        normals = sobol_normals(fields.count, self.n, self.seed, self.replicates, "n")
        return single_nodes(fields, normals, np.full((self.replicates, self.n), 1 / self.n), self.block)

    def about(self, n: int, model: Model | Fields) -> Sobol:
        require(n >= LEAST_SOBOL, "nodes", n, f"at least {LEAST_SOBOL} for Sobol points")
        return dataclasses.replace(self, n=2 ** round(math.log2(n)), block=None)


@dataclass(frozen=True, repr=False)
class MonteCarlo(Recipe):
    """Independent Gaussian draws.

    Args:
        n: nodes in a replicate.
        seed, replicates, block: see `Recipe`.

    Raises:
        InputError: an argument is out of range.
    """

    n: int = NODES

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.n, "n")

    def rule(self, model: Model | Fields) -> Rule:
        fields = Fields.of(model)
        check_memory(self.n * fields.count, self.replicates, "n", self.n)
        draws = np.random.default_rng(self.seed).standard_normal((self.replicates, fields.count, self.n))
        return single_nodes(fields, draws, np.full((self.replicates, self.n), 1 / self.n), self.block)

    def about(self, n: int, model: Model | Fields) -> MonteCarlo:
        return dataclasses.replace(self, n=n, block=None)


@dataclass(frozen=True, repr=False)
class GaussHermite(Recipe):
    """A tensor Gauss-Hermite rule with `order` points in each of the L (r + t) fields.

    The Gaussian law is invariant under rotations, so the replicates are the grid itself and randomly rotated copies.
    Their scatter measures what the grid does not resolve. The rule is exact for polynomials up to degree 2 order - 1.

    Args:
        order: points in a field; the grid has at most 2^24 nodes.
        least_weight: nodes with a smaller weight are left out, for functions that are bounded; at most 1e-6. In four
            fields, at order 12, 1e-10 leaves out 58 % of the nodes, which have 1e-7 of the weight.
        seed, replicates, block: see `Recipe`; the seed is that of the rotations.

    Raises:
        InputError: an argument is out of range.
    """

    order: int = 16
    _: KW_ONLY
    least_weight: Number = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.order, "order")
        array_of(self.least_weight, "least_weight", "from 0 to 1e-6", lambda w: (w >= 0) & (w <= 1e-6), ndim=0)
        object.__setattr__(self, "least_weight", float(self.least_weight))

    def rule(self, model: Model | Fields) -> Rule:
        fields, order = Fields.of(model), self.order
        dim = fields.count
        most = int(2 ** (24 / dim))
        require(order**dim <= 2**24, "order", order, f"at most {most} for a grid of 2^24 nodes in {dim} fields")
        check_memory(order**dim * dim, self.replicates, "order", order)
        from scipy.stats import ortho_group  # not at the top, see `sobol_normals`

        grid, weight = hermite_grid(order, dim)
        grid, weight = grid[:, weight >= self.least_weight], weight[weight >= self.least_weight]
        weight = weight / weight.sum()
        rng = np.random.default_rng(self.seed)
        rotations = [np.eye(dim)] + [ortho_group.rvs(dim, random_state=rng) for _ in range(self.replicates - 1)]
        normals, weights = np.stack([t @ grid for t in rotations]), np.tile(weight, (self.replicates, 1))
        return single_nodes(fields, normals, weights, self.block, nested=False)  # no part of a tensor grid is a rule

    def about(self, n: int, model: Model | Fields) -> GaussHermite:
        order = round(n ** (1 / Fields.of(model).count))
        return dataclasses.replace(self, order=order, block=None)


@dataclass(frozen=True, repr=False)
class Lines(Recipe):
    """Lines that are broken where the proximal operator jumps: the precise recipe.

    With two teacher fields (L t = 2) and no noise, the lines form a product rule in the other dimensions. It has
    `order` + 2 angles and 3 `order` radii of the teacher's fields, and order / 2 + 1 places across the lines in each
    dimension. At the standard setting order 5 is right to 5e-4, 7 to 2e-4, 9 to 4e-5, 15 to 4e-6. Otherwise, or with
    `lines`, the lines are scrambled Sobol points. Their errors are 4 to 12 times those of as many single nodes
    (`Sobol`), so they serve as a check of these.

    Args:
        order: order of the product rule, which has at most 2^24 nodes.
        lines: Sobol lines in a replicate, a power of two, instead of the product rule.
        points: nodes on a line, at most 256; by default order + 15, and 24 with Sobol lines.
        jumps: most jumps of a line; on a line with more, nodes at fixed places are searched for one by one. By default
            L r + 1, or fewer if the points do not give two to each piece.
        direction: direction (L, r) of all lines in the space of the student's fields; by default each line follows the
            axis of the double well at its teacher's fields. A jump surface parallel to the lines is resolved only as
            well as by a rule of single nodes.
        even: whether the product rule has the parity (h, y) -> (-h, -y) and y -> -y of the loss exactly, at twice the
            nodes. Where both m and theta are free, a rule without it turns a pitchfork into an imperfect one.
        seed, replicates, block: see `Recipe`; the seed is that of the angles, places and lengths of the lines, or of
            the scrambles.

    Raises:
        InputError: a count is not a positive integer; `lines` is not a power of two; a piece of a line has fewer than
            two points, or a line more than 256; the direction is zero.
    """

    order: int = DEFAULT_ORDER
    _: KW_ONLY
    lines: int | None = None
    points: int | None = None
    jumps: int | None = None
    direction: Real[AnyArray, "L r"] | Sequence[Sequence[float]] | None = None
    even: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.order, "order")
        if self.lines is not None:
            _require_power_of_two(self.lines, "lines")
        for name in ("points", "jumps"):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name)
        if self.points is not None:
            _check_points(self.points, self.jumps or 1)
        object.__setattr__(self, "even", as_flag(self.even, "even"))
        if self.direction is not None:  # kept as tuples, which are hashable
            rows = array_of(self.direction, "direction", "finite, not zero and of shape (L, r)", np.any, ndim=2)
            object.__setattr__(self, "direction", tuple(map(tuple, rows.tolist())))

    def rule(self, model: Model | Fields) -> Rule:
        fields = Fields.of(model)
        L, r, t = fields.shape
        require(r > 0, "nodes", str(self), "single nodes, such as Sobol(2**13), where a student has no fields")
        across, is_product = L * r - 1, self.lines is None and L * t == 2 and not fields.noise
        points = self.points or (self.order + 15 if is_product else 24)
        jumps = self.jumps or max(1, min(L * r + 1, points // 2 - 1))
        _check_points(points, jumps)
        if self.direction is not None and np.shape(self.direction) != (L, r):
            raise InputError("direction", f"must be of shape {(L, r)} for this model, got {np.shape(self.direction)}")
        block = self.block or block_size()
        width = max(1, block // points)
        if is_product:
            sets = self._product_sets(fields, points, width)
        else:
            size = self.lines or _SOBOL_LINES
            coarse = 2 ** (block_width(size, width).bit_length() - 1)
            normals = [*sobol_normals(L * t + across, size, self.seed, self.replicates, "lines")]
            sets = [(a, np.full(a.shape[-1], 1 / a.shape[-1])) for a in (*normals, normals[0][:, :coarse])]
        arrays = self._arrays(fields, sets)

        def take(index: slice | int) -> LineNodes:
            selection = jax.tree.map(lambda a: jnp.asarray(a[index], fields.dtype), arrays)
            return LineNodes(**selection, points_per_line=points, jumps=jumps, block=block)

        return Rule(take(slice(self.replicates)), take(self.replicates))

    def about(self, n: int, model: Model | Fields) -> Lines:
        require(n <= MAX_NODES, "nodes", n, f"at most {MAX_NODES} on lines: use Sobol for more")
        order = max(k for k in range(5, 64, 2) if k == 5 or 1.5 * k**3 * (k + 15) <= n)
        return dataclasses.replace(self, order=order, block=None)

    def _product_sets(self, fields: Fields, points: int, width: int) -> list[NormalsAndWeights]:
        """Return the normals and weights of the product rule in all replicates, and of a coarse one at the end.

        Args:
            points: nodes on a line.
            width: most lines of the coarse replicate.
        """
        across = fields.tokens * fields.student - 1
        any_parity = self.even or fields.means
        size = line_count(self.order, any_parity, across)
        if size * points > MAX_NODES:
            message = f"must be smaller, or lines=2048 given, got order={self.order} with {size * points} nodes"
            raise InputError("order", f"{message}, over 2^24")
        check_memory(size * (2 + across), self.replicates, "order", self.order)
        rng, most = np.random.default_rng([self.seed, 1]), block_width(size, width)
        candidates = (k for k in range(1, self.order + 1) if line_count(k, any_parity, across) <= most)
        orders = [self.order] * self.replicates + [max(candidates, default=1)]
        return [polar(k, across, any_parity, self.even, rng) for k in orders]

    def _arrays(self, fields: Fields, sets: list[NormalsAndWeights]) -> dict[str, np.ndarray | None]:
        """Return the arrays of `LineNodes` by name, given the normals and weights of all replicates, the coarse last.

        The coarse replicate is padded with lines of zero weight.
        """
        (L, _, t), seed, size = fields.shape, self.seed, max(w.size for _, w in sets)
        normals, weight = (
            np.stack([np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])]) for a in arrays])
            for arrays in zip(*sets, strict=True)
        )
        reach = np.random.default_rng([seed, 2]).uniform(*_REACH, (len(sets), 2))
        direction = None if self.direction is None else np.array(self.direction)
        return {
            "teacher": normals[:, : L * t].reshape(len(sets), L, t, size),
            "across": normals[:, L * t :],
            "weight": weight,
            "offset": np.random.default_rng([seed, 3]).uniform(-0.49, 0.49, weight.shape) * (not self.even),
            "reach": np.mean(reach, 1, keepdims=True).repeat(2, 1) if self.even else reach,
            "direction": None if direction is None else np.broadcast_to(direction, (len(sets), *direction.shape)),
        }


def _check_points(points: int, jumps: int) -> None:
    floor = 2 * jumps + 2
    require(floor <= points <= _MAX_POINTS, "points", points, f"from {floor} to {_MAX_POINTS}, with jumps={jumps}")


def _require_power_of_two(n: Any, name: str, least: int = 1) -> None:
    """Raise an `InputError` unless argument `name` is a power of two, from `least` to 2^30."""
    require_count(n, name, least)
    if n & (n - 1):
        power = 2 ** (int(n).bit_length() - 1)
        raise InputError(name, f"must be a power of two for Sobol points, got {name}={n}: use {power} or {2 * power}")
    require(n <= 2**30, name, n, "at most 2^30 for Sobol points")


# The argument `nodes`: None for the default recipe, a number for about so many nodes of it, another recipe, or a rule.
AnyNodes = Recipe | Rule | int | np.integer | None

# Sizes of the default recipe by use. Relative errors of the order parameters at the standard setting are 5e-4 with
# 6,300 nodes (order 5, the smallest), 2e-4 with 16,632 (order 7), and 4e-5 with 35,640 (order 9).
SIZES = {
    "solve": 2**15,  # one state, and alpha_c to 8e-6
    "transition": 2**14,  # alpha_c on the command line: to 6e-5, in half the time
    "instances": 2**14,  # comparison with instances of finite size, whose scatter is larger
    "path": 2**13,  # a path in arclength, whose Newton steps all need the full Jacobian
    "curve": 2**12,  # curves for plots
    "grid": 2**11,  # hundreds of cells; losses are stationary, so their error is of second order
}
# Sobol points for uses that have no better recipe.
SOBOL_SIZES = {
    "fallback": 2**14,  # a state that the default lines do not resolve: a quarter of the time of `NODES`
    "labels": 2**13,  # labels of the optimal learner
    "label grids": 2**11,  # the same where each label has a grid of preimages
    "sphere": 2**18,  # students on a sphere, where the tokens are often too large for a grid
}


# Default recipes of smooth functions by use: tensor grids by number of fields, and points for more fields than these.
SMOOTH = {
    # All nodes are evaluated at once. The end of a trajectory is right to 2e-6; without the nodes of least weight it
    # moves by 2e-8.
    "sgd": (
        {k: GaussHermite(10, least_weight=1e-10, replicates=2, block=10**k) for k in range(5)},
        Sobol(2**13, block=2**13),
    ),
    "population": (
        {k: GaussHermite(order, replicates=3) for k, order in {1: 96, 2: 64, 3: 32, 4: 18}.items()},
        Sobol(2**15),
    ),
    # At the standard setting the test error of the optimal learner is right to 3e-6.
    "optimal": ({k: GaussHermite(12, least_weight=1e-10, replicates=3) for k in range(5)}, Sobol(2**13)),
}


def default_recipe(model: Model | Fields, n: int = SIZES["solve"], **options: Any) -> Lines | Sobol:
    """Return the default recipe for functions of the proximal operator, with about `n` nodes in a replicate.

    It is `Lines` of order 5 or more if student and teacher have two fields each and the loss has no kinks, and `Sobol`
    for other models, with the power of two that is nearest to `n`.

    Args:
        options: `seed`, `replicates` and `block` of the recipe.

    Raises:
        InputError: `n` is above 2^24 for lines, or another argument is out of range.
    """
    require_count(n, "n")
    fields = Fields.of(model)
    L, r, t = fields.shape
    recipe = Sobol if fields.nonsmooth or not L * r == L * t == 2 else Lines
    block = options.pop("block", None)
    return dataclasses.replace(recipe(**options).about(n, fields), block=block)


def smooth_recipe(model: Model | Fields, use: str) -> GaussHermite | Sobol:
    """Return the default recipe for averages of smooth functions, for a use in `SMOOTH`."""
    grids, points = SMOOTH[use]
    return grids.get(Fields.of(model).count, points)


def make_rule(nodes: AnyNodes, model: Model | Fields, default: Recipe | None = None) -> Rule:
    """Return the rule that an argument `nodes` asks for.

    Args:
        nodes: None for the default recipe, a number for about so many nodes of it, another recipe, or a rule.
        model: gives the fields.
        default: the default recipe; by default that of `default_recipe`.

    Raises:
        InputError: `nodes` is none of these, or a rule for other fields.
    """
    if isinstance(nodes, Rule):
        check_rule(nodes, model)
        return nodes
    fields = Fields.of(model)
    recipe = nodes
    if nodes is None or isinstance(nodes, (int, np.integer)):
        recipe = default or default_recipe(fields)
        if nodes is not None:
            require_count(nodes, "nodes")
            recipe = recipe.about(int(nodes), fields)
        return recipe.rule(fields)
    require_kind(nodes, "nodes", Recipe, "a recipe such as Lines(9), a number of nodes, or a rule")
    return nodes.rule(fields)
