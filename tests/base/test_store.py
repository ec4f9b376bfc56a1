"""Files are whole or absent, and computations resume from pieces and checkpoints."""

import errno
import io
import math
import os
import random
import subprocess
import sys
import time
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.files import Store, csv_of, fingerprint, make_folder, packed, unpacked, write_whole

PIECES = {
    "piece-00000": {"q": np.linspace(0, 1, 6).reshape(2, 3), "ok": np.array([True, False])},
    "piece-00012": {"q": np.array([np.nan, -np.inf]), "n": np.int32(3)},
    "retry-00001": {"empty": np.zeros((0, 4), np.float32)},
}
CONFIGURATION = {"rate": 0.1, "names": ["a", "b"], "runs": 2}


class State(eqx.Module):
    weights: jax.Array
    memory: dict
    size: int = eqx.field(static=True, default=3)


@pytest.fixture
def state():
    memory = {"count": jnp.array([4], jnp.int32), "moment": jnp.arange(3, dtype=jnp.bfloat16), "seen": np.ones((2, 5))}
    return State(jnp.asarray(np.random.default_rng(0).normal(size=(3, 2))), memory)


def grid(folder, mark="mark", *, resume=True):
    """The store of the pieces of a grid, opened."""
    store = Store(folder, {"fingerprint": mark}, "out", "hold pieces of the same model only")
    store.open_folder(resume)
    return store


def training(path, computation):
    """The store of the latest state of a training."""
    return Store(path, computation, "checkpoint", "be of this configuration, or another file")


