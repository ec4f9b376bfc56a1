"""Programs that a folder stores from one process to the next; a new `stored_program` stands for another process."""

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
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
from tiedattn_jax.base.kernels import KERNELS
from tiedattn_jax.base.programs import stored_program
from tiedattn_jax.model.overlaps import BRANCHES, admissible, symmetric
from tiedattn_jax.phases.locate import Guess
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.observables import gen_error_in
from tiedattn_jax.theory.paths import Call, together
from tiedattn_jax.theory.setting import branch_start

MATRIX = np.array([[2.0, 1.0], [0.5, 4.0]])


@pytest.fixture
def cache():
    """The folders of traced and of compiled programs, which come back after the test."""
    traced, before = compiled.Traced.folder, jax.config.jax_compilation_cache_dir
    yield lambda: (compiled.Traced.folder, jax.config.jax_compilation_cache_dir)
    compiled.Traced.folder = traced
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def folder(cache, tmp_path):
    """An empty folder for traced programs; compiled ones stay in the folder of all tests."""
    compiled.Traced.folder = tmp_path / "traced"
    return compiled.Traced.folder


def written(folder):
    """The files of a folder, with the times at which they were written: tracing again writes again."""
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} if folder.exists() else {}


@pytest.fixture(scope="module")
def arguments(model):
    """The arguments of `gen_error_in`."""
    return model, BRANCHES["semantic"].start(model), ta.MonteCarlo(64, replicates=1).rule(model).replicate(0)


def test_another_process_does_not_trace(folder, arguments):
    first = stored_program(gen_error_in)(*arguments)
    stored = written(folder)
    second, plain = stored_program(gen_error_in)(*arguments), gen_error_in(*arguments)
    assert first == second == pytest.approx(float(plain), rel=1e-12)
    assert first.dtype == plain.dtype and not first.committed  # not committed to a device
    fn, (_, *others) = stored_program(gen_error_in), arguments  # one program for all numbers
    other_model = ta.DotProduct(sigma=0.7)
    assert fn(other_model, *others) == pytest.approx(float(gen_error_in(other_model, *others)), rel=1e-12) != first
    assert run_one(together([Call(fn, tuple(arguments))] * 4)) == [first] * 4  # threads share it
    assert written(folder) == stored and len(stored) == 1


