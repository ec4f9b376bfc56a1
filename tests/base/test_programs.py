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
    monkeypatch.setattr(compiled.export, "export", lambda fn: functions.append(fn) or original(fn))
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


def test_one_program_for_all_numbers(folder, traced, arguments):
    fn, (model, x, replicate) = stored_program(gen_error_in), arguments
    other_model = ta.DotProduct(sigma=0.7)
    assert fn(other_model, x, replicate) == pytest.approx(float(gen_error_in(other_model, x, replicate)), rel=1e-12)
    assert fn(model, x, replicate) != fn(other_model, x, replicate) and len(traced) == 1


def other_number(monkeypatch, model, x, replicate):
    return model, x, ta.MonteCarlo(65, replicates=1).rule(model).replicate(0)


def other_precision(monkeypatch, *arguments):
    return jax.tree.map(lambda a: a.astype(jnp.float32), arguments)


def other_static_field(monkeypatch, model, x, replicate):
    return model, x, dataclasses.replace(replicate, block=32)


def other_source(monkeypatch, *arguments):
    monkeypatch.setattr(compiled.Traced, "source", "another")
    return arguments


def other_version(monkeypatch, *arguments):
    monkeypatch.setattr(jax, "__version__", "0.0")
    return arguments


def other_setting(monkeypatch, *arguments):
    monkeypatch.setattr(
        compiled, "settings", lambda: {"jax_debug_nans": "", "jax_debug_infs": "", "jax_disable_jit": ""}
    )
    return arguments


@pytest.mark.parametrize(
    "change", [other_number, other_precision, other_static_field, other_source, other_version, other_setting]
)
def test_what_a_program_depends_on(folder, traced, arguments, monkeypatch, change):
    stored_program(gen_error_in)(*arguments)
    stored_program(gen_error_in)(*change(monkeypatch, *arguments))
    assert len(traced) == len(list(folder.iterdir())) == 2


def test_functions_and_static_arguments(folder, traced, model, arguments):
    """Another function makes another program, and so does another function or text among the arguments."""
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


def test_a_program_that_jax_cannot_store(folder, arguments, monkeypatch):
    """It runs all the same: jax refuses to store what calls some libraries of GPUs."""

    def refuse(fn):
        raise ValueError("Cannot serialize code with custom calls")

    monkeypatch.setattr(compiled.export, "export", refuse)
    assert stored_program(gen_error_in)(*arguments) == pytest.approx(float(gen_error_in(*arguments)), rel=1e-12)
    assert not folder.exists()


def test_a_device_that_is_not_the_default_one(folder, traced, arguments, monkeypatch):
    """A program is stored for the platform that jax prefers, not for the one that a caller sets for a while."""
    monkeypatch.setattr(compiled, "default_device", lambda: SimpleNamespace(platform="another"))
    assert stored_program(gen_error_in)(*arguments) == pytest.approx(float(gen_error_in(*arguments)), rel=1e-12)
    assert not traced


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


def test_a_full_disk(folder, traced, arguments, monkeypatch):
    def disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled, "write_whole", disk_full)
    fn = stored_program(gen_error_in)
    assert fn(*arguments) == fn(*arguments) and len(traced) == 1 and not folder.exists()


def test_structures(model, arguments):
    """Trees that can be stored: modules with static parts, named tuples, dictionaries, lists and None.

    A user's module cannot.
    """
    guess = Guess(1.0, (BRANCHES["semantic"].start(model),))
    tree = {"b": (model, None, [jnp.ones(2)]), "a": guess}
    assert jax.tree.structure(compiled.example(json.loads(json.dumps(compiled.described(tree))))) == jax.tree.structure(
        tree
    )
    counted = jax.tree.map(lambda a: a, arguments[2])
    object.__setattr__(counted, "block", np.int64(3))  # an array that is no leaf
    for foreign in (UserModel(**vars(model)), [np.sin], [lambda: 0], {1: 2}, counted):
        with pytest.raises(TypeError):
            compiled.described(foreign)


