"""Nodes on lines that are dense where the proximal operator jumps.

They serve averages whose integrand is smooth but changes within a short distance of each jump. The nodes are laid for
one state and then stay where they are; the jumps may move by a part of that distance.
"""

from __future__ import annotations

import itertools

import equinox as eqx
import jax
import numpy as np

from ..averages.fields import teacher_fields, whiten
from ..averages.lines import LineNodes, directions, lay, legendre
from ..averages.maxwell import Lines, common_tangents, energy_profile
from ..averages.nodes import Block
from ..base.linalg import precise
from ..model.model import Model
from ..model.overlaps import Overlaps

_REACH = 6.0  # how far the dense nodes go to either side of a jump, in units of the distance
_DENSE = 10  # dense nodes on each side
_DENSITY = 4.0  # other nodes per standard deviation; the minimiser is also steep beyond the end of a jump


def lay_nodes(model: Model, x: Overlaps, replicate: LineNodes, distance: float) -> Block:
    """Lay Gauss-Legendre nodes on the lines of a replicate, in pieces that end at the jumps and around them.

    The weights sum to one.

    Args:
        x: overlaps at which the jumps are located.
        distance: distance over which the integrand changes at a jump, in standard deviations of the student's fields.
    """
    lines, teacher, at, real = _jumps(model, x, replicate)
    low, high = -float(replicate.reach[0]), float(replicate.reach[1])
    rules = [nodes_on_line(np.sort(s[keep]), low, high, distance) for s, keep in zip(at.T, real.T, strict=True)]
    which = np.repeat(np.arange(len(rules)), [len(s) for s, _ in rules])
    s, weight = (np.concatenate(parts) for parts in zip(*rules, strict=True))
    weight = weight * np.exp(-0.5 * s**2) * np.asarray(replicate.weight)[which]
    weight /= weight.sum()
    kept = weight > 1e-14
    which, s = which[kept], s[kept]
    h = (lines.origin[:, which] + s * lines.direction[:, which]).reshape(*model.shape[:2], -1)
    student, _ = whiten(model, x, h, lines.y[..., which])
    return Block(np.asarray(student), np.asarray(teacher[..., which]), weight[kept])


@eqx.filter_jit
@precise
def _jumps(model: Model, x: Overlaps, replicate: LineNodes) -> tuple[Lines, jax.Array, jax.Array, jax.Array]:
    """Return all lines of a replicate, their teacher normals, where they jump, (P, lines), and whether they do."""
    y = teacher_fields(model, replicate.teacher)
    lines = lay(model, x, y, replicate.across, *directions(model, x, y, replicate.direction))
    profile = energy_profile(model, x.V, lines, replicate.reach)
    gaps, _ = common_tangents(model, x.V, lines, profile, replicate.jumps)
    return lines, replicate.teacher, gaps.left.s, gaps.real


def nodes_on_line(jumps: np.ndarray, low: float, high: float, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights on [low, high], dense around the `jumps`."""
    wide = _REACH * distance
    inside = jumps[(low < jumps) & (jumps < high)]
    ends = np.unique(np.clip([low, high, *inside, *(inside - wide), *(inside + wide)], low, high))
    nodes, weights = [], []
    for a, b in itertools.pairwise(ends):
        dense = np.any(np.abs(inside - 0.5 * (a + b)) < wide)
        x, w = legendre(_DENSE if dense else 2 + int(np.ceil(_DENSITY * (b - a))))
        nodes.append(a + (b - a) * x)
        weights.append((b - a) * w)
    return np.concatenate(nodes), np.concatenate(weights)