# Each entry changes something on which a program depends: arguments of `gen_error_in`, or something outside of them.
CHANGES = {
    "number": lambda patch, m, x, r: (m, x, ta.MonteCarlo(65, replicates=1).rule(m).replicate(0)),
    "precision": lambda patch, *arguments: jax.tree.map(lambda a: jax.device_put(np.float32(a)), arguments),
    "static field": lambda patch, m, x, r: (m, x, dataclasses.replace(r, block=32)),
    "source": lambda patch, *arguments: patch.setattr(compiled.Traced, "source", "another") or arguments,
    "version": lambda patch, *arguments: patch.setattr(jax, "__version__", "0.0") or arguments,
    "kernels": lambda patch, *arguments: patch.setenv(KERNELS, "0") or arguments,
    "setting": lambda patch, *arguments: arguments,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_depends_on(folder, arguments, monkeypatch, change):
    stored_program(gen_error_in)(*arguments)
    with jax.default_matmul_precision("high") if change == "setting" else nullcontext():
        stored_program(gen_error_in)(*CHANGES[change](monkeypatch, *arguments))
    assert len(written(folder)) == 2


def test_functions_and_static_arguments(folder, model, arguments):
    _, x, _ = arguments
    assert stored_program(admissible)(model, x) and len(written(folder)) == 1
    for branch in ("positional", "semantic"):
        start, expected = stored_program(branch_start)(model, branch), BRANCHES[branch].start(model)
        jax.tree.map(np.testing.assert_array_equal, start, expected)
    for fn, expected in ((symmetric, x.V), (inverse, -1 / np.asarray(x.V))):
        np.testing.assert_allclose(stored_program(derivative_along)(fn, (x.V,), (x.V,)), expected, 1e-12)
    assert len(written(folder)) == 5
    stored_program(derivative_along)(lambda a: a, (x.V,), (x.V,))
    assert len(written(folder)) == 5


class UserModel(ta.DotProduct):
    """A model that its user may change."""


def test_what_is_not_kept(cache, folder, model, arguments, monkeypatch, tmp_path):
    """Code of others, what jax checks inside (`debug_nans`) or cannot store, other platforms; such programs run."""
    expected, matrix = np.linalg.inv(MATRIX), jnp.asarray(MATRIX)
    assert stored_program(admissible)(UserModel(**vars(model)), arguments[1])
    np.testing.assert_allclose(stored_program(lambda a: inverse(a))(MATRIX), expected)
    with jax.debug_nans(True):
        np.testing.assert_allclose(stored_program(inverse)(matrix), expected)

    def refuse(fn, **options):  # as jax does for what calls some libraries of GPUs
        raise ValueError("Cannot serialize code with custom calls")

    for module, name, replacement in (
        (compiled.export, "export", refuse),
        # A program is stored for the platform that jax prefers, not for the one that a caller sets for a while.
        (compiled, "default_device", lambda: SimpleNamespace(platform="another")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, replacement)
            np.testing.assert_allclose(stored_program(inverse)(matrix), expected)
    assert not folder.exists()
    (tmp_path / "file").touch()
    for place in (None, tmp_path / "file" / "traced"):  # no folder, and one that cannot be written
        compiled.Traced.folder = place
        np.testing.assert_allclose(stored_program(inverse)(matrix), expected)


DAMAGE = {
    "cut off": lambda b: b[:-9],
    "empty": lambda b: b"",
    "flipped": lambda b: b[:99] + bytes([b[99] ^ 1]) + b[100:],
    "name": {"name": "0" * 64},  # a copy of a program under the name of another one
    "class": {"result": {"class": "os:PathLike", "fields": {}}},
    "tree": {"result": {"a": 5}},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_program_is_traced_again(folder, damage):
    value = stored_program(inverse)(jnp.asarray(MATRIX))
    (file,) = folder.iterdir()
    header, contents = files.unpacked(file, ta.InputError("", ""))
    file.write_bytes(damage(file.read_bytes()) if callable(damage) else packed({**header, **damage}, contents))
    for _ in range(2):
        np.testing.assert_array_equal(stored_program(inverse)(jnp.asarray(MATRIX)), value)
    assert list(folder.iterdir()) == [file] and files.unpacked(file, ta.InputError("", ""))[0] == header


def test_what_a_file_may_not_name():
    """Only trees of this library's modules and of Python's containers are made; nothing else is called or imported."""
    before, own = set(sys.modules), ("base.files:os.system", "base.files:write_whole", "base.files:Store")
    names = [f"tiedattn_jax.{name}" for name in (*own, "__main__:main", "nowhere:Model")]
    for name in (*names, "os:system", "builtins:eval", "builtins:object", "collections:OrderedDict", "no name"):
        with pytest.raises(ValueError, match="is no node of a tree"):
            compiled.example({"class": name, "fields": {"value": 0}})
    assert set(sys.modules) == before


def test_structures(model, arguments):
    """Modules with static parts, named tuples, dictionaries, lists and None can be stored; a user's module cannot."""
    tree = {"b": (model, None, [np.ones(2)]), "a": Guess(1.0, (arguments[1],))}
    described = json.loads(json.dumps(compiled.described(tree)))
    assert jax.tree.structure(compiled.example(described)) == jax.tree.structure(tree)
    counted = jax.tree.map(lambda a: a, arguments[2])
    object.__setattr__(counted, "block", np.int64(3))  # an array that is no leaf
    for foreign in (UserModel(**vars(model)), [np.sin], [lambda: 0], {1: 2}, counted):
        with pytest.raises(TypeError):
            compiled.described(foreign)


def test_the_folder(folder, cache, monkeypatch, tmp_path):
    for setting, expected in (("0", folder), (str(tmp_path / "b"), tmp_path / "b" / "traced")):
        monkeypatch.setenv("TIEDATTN_CACHE", setting)
        ta.use_compilation_cache()
        assert compiled.Traced.folder == expected
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "b")
    assert (tmp_path / "b" / "traced").stat().st_mode & 0o777 == 0o700
    for name in ("c", "d"):  # compiled programs go to the folder that was named last
        ta.use_compilation_cache(tmp_path / name)
        jax.jit(lambda x, name=name: jnp.sin(x) + ord(name))(1.0)
        assert list((tmp_path / name).glob("*-cache"))


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b""])
def test_a_compiled_program_that_is_cut_off_is_compiled_again(cache, tmp_path, damage):
    """jax warns, in every process, and does not replace the file."""
    ta.use_compilation_cache(tmp_path / "b")
    compilation_cache.reset_cache()

    def compiled_anew():
        jax.clear_caches()
        return jax.jit(lambda a: jnp.sin(a) + len(damage(b"ab")))(1.0)

    value = compiled_anew()
    (path,) = (tmp_path / "b").glob("*-cache")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert compiled_anew() == value


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has other permissions")
def test_a_folder_that_others_can_write_to(cache, monkeypatch, tmp_path):
    """Programs are executed: a folder is refused if it is open, inside an open one, or somebody else's.

    In an open one with the sticky bit, such as /tmp, nobody can replace the folders of others.
    """
    before, shared = cache(), tmp_path / "shared"
    shared.mkdir()
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
        monkeypatch.setenv("TIEDATTN_CACHE", str(place))
        for given, name in (((place,), "folder"), ((), "TIEDATTN_CACHE")):
            with pytest.raises(ta.InputError, match=text.format(name, name)):
                ta.use_compilation_cache(*given)
    assert cache() == before
    shared.chmod(0o1777)
    monkeypatch.undo()
    files.make_private(shared / "own", "folder")
    assert (shared / "own").is_dir()