@pytest.fixture
def filled(tmp_path):
    store = grid(tmp_path, resume=False)
    for name, arrays in PIECES.items():
        store.put(name, arrays)
    return tmp_path


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) and x.dtype == y.dtype and np.shape(x) == np.shape(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_pieces_come_back_bit_by_bit(filled):
    """Pieces of the grid are read, and no other file; a run that does not resume refuses them."""
    assert sorted(p.name for p in filled.iterdir()) == sorted(f"{name}.npz" for name in PIECES)
    (filled / "diagram.npz").write_bytes(packed({}, {"q": np.ones(3)}))
    (filled / "notes.txt").write_text("mine")
    (filled / ".piece-00001.npz.part").write_bytes(b"half a piece")
    assert_equal_trees(grid(filled).pieces(), jax.tree.map(np.asarray, PIECES))
    with pytest.raises(InputError, match=r"out must not hold the pieces .* unless resume is asked for.* 3 of them"):
        grid(filled, resume=False)


def test_without_a_place_nothing_is_kept(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    store, checkpoint = grid(None, resume=False), training(None, CONFIGURATION)
    store.put("piece-00000", PIECES["piece-00000"])
    checkpoint.keep(3, state)
    assert store.pieces() == {} and checkpoint.latest(state) == (0, state) and list(tmp_path.iterdir()) == []


def test_what_belongs_to_another_computation_is_refused(filled, tmp_path, state):
    """Pieces and checkpoints say in what they differ, and from which version they are."""
    run, changed = tmp_path / "run", {"rate": 0.2, "names": ["a", "b"], "epochs": 3}
    training(run, CONFIGURATION).keep(1, state)
    for path, start, read, known, other, told in (
        (filled / "piece-00012.npz", "out must hold pieces of the same model only,",
         lambda mark: grid(filled, mark).pieces(), "mark", "other", "those of another call: give another folder"),
        (run, "checkpoint must be of this configuration,", lambda c: training(run, c).latest(state), CONFIGURATION,
         changed, "rate=0.1 instead of 0.2, epochs=None instead of 3, runs=2 instead of None"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"{start} .* with {told}") as raised:
            read(other)
        assert raised.value.argument == start.partition(" ")[0]
        about, arrays = unpacked(path, InputError("", ""))
        about["computation"]["version"] = "0.0.1"
        path.write_bytes(packed(about, arrays, compressed=False))
        with pytest.raises(InputError, match=rf"{start} .* with version='0\.0\.1' instead of '0\.1\.0'"):
            read(known)


def test_folders(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "a" / "b", "out")
    (tmp_path / "a" / "b" / "file").write_text("")
    message = r"out must be a folder that can be written, got out='.*file' \(File exists\)"
    for make in (lambda path: grid(path, resume=False), lambda path: make_folder(path, "out")):
        with pytest.raises(InputError, match=message):
            make(tmp_path / "a" / "b" / "file")
    if os.geteuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(InputError, match="out must be a folder that can be written"):
            grid(tmp_path / "closed", resume=False)


def with_array(shape):
    """A file with an array of four numbers whose header says another shape, or with no array."""
    about, out, header = io.BytesIO(), io.BytesIO(), io.BytesIO(b"no array")
    np.save(about, np.array("{}"))
    if shape:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("about.npy", about.getvalue())
        file.writestr("q.npy", header.getvalue() + (np.ones(4).tobytes() if shape else b""))
    return out.getvalue()


def damaged(whole, place):
    """Yield damaged contents: empty, of other kinds, or cut off."""
    npy, npz, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, np.ones(3))
    np.savez(npz, q=np.ones(3))
    # An object that makes a folder when a pickle of it is read.
    executed = type("Executed", (), {"__reduce__": lambda self: (os.mkdir, (str(place),))})()
    np.savez(objects, about=np.array("{}"), q=np.array([executed], object))
    yield from (b"", b"text", b"\x93 something else", npy.getvalue(), npz.getvalue(), objects.getvalue())
    yield packed({}, {"a": np.ones(2)})  # a file of this library, but of another kind
    yield from (packed(about, {}) for about in (5, [[[]]], [], None, {"computation": 5}))  # no dictionary
    yield from map(with_array, ((10**12,), (3, 10**9), None))
    yield from (whole[:k] for k in range(0, len(whole), 80))


def test_damaged_pieces_are_computed_again(filled):
    """Nothing in them is executed."""
    path, store = filled / "piece-00012.npz", grid(filled)
    others = set(PIECES) - {"piece-00012"}
    for content in damaged(path.read_bytes(), filled / "made"):
        path.write_bytes(content)
        with pytest.warns(UserWarning, match="are computed again: piece-00012.npz") as warned:
            assert set(store.pieces()) == others
        assert "pickle" not in str(warned[0].message) and not (filled / "made").exists()
    store.put("piece-00012", PIECES["piece-00012"])
    assert set(store.pieces()) == set(PIECES)


def test_a_flipped_bit_changes_no_number(filled):
    """Wherever a bit is flipped, in the arrays or in the tables of the zip file: it is found, or it changes nothing."""
    path, store, rng = filled / "piece-00012.npz", grid(filled), random.Random(1)
    whole, pieces, found = path.read_bytes(), store.pieces(), 0
    for _ in range(100):
        content = bytearray(whole)
        content[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            assert_equal_trees(store.pieces(), pieces)
        except (InputError, UserWarning):
            found += 1
    assert found > 50


def test_a_copy_of_a_piece_is_refused(filled):
    """A piece says which one it is: under another name, and under a foreign one, it is not believed."""
    for name in ("piece-00007", "piece-notes", "retry-00012"):
        copy = filled / f"{name}.npz"
        copy.write_bytes((filled / "piece-00012.npz").read_bytes())
        message = f"out must hold every piece under its own name, got .* with piece-00012 in {name}.npz: delete this"
        with pytest.raises(InputError, match=message):
            grid(filled).pieces()
        copy.unlink()


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_is_whole_or_the_old_one(filled, monkeypatch, step, failure):
    """A write that fails or is interrupted, before the content is on the disk or before it has the name of the file."""
    before = {path.name: path.read_bytes() for path in filled.iterdir()}

    def fails(*_):
        assert [*filled.glob(".*.part")]
        raise failure

    monkeypatch.setattr(f"tiedattn_jax.base.files.os.{step}", fails)
    with pytest.raises(type(failure)) as raised:
        grid(filled).put("piece-00012", {"q": np.ones(2)})
    assert isinstance(failure, KeyboardInterrupt) or raised.value.filename == str(filled / "piece-00012.npz")
    assert {path.name: path.read_bytes() for path in filled.iterdir()} == before


def test_a_new_file_has_usual_permissions(tmp_path):
    path = tmp_path / "new folder" / "file"
    for content in (b"old", b"newer"):
        write_whole(path, content)
        assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]
    os.umask(mask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


WRITER = """
import sys
from pathlib import Path
from tiedattn_jax.base.files import write_whole
print("filling", flush=True)
while True:
    write_whole(Path(sys.argv[1]), b"b" * 3_000_000)
"""


@pytest.mark.full
def test_another_writer_of_the_file(tmp_path):
    """Every read gives the whole content of one of two writers, and no write fails, until one is killed."""
    path, contents, deadline = tmp_path / "both", set(), time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "filling\n"
        while len(contents) < 2 and time.monotonic() < deadline:
            write_whole(path, b"a" * 2_000_000)
            contents.add(path.read_bytes())
        process.kill()
    assert contents == {b"a" * 2_000_000, b"b" * 3_000_000} and path.read_bytes() in contents


@pytest.mark.parametrize("compressed", [True, False])
def test_packed_arrays_and_tables(compressed):
    arrays = {"a": np.arange(3), "name": np.array("x")}
    with np.load(io.BytesIO(packed({}, arrays, compressed=compressed))) as file:
        assert file.files == ["about", "a", "name"] and file["a"].tolist() == [0, 1, 2] and str(file["name"]) == "x"
    with pytest.raises(TypeError, match="many must be an array of numbers or of text"):
        packed({}, {"many": np.array([{}, {}])})
    assert (len(packed({}, {"a": np.zeros(10_000)}, compressed=compressed)) < 10_000) == compressed
    rows = [{"branch": "semantic", "q": 0.5}, {"branch": "positional", "q": math.nan, "m": 1}]
    assert csv_of(rows) == b"branch,q,m\nsemantic,0.5,\npositional,nan,1\n"


def test_fingerprints(state):
    """They change with every number, type, shape and static field, not with the address of a function or an object."""
    mark, weights = fingerprint(state, 1.0), np.asarray(state.weights)
    assert mark == fingerprint(state, 1.0) and len(mark) == 64
    other = np.nextafter(weights, np.inf, where=np.eye(3, 2) > 0, out=weights.copy())
    arrays = other, weights.reshape(2, 3), weights.astype(np.float32)
    changes = [State(a, state.memory) for a in arrays] + [State(weights, state.memory, size=4)]
    assert mark not in [fingerprint(changed, 1.0) for changed in changes]
    assert fingerprint(state, 2.0) != mark != fingerprint(1.0, state)
    first, second = (State(weights, {}, size=(lambda x: x, object())) for _ in range(2))
    assert repr(jax.tree.structure(first)) != repr(jax.tree.structure(second))
    assert fingerprint(first) == fingerprint(second)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path, state):
    path = tmp_path / "new folder" / "run"
    checkpoint, fresh = training(path, CONFIGURATION), jax.tree.map(lambda a: a * 0, state)
    assert checkpoint.latest(fresh) == (0, fresh)
    checkpoint.keep(1, fresh)
    checkpoint.keep(2, state)
    done, loaded = training(str(path), dict(CONFIGURATION)).latest(fresh)
    assert done == 2 and [p.name for p in path.parent.iterdir()] == ["run"]
    assert_equal_trees(loaded, state)
    checkpoint.keep(5, (jnp.ones(2), np.ones((2, 5))))  # a state may grow
    assert checkpoint.latest((jnp.zeros(2), np.zeros((2, 0))))[1][1].shape == (2, 5)


def test_damaged_checkpoints_are_named(tmp_path, state):
    path = tmp_path / "run"
    checkpoint = training(path, CONFIGURATION)
    checkpoint.keep(1, state)
    message = f"checkpoint must be whole and written by this library, got checkpoint='{path}' with run damaged"
    for content in damaged(path.read_bytes(), tmp_path / "made"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            checkpoint.latest(state)
    checkpoint.keep(1, {"weights": state.weights})  # a state of another structure
    with pytest.raises(InputError, match=message):
        checkpoint.latest(state)
    with pytest.raises(InputError, match="checkpoint must be whole and written by this library"):
        training(tmp_path, CONFIGURATION).latest(state)  # the path is a folder
