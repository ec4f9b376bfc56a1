"""Programs that a folder stores from one process to the next; a new `stored_program` stands for another process."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import tiedattn_jax as ta
from tiedattn_jax.base import files, programs as compiled
from tiedattn_jax.base.arrays import inverse
from tiedattn_jax.base.derivatives import derivative_along
from tiedattn_jax.base.files import packed
from tiedattn_jax.base.programs import stored_program
from tiedattn_jax.model.overlaps import BRANCHES, admissible, symmetric
from tiedattn_jax.phases.locate import Guess
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.observables import gen_error_in
from tiedattn_jax.theory.paths import Call, together
from tiedattn_jax.theory.solve import branch_start

TRACED_IN = compiled.traced_in


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder for traced programs; compiled ones stay in the folder of all tests."""
    monkeypatch.setattr(compiled, "traced_in", TRACED_IN)
    monkeypatch.setattr(compiled.Traced, "folder", tmp_path / "traced")
    return tmp_path / "traced"


@pytest.fixture
def traced(monkeypatch):
    """The programs that were traced in order to be stored."""
    functions, original = [], compiled.export.export
    monkeypatch.setattr(
        compiled.export, "export", lambda fn, **options: functions.append(fn) or original(fn, **options)
    )
    return functions


@pytest.fixture(scope="module")
def arguments(model):
    """The arguments of `gen_error_in`."""
    return model, BRANCHES["semantic"].start(model), ta.MonteCarlo(64, replicates=1).rule(model).replicate(0)


def test_another_process_does_not_trace(folder, traced, arguments):
    first, second = (stored_program(gen_error_in)(*arguments) for _ in range(2))
    plain = gen_error_in(*arguments)
    assert len(traced) == len(list(folder.iterdir())) == 1
    assert first == second == pytest.approx(float(plain), rel=1e-12)
    assert first.dtype == plain.dtype and not first.committed  # not committed to a device
    fn, (_, *others) = stored_program(gen_error_in), arguments  # one program for all numbers
    other_model = ta.DotProduct(sigma=0.7)
    assert fn(other_model, *others) == pytest.approx(float(gen_error_in(other_model, *others)), rel=1e-12) != first
    results = run_one(together([Call(fn, tuple(arguments))] * 4))  # threads share it
    assert results == [first] * 4 and len(traced) == 1


def refuse_to_store(fn, **options):
    raise ValueError("Cannot serialize code with custom calls")


def disk_full(*_):
    raise OSError(28, "No space left on device")


# Each entry changes something on which a program depends: arguments of `gen_error_in`, or something outside of them.
CHANGES = {
    "number": lambda patch, m, x, r: (m, x, ta.MonteCarlo(65, replicates=1).rule(m).replicate(0)),
    "precision": lambda patch, *arguments: jax.tree.map(lambda a: a.astype(jnp.float32), arguments),
    "static field": lambda patch, m, x, r: (m, x, dataclasses.replace(r, block=32)),
    "source": lambda patch, *arguments: patch(compiled.Traced, "source", "another") or arguments,
    "version": lambda patch, *arguments: patch(jax, "__version__", "0.0") or arguments,
    "kernels": lambda patch, *arguments: patch(compiled.os, "environ", {compiled.KERNELS: "0"}) or arguments,
    "setting": lambda patch, *arguments: patch(compiled, "settings", lambda: OTHER_SETTINGS) or arguments,
}
OTHER_SETTINGS = {"jax_debug_nans": "", "jax_debug_infs": "", "jax_disable_jit": ""}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_depends_on(folder, traced, arguments, monkeypatch, change):
    stored_program(gen_error_in)(*arguments)
    stored_program(gen_error_in)(*CHANGES[change](monkeypatch.setattr, *arguments))
    assert len(traced) == len(list(folder.iterdir())) == 2


def test_functions_and_static_arguments(folder, traced, model, arguments):
    _, x, _ = arguments
    assert stored_program(admissible)(model, x) and len(traced) == 1
    for branch in ("positional", "semantic"):
        start, expected = stored_program(branch_start)(model, branch), BRANCHES[branch].start(model)
        jax.tree.map(np.testing.assert_array_equal, start, expected)
    assert len(traced) == 3
    for fn, expected in ((symmetric, x.V), (inverse, -1 / x.V)):
        np.testing.assert_allclose(stored_program(derivative_along)(fn, (x.V,), (x.V,)), expected, 1e-12)
    assert len(traced) == 5
    stored_program(derivative_along)(lambda a: a, (x.V,), (x.V,))
    assert len(traced) == 5 == len(list(folder.iterdir()))


