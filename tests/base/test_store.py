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
from tiedattn_jax.base.files import Store, csv_of, fingerprint, make_folder, packed, write_whole

PIECES = {
    "track-00000": {"q": np.linspace(0, 1, 6).reshape(2, 3), "ok": np.array([True, False])},
    "track-00012": {"q": np.array([np.nan, -np.inf]), "n": np.int32(3)},
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
    return State(jax.random.normal(jax.random.key(0), (3, 2)), memory)


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
    assert_equal_trees(grid(filled).pieces(), jax.tree.map(np.asarray, PIECES))
    assert sorted(p.name for p in filled.iterdir()) == sorted(f"{name}.npz" for name in PIECES)


def test_only_its_own_files_are_looked_at(filled):
    """Pieces of the grid are read, and nothing else; a run that does not resume refuses them."""
    (filled / "diagram.npz").write_bytes(packed({}, {"q": np.ones(3)}))
    (filled / "notes.txt").write_text("mine")
    (filled / ".track-00001.npz.part").write_bytes(b"half a piece")
    assert set(grid(filled).pieces()) == set(PIECES)
    with pytest.raises(InputError, match=r"out must not hold the pieces .* unless resume is asked for.* 3 of them"):
        grid(filled, resume=False)


def test_without_a_place_nothing_is_kept(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    store, checkpoint = grid(None, resume=False), training(None, CONFIGURATION)
    store.put("track-00000", PIECES["track-00000"])
    checkpoint.keep(3, state)
    assert store.pieces() == {} and checkpoint.latest(state) == (0, state) and list(tmp_path.iterdir()) == []


def test_folders_are_made(tmp_path):
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        make_folder(folder, "out")
    assert folder.is_dir() and grid(folder / "c").pieces() == {}
    grid(str(folder / "c"), resume=False).put("track-00000", {"q": np.ones(2)})
    assert list(grid(folder / "c").pieces()) == ["track-00000"]


def test_what_belongs_to_another_computation_is_refused(filled, tmp_path, state, monkeypatch):
    """Pieces and checkpoints say in what they differ, and from which version they are."""
    training(tmp_path / "run", CONFIGURATION).keep(1, state)

    def pieces(mark="mark"):
        grid(filled, mark).pieces()

    def latest(configuration=CONFIGURATION):
        training(tmp_path / "run", configuration).latest(state)

    out, checkpoint = "out must hold pieces of the same model only,", "checkpoint must be of this configuration,"
    changed = {"rate": 0.2, "names": ["a", "b"], "epochs": 3}
    for call, other, message in (
        (pieces, "other mark", f"{out} got .* with fingerprint='mark' instead of 'other mark'"),
        (latest, changed, f"{checkpoint}.* rate=0.1 instead of 0.2, epochs=None instead of 3, runs=2 instead of None"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message) as raised:
            call(other)
        assert raised.value.argument == message.partition(" ")[0]
    monkeypatch.setattr("tiedattn_jax.base.files.VERSION", "0.0.1")
    for call, start in ((pieces, out), (latest, checkpoint)):
        with pytest.raises(InputError, match=rf"{start} .* with version='0\.1\.0' instead of '0\.0\.1'"):
            call()


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    message = r"out must be a folder that can be written, got out='.*file' \(File exists\)"
    for make in (lambda: grid(tmp_path / "file", resume=False), lambda: make_folder(tmp_path / "file", "out")):
        with pytest.raises(InputError, match=message) as raised:
            make()
        assert raised.value.argument == "out"
    if os.geteuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(InputError, match="out must be a folder that can be written"):
            grid(tmp_path / "closed", resume=False)


def damaged(whole):
    """Yield damaged contents: empty, of other kinds, cut off, or with a flipped bit in the arrays."""
    npy, npz, objects, rng = io.BytesIO(), io.BytesIO(), io.BytesIO(), random.Random(0)
    np.save(npy, np.ones(3))
    np.savez(npz, q=np.ones(3))
    np.savez(objects, about=np.array("{}"), q=np.array([{"a": 1}], object))  # only a pickle could read it
    yield from (b"", b"text", b"\x93 something else", npy.getvalue(), npz.getvalue(), objects.getvalue())
    yield packed({}, {"a": np.ones(2)})  # a file of this library, but of another kind
    for about in (5, [[[]]], [], None, {"computation": 5}):  # no dictionary
        yield packed(about, {})
    for shape in ((10**12,), (3, 10**9), None):
        yield with_array(shape)
    yield from (whole[:k] for k in range(0, len(whole), 40))
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        entries = file.infolist()
    for _ in range(100):
        content, entry = bytearray(whole), rng.choice(entries)
        data = entry.header_offset + 30 + int.from_bytes(whole[entry.header_offset + 26 :][:2], "little")
        data += int.from_bytes(whole[entry.header_offset + 28 :][:2], "little")  # after the name and the extra field
        content[data + rng.randrange(entry.compress_size)] ^= 1 << rng.randrange(8)
        yield bytes(content)


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


def test_a_flipped_bit_changes_no_number(filled):
    """Wherever a bit is flipped, in the arrays or in the tables of the zip file: it is found, or it changes nothing."""
    path, store, rng = filled / "track-00012.npz", grid(filled), random.Random(1)
    whole, pieces, found = path.read_bytes(), store.pieces(), 0
    for _ in range(300):
        content = bytearray(whole)
        content[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            assert_equal_trees(store.pieces(), pieces)
        except InputError:
            found += 1
    assert found > 150


def test_a_copy_of_a_piece_is_refused(filled):
    """A piece says which one it is: under another name, and under a foreign one, it is not believed."""
    for name in ("track-00007", "track-notes", "retry-00012"):
        copy = filled / f"{name}.npz"
        copy.write_bytes((filled / "track-00012.npz").read_bytes())
        message = f"out must hold every piece under its own name, got .* with track-00012 in {name}.npz: delete this"
        with pytest.raises(InputError, match=message):
            grid(filled).pieces()
        copy.unlink()
    assert set(grid(filled).pieces()) == set(PIECES)


class Executed:
    """An object that makes a folder when a pickle of it is read."""

    folder = ""

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_nothing_in_a_file_is_executed(filled, tmp_path):
    Executed.folder = str(tmp_path / "made")
    np.savez(filled / "track-00012.npz", about=np.array("{}"), q=np.array([Executed()], object))
    with pytest.raises(InputError, match="damaged or of another kind"):
        grid(filled).pieces()
    assert not (tmp_path / "made").exists()


def test_damaged_pieces_are_named(filled):
    path, store, message = filled / "track-00012.npz", grid(filled), "npz damaged or of another kind: delete this file"
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"with track-00012.{message}") as raised:
            store.pieces()
        assert "pickle" not in str(raised.value)
    path.unlink()
    assert set(store.pieces()) == set(PIECES) - {"track-00012"}
    path.mkdir()
    with pytest.raises(InputError, match=message):
        store.pieces()


def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    """The content is on the disk, in a part beside the file, before it has the file's name."""
    path, order, replace = tmp_path / "new folder" / "file", [], os.replace
    write_whole(path, b"old")

    def disk_full(file):
        assert [p.name for p in path.parent.glob(".*.part")]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", disk_full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'") as raised:
        write_whole(path, b"new")
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", lambda file: order.append(os.fstat(file).st_size))
    monkeypatch.setattr("tiedattn_jax.base.files.os.replace", lambda *a: order.append("named") or replace(*a))
    write_whole(path, b"newer")
    assert order == [5, "named"]
    assert path.read_bytes() == b"newer" and list(path.parent.iterdir()) == [path]
    os.umask(mask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # the same permissions as any other file


def test_an_interrupted_run_leaves_what_was_finished(filled, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tiedattn_jax.base.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        grid(filled).put("track-00013", {"q": np.ones(2)})
    assert set(grid(filled).pieces()) == set(PIECES)
    assert sorted(p.name for p in filled.iterdir()) == sorted(f"{name}.npz" for name in PIECES)


WRITER = """
import sys
from pathlib import Path
from tiedattn_jax.base.files import write_whole
print("filling", flush=True)
while True:
    write_whole(Path(sys.argv[1]) / "both", b"b" * 3_000_000)
"""


def test_another_writer_of_the_file(tmp_path):
    """Every read gives the whole content of one of two writers, and no write fails; one is then killed.

    A file that it finished is whole. A file that it had only begun is not read as a piece.
    """
    folder, first_bytes = tmp_path / "folder", set()
    path, deadline = folder / "both", time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "filling\n"
        while len(first_bytes) < 2 and time.monotonic() < deadline:
            for _ in range(5):
                write_whole(path, b"a" * 2_000_000)
                content = path.read_bytes()
                assert content in (b"a" * 2_000_000, b"b" * 3_000_000)
                first_bytes.add(content[:1])
        path.unlink()
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert first_bytes == {b"a", b"b"} and path.read_bytes() == b"b" * 3_000_000
    (folder / ".0123.part").write_bytes(b"b")
    grid(folder, resume=False).put("track-00000", {"q": np.ones(2)})
    assert list(grid(folder).pieces()) == ["track-00000"]


def test_two_runs_in_one_folder(tmp_path):
    """Both write equal pieces, and each reads those of the other."""
    first, second = grid(tmp_path), grid(tmp_path)
    for store, names in ((first, ("track-00000", "track-00012")), (second, ("track-00012", "retry-00001"))):
        for name in names:
            store.put(name, PIECES[name])
    for store in (first, second):
        assert_equal_trees(store.pieces(), jax.tree.map(np.asarray, PIECES))


@pytest.mark.parametrize("compressed", [True, False])
def test_packed_arrays(compressed, monkeypatch):
    def older(write):  # numpy 2.0 stores every other keyword as an array
        return lambda file, **arrays: (
            write(file, **arrays) if set(arrays) == {"about", "a", "name"} else pytest.fail(str(arrays))
        )

    for name in ("savez", "savez_compressed"):
        monkeypatch.setattr(np, name, older(getattr(np, name)))
    arrays = {"a": np.arange(3), "name": np.array("x")}
    with np.load(io.BytesIO(packed({}, arrays, compressed=compressed))) as file:
        assert file.files == ["about", "a", "name"] and file["a"].tolist() == [0, 1, 2] and str(file["name"]) == "x"
    with pytest.raises(TypeError, match="many must be an array of numbers or of text"):
        packed({}, {"many": np.array([{}, {}])})
    zeros = {"a": np.zeros(10_000), "name": np.array("x")}
    assert (len(packed({}, zeros, compressed=compressed)) < 10_000) == compressed


def test_tables():
    rows = [{"branch": "semantic", "q": 0.5}, {"branch": "positional", "q": math.nan, "m": 1}]
    assert csv_of(rows) == b"branch,q,m\nsemantic,0.5,\npositional,nan,1\n"


def test_fingerprints(state):
    mark, weights = fingerprint(state, 1.0), state.weights
    assert mark == fingerprint(state, 1.0) and len(mark) == 64
    arrays = weights.at[0, 0].add(jnp.finfo(weights.dtype).eps), weights.reshape(2, 3), weights.astype(jnp.float32)
    changes = [State(a, state.memory) for a in arrays] + [State(weights, state.memory, size=4)]
    assert mark not in [fingerprint(changed, 1.0) for changed in changes]
    assert fingerprint(state, 2.0) != mark != fingerprint(1.0, state)


def test_a_fingerprint_has_no_addresses():
    """Functions and objects in static fields have another address in every process."""

    def of_new_objects():
        return State(jnp.ones(2), {}, size=(lambda x: x, object()))

    first, second = of_new_objects(), of_new_objects()
    assert repr(jax.tree.structure(first)) != repr(jax.tree.structure(second))
    assert fingerprint(first) == fingerprint(second)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path, state):
    path = tmp_path / "new folder" / "run"
    checkpoint, fresh = training(path, CONFIGURATION), jax.tree.map(lambda a: a * 0, state)
    assert checkpoint.latest(fresh) == (0, fresh)
    for done in (1, 2):
        kept = eqx.tree_at(lambda s: s.memory["count"], state, jnp.array([done], jnp.int32))
        checkpoint.keep(done, kept)
    done, loaded = training(str(path), dict(CONFIGURATION)).latest(fresh)
    assert done == 2 and loaded.memory["count"].tolist() == [2]
    assert_equal_trees(loaded, kept)
    assert [p.name for p in path.parent.iterdir()] == ["run"]
    checkpoint.keep(5, (jnp.ones(2), np.ones((2, 5))))  # a state may grow
    assert checkpoint.latest((jnp.zeros(2), np.zeros((2, 0))))[1][1].shape == (2, 5)


def test_damaged_checkpoints_are_named(tmp_path, state):
    path = tmp_path / "run"
    checkpoint = training(path, CONFIGURATION)
    checkpoint.keep(1, state)
    message = f"checkpoint must be whole and written by this library, got checkpoint='{path}' with run damaged"
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            checkpoint.latest(state)
    checkpoint.keep(1, {"weights": state.weights})  # a state of another structure
    with pytest.raises(InputError, match=message):
        checkpoint.latest(state)
    with pytest.raises(InputError, match="checkpoint must be whole and written by this library"):
        training(tmp_path, CONFIGURATION).latest(state)  # the path is a folder
