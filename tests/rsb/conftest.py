"""What several tests of the room take: conjugates of 1RSB at random, and equations of 1RSB in closed form."""

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES

from tiedattn_jax.rsb import fixed_points, newton
from tiedattn_jax.rsb.potentials import OneRSBOverlaps, averages_at


def _random_hats(r: int = 1) -> OneRSBOverlaps:
    rng = np.random.default_rng(0)

    def positive(size):
        a = rng.standard_normal((2, r, r))
        return size * (a @ a.swapaxes(1, 2) + np.eye(r))

    q0, width, V = map(positive, (1e-4, 1e-6, 0.01))
    theta, m = 1e-3 * rng.standard_normal((2, r, 1)), 1e-3 * rng.standard_normal((2, r))
    return OneRSBOverlaps(*map(jnp.asarray, (q0 + width, q0, V, theta, m)))


@pytest.fixture(scope="session")
def random_hats():
    """A function of the rank of a student that returns random conjugates of two tokens, with qhat1 > qhat0 > 0."""
    return _random_hats


class Valley:
    """Equations that are linear in all coordinates but log s; in u = log s - its root, the elevation is exp(-u^2 / 2).

    The ground state is at u = 0. For ``|u| > 1`` the loss is convex: Newton's method alone would go away from there.

    Args:
        width: q1 - q0 at the solution of the first replicate, over the q of the RS state; others have a little more.
        basin: distance of log q1 from its root, by replicate, from which on residuals are constant.
    """

    s, elevation, width_laid = 500.0, 1e-6, 0.1

    def __init__(self, width=0.05, basin=None):
        self.rs = made.fixed_point(CASES[1], jump_mass=jnp.full(4, 0.3))
        self.width, self.basin = width, basin or {}
        self.laid, self.looks = [], []  # widths that nodes were laid for, and whether looks were asked for derivatives

    def state(self, width, factor=1.0):
        """The RS state of a replicate with clusters of a relative width, and with its q times a factor."""
        x = jax.tree.map(lambda a: a[0], self.rs.replicates.overlaps)
        return OneRSBOverlaps(factor * x.q, (factor - width) * x.q, x.V, x.theta, x.m)

    def root(self, k):
        """The solution of a replicate, and its coordinates."""
        x = self.state(self.width + 0.001 * k, 1.05)
        return x, np.asarray(newton.coordinates(x, jnp.asarray(self.s))[0])

    def problem(self, k=0, ground=True):
        """The problem of a replicate, which stands in for its averages."""
        return newton.Equations1RSB(
            self.rs.model, self.rs.alpha, k, jnp.array([0.0, 1.0]), jnp.asarray(ground),
            self.rs.replicates.train_loss[k],
        )  # fmt: skip

    def look(self, problem, x, s, with_slopes):
        self.looks.append(bool(with_slopes))
        v, (_, root) = np.asarray(newton.coordinates(x, s)[0]), self.root(problem.averages)
        n, u = len(v), v[-1] - root[-1]
        lift = self.elevation * np.exp(-0.5 * u**2)
        residual = np.append((root - v)[:-1], u * lift)
        if abs(np.log(v[0] / root[0])) > self.basin.get(problem.averages, np.inf):
            residual = np.append(0.2 * np.abs(v[:-1]), 0.0)
        matrix = np.eye(n)
        matrix[-1, -1] = (u**2 - 1) * lift
        sizes = np.append(np.maximum(np.abs(v[:-1]), 1e-3), 1.0)
        rows = np.append(sizes[:-1], self.elevation)
        loss = np.asarray(problem.rs_loss) + lift
        slopes = jax.tree.map(lambda a: (problem.averages + 1.0) * np.ones_like(a), problem.model)
        return newton.Residuals(
            v, residual, matrix, sizes, rows, loss, slopes, np.asarray(2.0), np.asarray(-u * lift), x
        )

    def answer(self, call):
        if call.function is newton._look:
            return self.look(*call.arguments)
        if call.function is newton.Solution.moving:
            return "moving"
        if call.function is averages_at:
            _, _, x, _, lines = call.arguments
            self.laid.append(float(((x.q1 - x.q0) / self.rs.replicates.overlaps.q[0])[0, 0, 0]))
            return lines
        assert call.function is fixed_points._lay
        _, _, k, _ = call.arguments
        return fixed_points._Layout(self.state(self.width_laid), jnp.asarray(0.2 * self.s), _Lines(k))

    def run(self, path):
        return made.answer_path(path, self.answer)


class _Lines(int):
    """A replicate in place of its averages, and of their lines."""

    @property
    def lines(self):
        return self


@pytest.fixture
def valley():
    return Valley
