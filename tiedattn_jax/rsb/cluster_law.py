"""The law of the fields within a cluster, and the weight of a sheet of minimisers; see `clusters`.

The search for the jump of the proximal operator within a cluster; see `clusters`.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..averages.minima import local_minima, pick, well_axis
from ..averages.moreau import ProxProblem
from ..averages.prox import Prox, search
from ..base.arrays import apply, either, inverse, matvec, precise, total
from ..model.model import Model

_MIN_CURVATURE = 0.3  # least curvature of the weight over that of the Gaussian law; smaller ones are raised to it


class Cluster(eqx.Module):
    """Nodes of the inner average at N student fields, K at each, M = K N.

    Axes of size M have the node outermost. The weights are those of the standard normal law; the factor exp(-s E) is
    not in them.
    """

    normals: Float[Array, "L r M"]  # standard normals xi
    log_weight: Float[Array, "K N"]  # logarithms of the weights
    z: Float[Array, "L r M"]  # minimisers of the proximal problem at the nodes


class ClusterLaw(NamedTuple):
    """N fields, and the law of the fields h + C xi in the clusters around them; n = L r, and M = K N for K places."""

    model: Model
    V: Float[Array, "L r r"]  # response
    spread: Float[Array, "L r r"]  # Cholesky root C of q1 - q0
    h: Float[Array, "L r N"]  # student fields
    y: Float[Array, "L t N"]  # teacher fields

    def at(self, xi: Float[Array, "n M"]) -> tuple[ProxProblem, Float[Array, "L r M"]]:
        """Return the proximal problem at standard normals, and the student's fields there."""
        count = xi.shape[-1] // self.h.shape[-1]
        shift = apply(self.spread, xi.reshape(*self.h.shape[:2], -1))
        return ProxProblem(self.model, self.V, jnp.tile(self.y, count)), jnp.tile(self.h, count) + shift

    def pull(self, z: Float[Array, "L r N"]) -> Float[Array, "n N"]:
        """Return C^T V^{-1} z.

        For z = h - (minimiser at h) this is the gradient of the envelope E in xi.
        """
        return apply(jnp.swapaxes(self.spread, -1, -2), apply(inverse(self.V), z)).reshape(-1, z.shape[-1])

    def search(self, xi: Float[Array, "n M"]) -> Prox:
        """Search for the global minimisers at standard normals."""
        return search(*self.at(xi))

    def follow(
        self, z: Float[Array, "L r M"], xi: Float[Array, "n M"]
    ) -> tuple[Float[Array, "L r M"], Float[Array, " M"]]:
        """Return the minimisers next to z at standard normals, and their energies."""
        problem, fields = self.at(xi)
        return local_minima(problem, z, fields)

    @precise
    def weight_of(self, low: Float[Array, "L r N"], s: Float[Array, ""]) -> SheetWeight:
        """Return the weight exp(-|xi|^2 / 2 - s E) of a sheet, with E expanded to second order around xi = 0.

        Args:
            low: minimisers of the sheet at xi = 0.
            s: Parisi parameter.
        """
        (L, r, N), n = self.h.shape, low.shape[0] * low.shape[1]
        eye, block = jnp.eye(n, dtype=low.dtype), jax.scipy.linalg.block_diag(*self.spread)[..., None]
        # The Hessian of E in the field is V^{-1} (I - dz/dh); in xi it is C^T V^{-1} (I - dz/dh) C.
        force_jacobian = eye[..., None] - ProxProblem(self.model, self.V, self.y).jacobian(low)
        hessian = apply(inverse(self.V), force_jacobian.reshape(L, r, -1)).reshape(n, n, N)
        hessian = jnp.einsum("abn,bcn,cdn->nad", jnp.swapaxes(block, 0, 1), hessian, block)
        values, vectors = jnp.linalg.eigh(eye + 0.5 * s * (hessian + jnp.swapaxes(hessian, 1, 2)))
        values = jnp.maximum(values, _MIN_CURVATURE)

        def power(exponent: float) -> Float[Array, "n n N"]:
            """Return a power of the weight's precision matrix."""
            return jnp.moveaxis((vectors * values[:, None] ** exponent) @ jnp.swapaxes(vectors, 1, 2), 0, -1)

        centre = -s * matvec(power(-1.0), self.pull(self.h - low))
        return SheetWeight(centre, power(-0.5), power(0.5), -0.5 * jnp.sum(jnp.log(values), 1))