def test_the_source_is_that_of_the_import(cache, tmp_path):
    """A file that changes after the import is not the code that runs."""
    imported, file = compiled.Traced.source, tmp_path / "wing" / "a.py"
    file.parent.mkdir()
    assert compiled.source(tmp_path) is None
    sources = {(file.write_text(text), compiled.source(tmp_path))[1] for text in ("x = 1", "x = 2", "x = 1")}
    assert len(sources) == 2
    ta.use_compilation_cache(tmp_path / "b")
    assert compiled.Traced.source == imported


ZIPPED = """
import warnings
import numpy as np
import tiedattn_jax as ta
from made import diagram
from tiedattn_jax.base.programs import Traced
with warnings.catch_warnings(record=True) as complaints:
    ta.use_compilation_cache("cache")
cells = {name: np.full((2, 1, 2, 3), np.nan) for name in ("train_loss", "gen_error", "replicon")}
cells["status"] = np.full((2, 1, 2, 3), float(ta.Status.absent))
if Traced.source:
    diagram(("alpha", np.array([1.0, 2.0])), ("omega", np.ones(1)), cells, {}).to_html("page.html")
print(".zip" in ta.__file__, Traced.source, Traced.folder, *("Python files" in str(c.message) for c in complaints))
"""


@pytest.mark.full
def test_the_library_runs_from_a_zip_file(tmp_path):
    """Programs are kept under the hash of the sources, not if the file has bytecode only; a page finds its template."""
    package = Path(ta.__file__).parent
    with zipfile.ZipFile(tmp_path / "sources.zip", "w") as archive:
        for file in (f for f in package.rglob("*") if f.suffix in (".py", ".html")):
            archive.write(file, file.relative_to(package.parent))
    with zipfile.PyZipFile(str(tmp_path / "bytecode.zip"), "w") as archive:
        archive.writepy(str(package))
    expected = f"True {compiled.Traced.source} cache/traced", "True None None True"
    for name, line in zip(("sources.zip", "bytecode.zip"), expected, strict=True):
        paths = os.pathsep.join([str(tmp_path / name), str(Path(__file__).parents[1])])
        call, env = [sys.executable, "-c", ZIPPED], {**os.environ, "PYTHONPATH": paths}
        run = subprocess.run(call, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
        assert run.stdout.strip() == line
    assert "<html" in (tmp_path / "page.html").read_text()