class UserModel(ta.DotProduct):
    """A model that its user may change."""


def test_what_is_not_kept(folder, traced, arguments, monkeypatch):
    """Programs are not stored if their code is not this library's, or if jax checks inside them (`debug_nans`)."""
    model, x, replicate = arguments
    expected = pytest.approx(float(gen_error_in(*arguments)), rel=1e-12)
    assert stored_program(gen_error_in)(UserModel(**vars(model)), x, replicate) == expected
    assert stored_program(lambda *arguments: gen_error_in(*arguments))(*arguments) == expected
    with jax.debug_nans(True):
        assert stored_program(gen_error_in)(*arguments) == expected
    monkeypatch.setattr(compiled.Traced, "folder", None)
    assert stored_program(gen_error_in)(*arguments) == expected
    assert not traced and not folder.exists()


@pytest.mark.parametrize(
    ("module", "name", "replacement", "count"),
    [
        (compiled.export, "export", refuse_to_store, 0),  # as jax does for what calls some libraries of GPUs
        # A program is stored for the platform that jax prefers, not for the one that a caller sets for a while.
        (compiled, "default_device", lambda: SimpleNamespace(platform="another"), 0),
        (compiled, "write_whole", disk_full, 1),
    ],
)
def test_a_program_that_cannot_be_stored_runs_all_the_same(
    folder, traced, arguments, monkeypatch, module, name, replacement, count
):
    monkeypatch.setattr(module, name, replacement)
    fn, expected = stored_program(gen_error_in), pytest.approx(float(gen_error_in(*arguments)), rel=1e-12)
    assert fn(*arguments) == expected == fn(*arguments) and len(traced) == count and not folder.exists()


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:99] + bytes([b[99] ^ 1]) + b[100:]])
def test_a_damaged_program_is_traced_again(folder, traced, arguments, damage):
    value = stored_program(gen_error_in)(*arguments)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert stored_program(gen_error_in)(*arguments) == value and len(traced) == 2
    assert list(folder.iterdir()) == [file]


def test_a_file_of_another_program_is_not_run(folder, traced, arguments):
    """A copy of a program under the name of another one is traced anew, and so is a file that names other classes."""
    value = stored_program(gen_error_in)(*arguments)
    (file,) = folder.iterdir()
    header, contents = files.unpacked(file, ta.InputError("", ""))
    for changed in ({"name": "0" * 64}, {"result": {"class": "os:PathLike", "fields": {}}}, {"result": {"a": 5}}):
        file.write_bytes(packed({**header, **changed}, contents))
        count = len(traced)
        assert stored_program(gen_error_in)(*arguments) == value and len(traced) == count + 1


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "builtins:eval", "builtins:int", "builtins:object", "collections:OrderedDict",
        "tiedattn_jax.base.files:os.system", "tiedattn_jax.base.files:write_whole", "tiedattn_jax.base.files:Store",
        "tiedattn_jax.__main__:main", "tiedattn_jax.nowhere:Model", "no name",
    ],
)  # fmt: skip
def test_what_a_file_may_not_name(name):
    """Only trees of this library's modules and of Python's containers are made; nothing else is called or imported."""
    before = set(sys.modules)
    with pytest.raises(ValueError, match="is no node of a tree"):
        compiled.example({"class": name, "fields": {"value": 0}})
    assert set(sys.modules) == before


def test_structures(model, arguments):
    """Modules with static parts, named tuples, dictionaries, lists and None can be stored; a user's module cannot."""
    tree = {"b": (model, None, [jnp.ones(2)]), "a": Guess(1.0, (BRANCHES["semantic"].start(model),))}
    described = json.loads(json.dumps(compiled.described(tree)))
    assert jax.tree.structure(compiled.example(described)) == jax.tree.structure(tree)
    counted = jax.tree.map(lambda a: a, arguments[2])
    object.__setattr__(counted, "block", np.int64(3))  # an array that is no leaf
    for foreign in (UserModel(**vars(model)), [np.sin], [lambda: 0], {1: 2}, counted):
        with pytest.raises(TypeError):
            compiled.described(foreign)