class SheetWeight(NamedTuple):
    """The Gaussian weight of a sheet at N fields, in xi: that of xi = c + R eta with eta standard normal; n = L r."""

    centre: Float[Array, "n N"]  # c
    root: Float[Array, "n n N"]  # R, symmetric
    inverse_root: Float[Array, "n n N"]  # R^{-1}
    log_det: Float[Array, " N"]  # log det R

    def normals(self, eta: Float[Array, "n *places #N"]) -> Float[Array, "n *places N"]:
        """Return xi = c + R eta at eta."""
        n, N = self.centre.shape
        axes = (1,) * (eta.ndim - 2)
        return self.centre.reshape(n, *axes, N) + matvec(self.root.reshape(n, n, *axes, N), eta)

    def along(self, u: Float[Array, "n N"], xi: Float[Array, "n *places N"]) -> Float[Array, "*places N"]:
        """Return u . R^{-1} (xi - c): the coordinates of xi along directions u of eta."""
        n, N = self.centre.shape
        axes = (1,) * (xi.ndim - 2)
        return total(matvec(self.inverse_root, u).reshape(n, *axes, N) * (xi - self.centre.reshape(n, *axes, N)))

    def pulled(self, force: Float[Array, "n N"]) -> Float[Array, "n N"]:
        """Turn a gradient in xi into a gradient in eta."""
        return matvec(self.root, force)


MAX_DISTANCE = 14.0  # largest distance of a jump along a line, in standard deviations; further out it plays no role
_PROBES = (-4.0, -2.0, 0.0, 2.0, 4.0)  # places along a line that are searched for a second minimum
_HALVINGS = 5  # halvings of the section between two probes in which the minimiser changes most
# The minimiser makes a step if its change over the last half is more than this share of its change over the whole
# section. After five halvings the share is 1/32 for an even change.
_STEP = 0.045


class RoughJump(NamedTuple):
    """Rough place of the jump or step next to N fields, n = L r."""

    low: Float[Array, "L r N"]  # global minimisers at the fields; the "lower sheet" is theirs
    direction: Float[Array, "n N"]  # unit vectors in eta of lines through the centre of the lower sheet's weight
    jump: Float[Array, " N"]  # rough place of a jump or a step on this line, exactly zero without one
    # Minimisers on both sides of it; the lower sheet is the left one.
    sides: tuple[Float[Array, "L r N"], Float[Array, "L r N"]]
    breaks: Bool[Array, " N"]  # whether there is a jump: two minima; False at a step


def find_rough_jump(
    model: Model,
    V: Float[Array, "L r r"],
    spread: Float[Array, "L r r"],
    h: Float[Array, "L r N"],
    y: Float[Array, "L t N"],
    s: Float[Array, ""],
) -> RoughJump:
    """Find the rough place of the jump or step next to each field.

    Args:
        V: response.
        spread: Cholesky root C of q1 - q0.
        h, y: student and teacher fields.
        s: Parisi parameter.
    """
    law = ClusterLaw(model, V, spread, h, y)
    origin = law.search(jnp.zeros((h.shape[0] * h.shape[1], h.shape[2]), h.dtype))
    return RoughJump(origin.z, *_rough_jump(law, law.weight_of(origin.z, s), origin))


class _Pair(NamedTuple):
    """Two minima a and b at one place in xi at each of N fields; all arrays may have a leading axis of P places.

    For a step they are the single minima on both sides of it.
    """

    gap: Float[Array, "*P N"]  # energy of b above that of a; infinite where there is only one minimum
    place: Float[Array, "*P n N"]  # standard normals
    a: Float[Array, "*P L r N"]  # the lower minimiser
    b: Float[Array, "*P L r N"]  # the upper one


