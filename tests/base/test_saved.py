"""Results come back from files as they were, and files can hold nothing that is executed."""

import dataclasses
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.files import pack, packed
from tiedattn_jax.finite.diagnosis import Diagnosis, Finding
from tiedattn_jax.phases.table import Missing, Table


class Weighted(ta.DotProduct):
    """A layer of the user's."""

    weight: jax.Array = eqx.field(default=None, kw_only=True)


KINDS = (
    "state", "transition", "transition without sensitivities", "curve", "boundary", "diagram", "average",
    "model of the user's", "model with a penalty", "diagnosis of named tuples",
)  # fmt: skip


def results():
    """Results of all kinds: states, transitions, curves, boundaries, diagrams, models, with NaN and without."""
    point = made.fixed_point(scatter=(0.0, 1e-3, -1e-3, 2e-3))
    missing = eqx.tree_at(lambda p: p.replicates.gen_error, point, jnp.full(4, jnp.nan))
    cells = {name: np.full((2, 1, 2, 3), np.nan) for name in ("train_loss", "gen_error", "replicon")}
    cells["status"] = np.full((2, 1, 2, 3), float(ta.Status.absent))
    return {
        "state": missing,
        "transition": made.transition(branches=(point, point)),
        "transition without sensitivities": eqx.tree_at(
            lambda t: (t.sensitivities, t.sensitivities_stderr), made.transition(), (None, None)
        ),
        "curve": Table("semantic", ("sigma",), (np.array([0.4, 0.5, 0.6]),), (point, missing, Missing("failed", 4))),
        "boundary": made.events("alpha_c", "lam", np.arange(3.0), np.array([1.0, 1.0, np.nan]), np.full(3, np.nan)),
        "diagram": made.diagram(
            ("alpha", np.array([1.0, 2.0])), ("omega", np.ones(1)), cells, {"version": "0", "a": [1]}
        ),
        "average": ta.Average(jnp.array(1.0), jnp.array(0.1)),
        "model of the user's": Weighted(**vars(ta.DotProduct()), weight=jnp.ones(3)),
        "model with a penalty": ta.DotProduct(penalty=ta.L1(0.1)),
        "diagnosis of named tuples": Diagnosis(*[Finding(1.0, np.inf, False, "none is repeated")] * 7),
    }


@pytest.mark.parametrize("name", KINDS)
def test_round_trip(name, tmp_path):
    assert tuple(results()) == KINDS
    result = results()[name]
    result.save(tmp_path / "a.npz")
    loaded = ta.load(tmp_path / "a.npz")
    assert type(loaded) is type(result) and loaded == result and str(loaded) == str(result)
    assert jax.tree.structure(loaded) == jax.tree.structure(result)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(result), strict=True):
        assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(a, b)
    assert type(result).load(tmp_path / "a.npz") == result
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_equality():
    a, b = results()["state"], results()["state"]
    assert a == b and not a != b and hash(type(a))
    assert a != eqx.tree_at(lambda p: p.alpha, a, a.alpha + 1)
    assert a != eqx.tree_at(lambda p: p.replicates.train_loss, a, a.replicates.train_loss.at[0].add(1e-15))
    assert a != results()["curve"] and a != 1 and a != results()["curve"].cells[0]
    diagram = results()["diagram"]
    assert diagram == results()["diagram"] != dataclasses.replace(diagram, attrs={})
    average = ta.Average(jnp.array(1.0), jnp.array(0.1))
    assert average != ta.Average(jnp.array(1.0), jnp.float32(0.1)) and float(average) == 1.0
    with pytest.raises(TypeError):
        float(ta.Average(jnp.ones(2), jnp.ones(2)))
    traced = jax.jit(lambda x: ta.Average(x, x) == ta.Average(x, x))(1.0)  # inside jit it is an array, as in equinox
    assert bool(traced) and isinstance(traced, jax.Array)


def test_what_cannot_be_saved(tmp_path):
    class WithFunction(ta.DotProduct):
        scale: object = eqx.field(static=True, default=None, kw_only=True)

    model, message = WithFunction(**vars(ta.DotProduct()), scale=np.sin), "must consist of numbers, texts and arrays"
    with pytest.raises(ta.InputError, match=rf"result {message} .* in WithFunction\.scale"):
        model.save(tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_a_class_of_the_users_must_be_there(tmp_path):
    """Another process does not know the class: it says so, and imports nothing to look for it."""
    results()["model of the user's"].save(tmp_path / "a.npz")
    code = f"import tiedattn_jax as ta\ntry: ta.load({str(tmp_path / 'a.npz')!r})\nexcept ta.InputError as e: print(e)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("path needs the class Weighted of ") and "define or import it" in run.stdout


def test_other_files(tmp_path):
    path = tmp_path / "a.npz"
    results()["boundary"].save(path)
    with pytest.raises(ta.InputError, match="path must be a file of a FixedPoint, got path=Table"):
        ta.results.FixedPoint.load(path)
    with pytest.raises(ta.InputError, match=r"path must be a whole file that .*a\.np', where there is no file"):
        ta.load(tmp_path / "a.np")
    cut = path.read_bytes()[:-1]
    # Functions of the library and of others are no classes of results.
    names = [f"tiedattn_jax.theory.solve:{name}" for name in ("solve", "nothing", "np.save", "Problem.lane", "Path")]
    rows = [({"result": {"class": name, "fields": {}}}, "path needs the class") for name in names]
    average = {"class": "tiedattn_jax.base.results:Average", "fields": {"value": 1.0}}
    rows += [({"result": average}, "path must be of this version of Average"), ({"x": "alpha"}, "path ")]
    rows += [({"result": {"class": "os:system", "fields": {}}}, "path ")]
    for content, message in [(cut, "path must be a whole file"), *((packed(about, {}), text) for about, text in rows)]:
        path.write_bytes(content)
        with pytest.raises(ta.InputError, match=message):
            ta.load(path)


def test_types_of_arrays(tmp_path):
    """Arrays of the host stay there, and an array that numpy knows keeps its type."""
    average, path = ta.Average(np.array(1.0, np.float32), jnp.array(0.1, jnp.float32)), tmp_path / "a.npz"
    average.save(path)
    loaded = ta.load(path)
    assert isinstance(loaded.value, np.ndarray) and isinstance(loaded.stderr, jax.Array)
    assert loaded.value.dtype == loaded.stderr.dtype == np.float32 and len(pack(average)) == path.stat().st_size
    ta.Average(np.array(1.0), jnp.array(0.1)).save(path)
    with jax.enable_x64(False):  # arrays of jax become float32 there; those of numpy, as of a diagram, keep their type
        loaded = ta.load(path)
        assert (loaded.value.dtype, loaded.stderr.dtype) == (np.float64, np.float32)
