"""Results come back from files as they were, and files can hold nothing that is executed."""

import sys

import equinox as eqx
import jax
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.files import packed
from tiedattn_jax.base.saved import pack
from tiedattn_jax.finite.diagnosis import Diagnosis, Finding
from tiedattn_jax.phases.table import Missing, Table


class Weighted(ta.DotProduct):
    """A layer of the user's."""

    weight: jax.Array = eqx.field(default=None, kw_only=True)


POINT = made.fixed_point(scatter=(0.0, 1e-3, -1e-3, 2e-3))
MISSING = eqx.tree_at(lambda p: p.replicates.gen_error, POINT, np.full(4, np.nan))
CELLS = {name: np.full((2, 1, 2, 3), np.nan) for name in ("train_loss", "gen_error", "replicon")}
CELLS["status"] = np.full((2, 1, 2, 3), float(ta.Status.absent))
CURVE = Table("semantic", ("sigma",), (np.array([0.4, 0.5, 0.6]),), (POINT, MISSING, Missing("failed", 4)))
DIAGRAM = made.diagram(("alpha", np.array([1.0, 2.0])), ("omega", np.ones(1)), CELLS, {"version": "0", "a": [1]})
RESULTS = {
    "state": MISSING,
    "transition": made.transition(branches=(POINT, POINT)),
    "transition without sensitivities": eqx.tree_at(
        lambda t: (t.sensitivities, t.sensitivities_stderr), made.transition(), (None, None)
    ),
    "curve": CURVE,
    "boundary": made.events("alpha_c", "lam", np.arange(3.0), np.array([1.0, 1.0, np.nan]), np.full(3, np.nan)),
    "diagram": DIAGRAM,
    "average": ta.results.Average(np.array(1.0), jax.device_put(0.1)),
    "single precision": ta.results.Average(np.array(1.0, np.float32), jax.device_put(np.float32(0.1))),
    "model of the user's": Weighted(**vars(ta.DotProduct()), weight=np.ones(3)),
    "model with a penalty": ta.DotProduct(penalty=ta.L1(0.1)),
    "diagnosis of named tuples": Diagnosis(*[Finding(1.0, np.inf, False, "none is repeated")] * 7),
}


@pytest.mark.parametrize("name", RESULTS)
def test_round_trip(name, tmp_path):
    result = RESULTS[name]
    result.save(tmp_path / "a.npz")
    loaded = ta.load(tmp_path / "a.npz")
    assert type(loaded) is type(result) and loaded == result and str(loaded) == str(result)
    assert jax.tree.structure(loaded) == jax.tree.structure(result)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(result), strict=True):
        assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(a, b)
    assert type(result).load(tmp_path / "a.npz") == result
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_what_cannot_be_saved(tmp_path):
    members = {"__annotations__": {"scale": object}, "scale": eqx.field(static=True, default=None)}
    own = type("WithFunction", (ta.DotProduct,), members)
    message = r"result must consist of numbers, texts and arrays .* in WithFunction\.scale"
    with pytest.raises(ta.InputError, match=message):
        own(**vars(ta.DotProduct()), scale=np.sin).save(tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_a_loss_that_was_changed_after_saving(tmp_path):
    """The numbers of the file are those of the earlier loss, and a warning says so; another comment changes nothing."""

    def layer(power):
        def attention(self, fields):
            return jax.nn.softmax((fields @ fields.T) ** power)

        name = {"attention": attention, "__module__": __name__, "__qualname__": "Edited"}
        return type("Edited", (ta.DotProduct,), name)(**vars(ta.DotProduct()))

    first, _, last = (layer(power) for power in (1, 1, 3))
    for saved in (last, jax.tree.map(lambda a: np.stack([a, a]), last)):
        saved.save(tmp_path / "a.npz")
        assert ta.load(tmp_path / "a.npz") == saved  # warnings are errors
    first.save(tmp_path / "a.npz")
    with pytest.warns(UserWarning, match="Edited computes something else than when .*a.npz"):
        ta.load(tmp_path / "a.npz")


def test_other_files(tmp_path):
    """Functions of the library are no classes of results, and a module of the user's is not imported to find one."""
    path, module, base = tmp_path / "a.npz", "a_module_that_is_not_imported", "tiedattn_jax.theory.solve"
    RESULTS["boundary"].save(path)
    with pytest.raises(ta.InputError, match="path must be a file of a FixedPoint, got path=Table"):
        ta.results.FixedPoint.load(path)
    with pytest.raises(ta.InputError, match=r"path must be a whole file that .*a\.np', where there is no file"):
        ta.load(tmp_path / "a.np")
    for name, fields, message in (
        *((f"{base}:{name}", {}, "path needs the class") for name in ("solve", "nothing", "np.save", "Problem.lane")),
        (f"{module}:Own", {}, "path needs the class Own of .*define or import it"),
        ("tiedattn_jax.base.results:Average", {"value": 1.0}, "path must be of this version of Average"),
        ("os:system", {}, "path "),
        ("", None, "path must be a whole file"),
    ):
        about = {"x": "alpha"} if fields is None else {"result": {"class": name, "fields": fields}}
        path.write_bytes(packed(about, {}))
        with pytest.raises(ta.InputError, match=message):
            ta.load(path)
    path.write_bytes(pack(RESULTS["boundary"])[:-1])
    with pytest.raises(ta.InputError, match="path must be a whole file"):
        ta.load(path)
    assert module not in sys.modules


def test_types_of_arrays(tmp_path):
    """Arrays of the host stay there, and an array that numpy knows keeps its type."""
    RESULTS["average"].save(tmp_path / "a.npz")
    assert len(pack(RESULTS["average"])) == (tmp_path / "a.npz").stat().st_size
    with jax.enable_x64(False):  # arrays of jax become float32 there; those of numpy, as of a diagram, keep their type
        with pytest.warns(UserWarning, match="rounded to float32.*jax_enable_x64"):
            loaded = ta.load(tmp_path / "a.npz")
        assert (loaded.value.dtype, loaded.stderr.dtype) == (np.float64, np.float32)