def _rough_jump(
    law: ClusterLaw, weight: SheetWeight, origin: Prox
) -> tuple[
    Float[Array, "n N"], Float[Array, " N"], tuple[Float[Array, "L r N"], Float[Array, "L r N"]], Bool[Array, " N"]
]:
    """Find the rough place of the jump next to each field, from the place where two minima are closest in energy.

    Places are probed at the field and along one line through the centre of the weight. Where they all have a single
    minimum, a step on this line is looked for. The line of the result points from sheet to sheet, the direction in
    which their energy difference changes fastest.

    Args:
        law: fields and law of the clusters.
        weight: weight of the lower sheet.
        origin: global minimisers at the fields, at xi = 0.

    Returns:
        All fields of `RoughJump` but `low`.
    """
    # The line that is probed points to the second minimum if the field has one, else along the double well of the loss.
    direction = law.pull(origin.other - origin.z)
    axis = law.pull(well_axis(law.model, law.y, law.h.shape[1], 12))
    u, _ = _unit(weight.pulled(jnp.where(jnp.isfinite(origin.gap), direction, axis)))
    pairs, step = _probe(law, weight, u)
    candidates = jax.tree.map(
        lambda p, q: jnp.concatenate([p[None], q]), _Pair(origin.gap, jnp.zeros_like(u), origin.z, origin.other), pairs
    )
    breaks = jnp.any(jnp.isfinite(candidates.gap), 0)
    closest = _Pair(*(pick(p, jnp.argmin(candidates.gap, 0)) for p in candidates))
    closest = closest._replace(b=law.follow(closest.b, closest.place)[0])
    gap, place, a, b = either(breaks, closest, step)
    is_split = breaks | (gap == 0)
    push, size = _unit(weight.pulled(law.pull(b - a)))
    u = jnp.where(is_split, push, u)
    # Along u the energy difference falls by `size` per unit.
    x = weight.along(u, place) + gap / jnp.where(size > 0, size, 1.0)
    # The field itself, at xi = 0, must be on the left.
    is_turned = is_split & (weight.along(u, jnp.zeros_like(u)) > x)
    u, x = jnp.where(is_turned, -u, u), jnp.where(is_turned, -x, x)
    pair = jnp.where(is_turned, b, a), jnp.where(is_turned, a, b)
    return u, jnp.where(is_split, jnp.clip(x, -MAX_DISTANCE, MAX_DISTANCE), 0.0), pair, breaks


def _probe(law: ClusterLaw, weight: SheetWeight, u: Float[Array, "n N"]) -> tuple[_Pair, _Pair]:
    """Search for minima along lines through the centre of the weight, at more places where the lowest changes most.

    There may be a second minimum only close to the jump, so the search closes in on the steepest change.

    Args:
        law: fields and law of the clusters.
        weight: weight of the lower sheet.
        u: directions of the lines in eta.

    Returns:
        Two pairs. The first holds the two lowest minima at all places, with a leading axis. The second holds the
        lowest minima on both sides of the steepest change; its gap is zero if this is a step, and infinite otherwise.
    """

    def at(x: Float[Array, "P N"]) -> _Pair:
        """Return the minima at places along the lines."""
        xi = weight.normals(x * u[:, None]).reshape(len(u), -1)
        prox = law.search(xi)
        arrays = (a.reshape(*a.shape[:-1], *x.shape) for a in (prox.gap, xi, prox.z, prox.other))
        return _Pair(*(jnp.moveaxis(a, -2, 0) for a in arrays))

    def change(a: Float[Array, "P L r N"]) -> Float[Array, "P-1 N"]:
        """Return the largest change of an entry between neighbouring places."""
        return jnp.max(jnp.abs(jnp.diff(a, axis=0)), (1, 2))

    def steepest(
        x: Float[Array, "P N"], z: Float[Array, "P L r N"]
    ) -> tuple[Float[Array, "2 N"], Float[Array, "2 L r N"]]:
        """Return the section with the largest change, by its ends."""
        widest = jnp.argmax(change(z), 0)

        def ends(a: Float[Array, "P *z N"]) -> Float[Array, "2 *z N"]:
            return jnp.stack([pick(a, widest), pick(a, widest + 1)])

        return ends(x), ends(z)

    probes = jnp.broadcast_to(jnp.asarray(_PROBES, u.dtype)[:, None], (len(_PROBES), u.shape[-1]))
    coarse = at(probes)
    section = steepest(probes, coarse.a)

    def halve(
        ends: tuple[Float[Array, "2 N"], Float[Array, "2 L r N"]], _: None
    ) -> tuple[tuple[Float[Array, "2 N"], Float[Array, "2 L r N"]], _Pair]:
        """Return the half of a section with the larger change, and the minima at its middle."""
        (low, high), (a, b) = ends
        middle = 0.5 * (low + high)
        centre = at(middle[None])
        return steepest(jnp.stack([low, middle, high]), jnp.stack([a, centre.a[0], b])), centre

    (x, z), refined = lax.scan(halve, section, length=_HALVINGS)
    pairs = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, 0]]), coarse, refined)
    is_step = change(z)[0] > _STEP * change(section[1])[0]
    return pairs, _Pair(jnp.where(is_step, 0.0, jnp.inf), weight.normals(jnp.mean(x, 0) * u), z[0], z[1])


def _unit(v: Float[Array, "n N"]) -> tuple[Float[Array, "n N"], Float[Array, " N"]]:
    """Return unit vectors along vectors, and the lengths of the latter."""
    size = jnp.sqrt(total(v**2))
    return v / jnp.where(size > 0, size, 1.0), size