@pytest.fixture
def cache():
    """The folder of programs that jax compiles, which comes back after the test."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda: (compiled.Traced.folder, jax.config.jax_compilation_cache_dir)
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_folder(folder, cache, monkeypatch, tmp_path):
    for setting, expected in (("0", folder), (str(tmp_path / "b"), tmp_path / "b" / "traced")):
        monkeypatch.setenv("TIEDATTN_CACHE", setting)
        ta.use_compilation_cache()
        assert compiled.Traced.folder == expected
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "b")
    assert (tmp_path / "b" / "traced").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b""])
def test_a_compiled_program_that_is_cut_off_is_replaced(folder, tmp_path, damage):
    """jax itself warns in each process and never replaces the file."""
    before = jax.config.jax_compilation_cache_dir
    try:
        ta.use_compilation_cache(tmp_path / "b")
        compilation_cache.reset_cache()

        def compiled_anew():
            jax.clear_caches()
            return jax.jit(lambda a: jnp.sin(a) + len(damage(b"ab")))(1.0)

        value = compiled_anew()
        (path,) = (tmp_path / "b").glob("*-cache")
        content = path.read_bytes()
        path.write_bytes(damage(content))
        assert compiled_anew() == value
        assert len(path.read_bytes()) == pytest.approx(len(content), rel=0.1)  # no two have the same bytes
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has other permissions")
def test_a_folder_that_others_can_write_to(folder, cache, monkeypatch, tmp_path):
    """Programs are executed: a folder is refused if it is open, inside an open one, or somebody else's.

    In an open one with the sticky bit, such as /tmp, nobody can replace the folders of others. A folder that the user
    names is needed; the default one is left out if it cannot be made.
    """
    before, shared = cache(), tmp_path / "shared"
    shared.mkdir(mode=0o700)
    (tmp_path / "file").touch()
    message = "^{} must be a folder to which only you can write, .* use another, got {}='.*shared.*'"
    unmade = "^{} must be a folder that can be made, got {}='.*cache'"
    for mode, place, text in (
        (0o1700, tmp_path / "file" / "cache", unmade),
        (0o777, shared, message), (0o770, shared, message), (0o777, shared / "inside", message),
        (0o755, shared, message),
    ):  # fmt: skip
        shared.chmod(mode)
        if mode == 0o755:
            monkeypatch.setattr(files.os, "getuid", lambda: 12345)
            os.chown(shared, 54321, -1) if os.geteuid() == 0 else None
        with pytest.raises(ta.InputError, match=text.format("folder", "folder")):
            ta.use_compilation_cache(place)
        monkeypatch.setenv("TIEDATTN_CACHE", str(place))
        with pytest.raises(ta.InputError, match=text.format("TIEDATTN_CACHE", "TIEDATTN_CACHE")):
            ta.use_compilation_cache()
    assert cache() == before


def test_a_folder_inside_an_open_one_with_the_sticky_bit(folder, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    files.make_private(tmp_path / "shared" / "own", "folder")
    assert (tmp_path / "shared" / "own").is_dir()


def test_the_source_is_that_of_the_import(folder, cache, monkeypatch, tmp_path):
    """A file that changes after the import is not the code that runs."""
    imported = compiled.source()
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "base" / "programs.py"))
    file = tmp_path / "wing" / "a.py"
    file.parent.mkdir()
    sources = {(file.write_text(text), compiled.source())[1] for text in ("x = 1", "x = 2", "x = 1")}
    assert len(sources) == 2
    ta.use_compilation_cache(tmp_path / "b")
    assert compiled.Traced.source == imported != compiled.source()


@pytest.mark.slow
def test_a_solve(folder, traced, model):
    """A solve stores one program for all replicates, which run in threads, and gives the same state as without."""
    rule = ta.Lines(1, replicates=3).rule(model)
    point = ta.solve(model, 2.0, nodes=rule).replicates.overlaps
    assert len(traced) == 1
    compiled.Traced.folder = None
    plain = ta.solve(model, 2.0, nodes=rule).replicates.overlaps
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-9), point, plain)