def test_the_folder(folder, monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for setting, expected in (("0", folder), (str(tmp_path / "b"), tmp_path / "b" / "traced")):
            monkeypatch.setenv("TIEDATTN_CACHE", setting)
            ta.use_compilation_cache()
            assert compiled.Traced.folder == expected
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "b")
        assert (tmp_path / "b" / "traced").stat().st_mode & 0o777 == 0o700
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has other permissions")
def test_a_folder_that_others_can_write_to(folder, monkeypatch, tmp_path):
    """Programs are executed: a folder is refused if it is open, inside an open one, or somebody else's."""
    before = compiled.Traced.folder, jax.config.jax_compilation_cache_dir
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode, place in ((0o777, shared), (0o770, shared), (0o777, shared / "inside"), (0o755, shared)):
        shared.chmod(mode)
        if mode == 0o755:
            monkeypatch.setattr(files.os, "getuid", lambda: 12345)
            os.chown(shared, 54321, -1) if os.geteuid() == 0 else None
        message = "^{} must be a folder to which only you can write, .* use another, got {}='.*shared.*'"
        with pytest.raises(ta.InputError, match=message.format("folder", "folder")):
            ta.use_compilation_cache(place)
        monkeypatch.setenv("TIEDATTN_CACHE", str(place))
        with pytest.raises(ta.InputError, match=message.format("TIEDATTN_CACHE", "TIEDATTN_CACHE")):
            ta.use_compilation_cache()
    assert (compiled.Traced.folder, jax.config.jax_compilation_cache_dir) == before


def test_a_folder_that_cannot_be_made(folder, monkeypatch, tmp_path):
    """A folder that the user names is needed; the default one is left out."""
    before = compiled.Traced.folder, jax.config.jax_compilation_cache_dir
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "cache"
    with pytest.raises(ta.InputError, match=r"^folder must be a folder that can be made, got folder='.*cache'"):
        ta.use_compilation_cache(place)
    monkeypatch.setenv("TIEDATTN_CACHE", str(place))
    with pytest.raises(ta.InputError, match=r"^TIEDATTN_CACHE must be a folder that can be made"):
        ta.use_compilation_cache()
    assert (compiled.Traced.folder, jax.config.jax_compilation_cache_dir) == before


def test_a_folder_inside_an_open_one_with_the_sticky_bit(folder, tmp_path):
    """In /tmp nobody can replace the folders of others."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    files.make_private(tmp_path / "shared" / "own", "folder")
    assert (tmp_path / "shared" / "own").is_dir()


def test_the_source_is_that_of_the_import(folder, monkeypatch, tmp_path):
    """A file that changes after the import is not the code that runs."""
    before, imported = jax.config.jax_compilation_cache_dir, compiled.source()
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "base" / "programs.py"))
    (tmp_path / "later.py").write_text("x = 1")
    try:
        ta.use_compilation_cache(tmp_path / "b")
        assert compiled.Traced.source == imported != compiled.source()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_source(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "base" / "programs.py"))
    (tmp_path / "wing").mkdir()
    file = tmp_path / "wing" / "a.py"
    sources = {(file.write_text(text), compiled.source())[1] for text in ("x = 1", "x = 2", "x = 1")}
    assert len(sources) == 2


def test_threads_share_a_program(folder, traced, arguments):
    fn = stored_program(gen_error_in)
    results = run_one(together([Call(fn, tuple(arguments))] * 4))
    assert results == [results[0]] * 4 and len(traced) == 1


@pytest.mark.slow
def test_a_solve(folder, traced, model):
    """A solve stores one program for all replicates, which run in threads, and gives the same state as without."""
    rule = ta.Lines(1, replicates=3).rule(model)
    point = ta.solve(model, 2.0, nodes=rule)
    assert len(traced) == 1
    compiled.Traced.folder = None
    plain = ta.solve(model, 2.0, nodes=rule)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-9), point.replicates.overlaps, plain.replicates.overlaps
    )
