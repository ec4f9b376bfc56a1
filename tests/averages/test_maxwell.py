"""Maxwell's construction for a loss whose jumps are known in closed form.

The loss is a cosine of the first field and a square of the second one. The proximal operator then jumps where the first
field is half way between two wells of the cosine, whatever the second field is.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import overlaps_of
from scipy import integrate, optimize, stats

import tiedattn_jax as ta
from tiedattn_jax.averages.lines import cuts
from tiedattn_jax.averages.maxwell import FieldLines, between, common_tangents, energy_gap, energy_profile, searched
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.theory.potentials import points_in

# The cosine is so low that a descent ends in the nearest well.
HEIGHT, WAVE, STIFF = 1.2 / 9, 3.0, 0.8
V = np.array([2.0, 0.7])
EDGE = np.pi / WAVE  # first field of the two jumps, at plus and minus this


class Waves(ta.DotProduct):
    def loss(self, Z, Y):
        u, v = Z[:, 0]
        return HEIGHT * (1 - jnp.cos(WAVE * u)) + 0.5 * STIFF * v**2 + 0 * jnp.sum(Y)


MODEL = Waves(**vars(ta.DotProduct()))


def well(h, k):
    """First field of the minimum in well number k, for a first student field h."""

    def slope(u):
        return (u - h) / V[0] + HEIGHT * WAVE * np.sin(WAVE * u)

    edge = np.arccos(-1 / (V[0] * HEIGHT * WAVE**2)) / WAVE  # between these bends the well is convex
    return optimize.brentq(slope, (2 * np.pi * k) / WAVE - edge, (2 * np.pi * k) / WAVE + edge, xtol=1e-14)


def nearest_well(h):
    return well(h, np.round(h / (2 * EDGE)))


def energy(u, h):
    """Energy of the first field alone."""
    return 0.5 * (u - h) ** 2 / V[0] + HEIGHT * (1 - np.cos(WAVE * u))


def lowest(h):
    """The proximal operator at student fields h, (2, N)."""
    return np.stack([np.array([nearest_well(a) for a in h[0]]), h[1] / (1 + STIFF * V[1])])


ORIGIN = np.array([[0.0, 0.1, -0.12, 0.05], [0.0, -0.3, 0.4, 0.7]])
DIRECTION = np.array([[0.45, 0.42, 0.46, 0.45], [0.2, 0.3, -0.1, 0.0]])
REACH = np.array([6.0, 5.5])


@pytest.fixture(scope="module")
def construction():
    """Lines, their profiles, and the jumps on them."""
    problem = ProxProblem(MODEL, jnp.asarray(V)[:, None, None], jnp.zeros((2, 1, ORIGIN.shape[1])))
    normal = DIRECTION / V[:, None]
    lines = FieldLines(problem, *map(jnp.asarray, (ORIGIN, DIRECTION, normal)))

    @jax.jit
    def run(lines):
        profile = energy_profile(lines, jnp.asarray(REACH))
        gaps, resolved = common_tangents(lines, profile, 3)
        t = profile.t[0] + (profile.t[-1] - profile.t[0]) * jnp.linspace(0.02, 0.97, 9)[:, None]
        sections = between(lines, profile, t)
        s = jnp.linspace(-5.0, 5.0, 9)[:, None] + 0 * t
        error = jnp.where(jnp.arange(9)[:, None] % 2 == 0, jnp.inf, 0.0) + 0 * s
        found = searched(lines, sections.replace(s=s, error=error))
        return profile, gaps, resolved, t, sections, s, found, energy_gap(gaps, s)

    return lines, *run(lines)


def test_jumps_of_a_cosine(construction):
    """Both jumps of a line are where its first field is half way between wells; their ends are the two wells."""
    lines, _, gaps, resolved, *_ = construction
    c = np.asarray(lines.normal)
    assert np.all(resolved)
    np.testing.assert_array_equal(gaps.real, np.array([True, True, False])[:, None] & np.ones(4, bool))
    for p, sign in enumerate((-1, 1)):
        s = (sign * EDGE - ORIGIN[0]) / DIRECTION[0]
        fields = ORIGIN + s * DIRECTION
        for side, k in ((gaps.left, min(sign, 0)), (gaps.right, max(sign, 0))):
            u = np.array([well(h, k) for h in fields[0]])
            z = np.stack([u, fields[1] / (1 + STIFF * V[1])])
            np.testing.assert_allclose(side.z[p], z, atol=1e-7)
            np.testing.assert_allclose(side.s[p], s, rtol=1e-7)
            np.testing.assert_allclose(side.t[p], np.sum(c * z, 0), rtol=1e-7, atol=1e-8)
            parts = 0.5 * (z - ORIGIN) ** 2 / V[:, None], HEIGHT * (1 - np.cos(WAVE * u)), 0.5 * STIFF * z[1] ** 2
            np.testing.assert_allclose(side.energy[p], parts[0].sum(0) + parts[1] + parts[2], rtol=1e-8)
            bends = np.stack([1 / V[0] + HEIGHT * WAVE**2 * np.cos(WAVE * u), 0 * u + 1 / V[1] + STIFF])
            step = c / bends  # over the second derivatives of the energy in both fields
            np.testing.assert_allclose(side.slope[p], 1 / np.sum(c * step, 0), rtol=1e-5)
            np.testing.assert_allclose(side.tangent[p], step / np.sum(c * step, 0), rtol=1e-4, atol=1e-8)
        # The shallower well ends where its second derivative is zero.
        bend = np.arccos(-1 / (V[0] * HEIGHT * WAVE**2)) / WAVE
        reach = bend + V[0] * HEIGHT * WAVE * np.sin(WAVE * bend)
        ends = [(2 * k * EDGE - side * reach - ORIGIN[0]) / DIRECTION[0] for k, side in
                ((max(sign, 0), 1), (min(sign, 0), -1))]  # fmt: skip
        for bound, end in zip(gaps.fold, ends, strict=True):
            assert np.all(np.abs(bound[p] - end) < 0.2 * np.abs(ends[1] - ends[0])), (bound[p], end)


def test_profiles_of_a_cosine(construction):
    """Sections within the profile are stationary at their place of the line, and lie in their plane."""
    lines, profile, _, _, t, sections, *_ = construction
    ends = [np.sum(np.asarray(lines.normal) * lowest(ORIGIN + s * DIRECTION), 0) for s in (-REACH[0], REACH[1])]
    np.testing.assert_allclose(profile.t, np.linspace(*ends, len(profile.t)), rtol=1e-3, atol=1e-3)
    assert np.all(sections.settled)
    z, s = np.asarray(sections.z), np.asarray(sections.s)
    h = ORIGIN + s[:, None] * DIRECTION
    slope = (z - h) / V[:, None]
    slope += np.stack([HEIGHT * WAVE * np.sin(WAVE * z[:, 0]), STIFF * z[:, 1]], 1)
    np.testing.assert_allclose(slope, 0, atol=1e-6)
    np.testing.assert_allclose(np.sum(np.asarray(lines.normal) * z, 1), t, rtol=1e-9, atol=1e-12)


def test_searches_on_lines_replace_what_has_not_settled(construction):
    *_, sections, s, found, _ = construction
    for k in range(9):
        if k % 2:
            np.testing.assert_array_equal(found.z[k], sections.z[k])
        else:
            np.testing.assert_allclose(found.z[k], lowest(np.asarray(ORIGIN + s[k] * DIRECTION)), atol=1e-7)
    assert not np.any(found.error) and np.all(found.settled)


def test_the_gap_is_the_distance_to_the_jump(construction):
    lines, _, gaps, *_, s, _, gap = construction
    expected = np.full(s.shape, np.inf)
    for p, sign in enumerate((-1, 1)):
        at = (sign * EDGE - ORIGIN[0]) / DIRECTION[0]
        width = np.sum(np.asarray(lines.normal * (gaps.right.z[p] - gaps.left.z[p])), 0)
        is_near = (s > gaps.fold[0][p]) & (s < gaps.fold[1][p])
        expected = np.where(is_near, np.minimum(expected, np.abs(s - at) * width), expected)
    assert np.any(np.isfinite(expected)) and np.any(np.isinf(expected))
    np.testing.assert_allclose(gap, expected, rtol=1e-6)


def test_averages_on_lines_of_a_cosine():
    """Means over broken lines, and the density of jumps, are those of one-dimensional integrals."""
    rule = ta.Lines(7, replicates=1, direction=[[1.0], [0.3]], block=2**15).rule(MODEL).replicate(0)
    q = np.array([0.29, 0.16])
    x = dataclasses.replace(overlaps_of(0.1, 1.0), q=jnp.asarray(q)[:, None, None], V=jnp.asarray(V)[:, None, None])
    block = jax.tree.map(lambda a: a[0], rule.blocks())
    found = jax.jit(points_in)(MODEL, x, rule, block)
    points = jax.tree.map(np.asarray, found)
    h = np.sqrt(q)[:, None] * points.student[:, 0]
    likely = np.flatnonzero(points.weight > 1e-8)[::37]
    np.testing.assert_allclose(points.z[:, 0][:, likely], lowest(h[:, likely]), atol=1e-6)
    assert np.all(points.resolved)
    density = stats.norm(scale=q[0] ** 0.5)

    def integrand(a):
        return energy(nearest_well(a), a) * density.pdf(a)

    envelope = 2 * integrate.quad(integrand, 0, 3.0, points=[EDGE], epsabs=1e-10)[0]
    envelope += 0.5 * STIFF * q[1] / (1 + STIFF * V[1])
    problem = ProxProblem(MODEL, x.V, jnp.asarray(np.zeros((2, 1, h.shape[1]))))
    energies = np.asarray(jax.jit(ProxProblem.energy)(problem, found.z, jnp.asarray(h[:, None])))
    np.testing.assert_allclose(points.weight @ energies, envelope, rtol=2e-4)
    # The energies of two wells come apart by the distance of the wells over V.
    step = well(EDGE, 1) - well(EDGE, 0)
    np.testing.assert_allclose(np.sum(points.jumps.density), 2 * density.pdf(EDGE) * V[0] / step, rtol=2e-3)
    is_jump = points.jumps.density > 0
    np.testing.assert_allclose(points.jumps.step[0, 0, is_jump], step, rtol=1e-5)
    np.testing.assert_allclose(points.jumps.step[1, 0, is_jump], 0, atol=1e-5)
    near = np.flatnonzero((points.gap < 0.1) & (points.weight > 1e-8))
    assert len(near) > 20
    others = np.abs(EDGE - np.abs(h[0, near])) * step / V[0]
    np.testing.assert_allclose(points.gap[near], others, rtol=1e-2, atol=1e-5)


def test_where_the_nodes_of_a_line_are_cut():
    """A cut is at the share of the line below the jump, rounded to a node; every piece has at least two nodes."""
    for places, real, ends, count, expected in (
        ((0.3, 2.0), 2, (6.0, 5.0), 22, [0, 13, 16, 22]), ((-3.0, 3.0), 2, (6.0, 6.0), 24, [0, 6, 18, 24]),
        ((0.0, 0.01), 2, (6.0, 6.0), 6, [0, 2, 4, 6]), ((-9.0, 0.0), 1, (6.0, 6.0), 10, [0, 2, 10, 10]),
        ((8.0, 0.0), 0, (6.0, 6.0), 10, [0, 10, 10, 10]),
    ):  # fmt: skip
        arrays = jnp.array(places)[:, None], jnp.arange(2)[:, None] < real, jnp.array(ends)
        cut = jax.jit(cuts, static_argnums=3)(*arrays, count)
        np.testing.assert_array_equal(cut[:, 0], expected)
