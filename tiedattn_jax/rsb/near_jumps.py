"""Nodes on lines that are dense where the proximal operator jumps.

They serve averages whose integrand is smooth but changes within a short distance of each jump. The nodes are laid for
one state and then stay where they are; the jumps may move by a part of that distance.
"""

from __future__ import annotations

import itertools

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Float

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
    lines, teacher, jumps, is_jump = _jumps_of_lines(model, x, replicate)
    low, high = -float(replicate.reach[0]), float(replicate.reach[1])
    rules = [nodes_on_line(np.sort(s[mask]), low, high, distance) for s, mask in zip(jumps.T, is_jump.T, strict=True)]
    line = np.repeat(np.arange(len(rules)), [len(s) for s, _ in rules])
    s, weight = (np.concatenate(parts) for parts in zip(*rules, strict=True))
    weight = weight * np.exp(-0.5 * s**2) * np.asarray(replicate.weight)[line]
    weight /= weight.sum()
    is_significant = weight > 1e-14
    line, s = line[is_significant], s[is_significant]
    h = (lines.origin[:, line] + s * lines.direction[:, line]).reshape(*model.shape[:2], -1)
    student, _ = whiten(model, x, h, lines.y[..., line])
    return Block(np.asarray(student), np.asarray(teacher[..., line]), weight[is_significant])


@eqx.filter_jit
@precise
def _jumps_of_lines(
    model: Model, x: Overlaps, replicate: LineNodes
) -> tuple[Lines, Float[Array, "L t N"], Float[Array, "jumps N"], Bool[Array, "jumps N"]]:
    """Return all lines of a replicate, their teacher normals, where they jump, and whether they do."""
    y = teacher_fields(model, replicate.teacher)
    lines = lay(model, x, y, replicate.across, *directions(model, x, y, replicate.direction))
    profile = energy_profile(model, x.V, lines, replicate.reach)
    gaps, _ = common_tangents(model, x.V, lines, profile, replicate.jumps)
    return lines, replicate.teacher, gaps.left.s, gaps.real


def nodes_on_line(
    jumps: Float[np.ndarray, " jumps"], low: float, high: float, distance: float
) -> tuple[Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
    """Return nodes and weights on [low, high], dense around the `jumps`."""
    width = _REACH * distance
    inner = jumps[(low < jumps) & (jumps < high)]
    ends = np.unique(np.clip([low, high, *inner, *(inner - width), *(inner + width)], low, high))
    nodes, weights = [], []
    for a, b in itertools.pairwise(ends):
        is_dense = np.any(np.abs(inner - 0.5 * (a + b)) < width)
        x, w = legendre(_DENSE if is_dense else 2 + int(np.ceil(_DENSITY * (b - a))))
        nodes.append(a + (b - a) * x)
        weights.append((b - a) * w)
    return np.concatenate(nodes), np.concatenate(weights)
