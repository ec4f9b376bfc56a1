"""Files are whole or absent, and computations resume from pieces and checkpoints."""

import errno
import hashlib
import io
import math
import os
import random
import subprocess
import sys
import time
import tracemalloc
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.files import Checkpoint, Store, claim, csv_of, fingerprint, packed, unpacked, write_whole

PIECES = {
    "track-00000": {"q": np.linspace(0, 1, 6).reshape(2, 3), "ok": np.array([True, False])},
    "track-00012": {"q": np.array([np.nan, -np.inf]), "n": np.int32(3)},
    "retry-00001": {"empty": np.zeros((0, 4), np.float32)},
}


class State(eqx.Module):
    weights: jax.Array
    memory: dict
    size: int = eqx.field(static=True, default=3)


@pytest.fixture
def state():
    memory = {"count": jnp.array([4], jnp.int32), "moment": jnp.arange(3, dtype=jnp.bfloat16), "seen": np.ones((2, 5))}
    return State(jax.random.normal(jax.random.key(0), (3, 2)), memory)


@pytest.fixture
def filled(tmp_path):
    store = Store(tmp_path, "mark", resume=False)
    for name, arrays in PIECES.items():
        store.put(name, arrays)
    return tmp_path


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) and x.dtype == y.dtype and np.shape(x) == np.shape(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_pieces_come_back_bit_by_bit(filled):
    pieces = Store(filled, "mark", resume=True).load()
    assert_equal_trees(pieces, {name: jax.tree.map(np.asarray, arrays) for name, arrays in PIECES.items()})
    assert sorted(p.name for p in filled.iterdir()) == sorted(f"{name}.npz" for name in PIECES)


def test_only_its_own_files_are_looked_at(filled):
    (filled / "diagram.npz").write_bytes(packed({"q": np.ones(3)}))
    (filled / "notes.txt").write_text("mine")
    (filled / ".track-00001.npz.part").write_bytes(b"half a piece")
    assert set(Store(filled, "mark", resume=True).load()) == set(PIECES)
    with pytest.raises(InputError, match="with 3 of them"):
        Store(filled, "mark", resume=False)


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(None, "mark", resume=False)
    store.put("track-00000", PIECES["track-00000"])
    assert store.load() == {} and list(tmp_path.iterdir()) == []


def test_a_new_folder_is_made(tmp_path):
    folder = tmp_path / "a" / "b"
    assert Store(folder, "mark", resume=True).load() == {}
    Store(str(folder), "mark", resume=False).put("track-00000", {"q": np.ones(2)})
    assert list(Store(folder, "mark", resume=True).load()) == ["track-00000"]


def test_pieces_of_another_computation_are_refused(filled):
    message = r"out must hold pieces of the same .* with pieces of others"
    with pytest.raises(InputError, match=message) as raised:
        Store(filled, "other mark", resume=True).load()
    assert raised.value.argument == "out"
    with pytest.raises(InputError, match="out must not hold the pieces of an earlier run unless resume is asked for"):
        Store(filled, "mark", resume=False)


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    message = r"out must be a folder that can be written, got out='.*file' \(File exists\)"
    with pytest.raises(InputError, match=message) as raised:
        Store(tmp_path / "file", "mark", resume=False)
    assert raised.value.argument == "out"
    if os.geteuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(InputError, match="out must be a folder that can be written"):
            Store(tmp_path / "closed", "mark", resume=False)


def damaged(whole):
    """Yield damaged contents: empty, of other kinds, cut off, too long, or with a flipped bit."""
    npy, npz, rng = io.BytesIO(), io.BytesIO(), random.Random(0)
    np.save(npy, np.ones(3))
    np.savez(npz, q=np.ones(3))
    objects = io.BytesIO()
    np.savez(objects, about=np.array("{}"), q=np.array([{"a": 1}], object))
    body = objects.getvalue()[:-2] + bytes([64, 0])
    yield body + hashlib.sha256(body).hexdigest().encode()  # the checksum is right, but only a pickle could read it
    yield from (
        b"",
        b"text",
        b"\x93 something else",
        npy.getvalue(),
        npz.getvalue(),
        objects.getvalue(),
        whole + b"0",
    )
    yield packed({"a": np.ones(2)})  # a file of this library, but of another kind
    for about in ("5", "[" * 100_000, "[]", "null"):  # no dictionary
        yield packed({"about": np.array(about)})
    for shape in ((10**12,), (3, 10**9), (1,)):  # the array has another size than its header says
        yield with_entry("q.npy", header_of(shape) + np.ones(4).tobytes())
    yield with_entry("q.npy", b"no array")
    yield from (whole[:k] for k in range(0, len(whole), 40))
    for _ in range(100):
        content = bytearray(whole)
        content[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        yield bytes(content)


def header_of(shape):
    """The header of an .npy file of doubles."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return out.getvalue()


def with_entry(name, content):
    """A file with the right checksum and an entry that `packed` would not write."""
    about, out = io.BytesIO(), io.BytesIO()
    np.save(about, np.array("{}"))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("about.npy", about.getvalue())
        file.writestr(name, content)
    body = out.getvalue()[:-2] + bytes([64, 0])
    return body + hashlib.sha256(body).hexdigest().encode()


def test_announced_sizes_are_checked_before_memory_is_taken(tmp_path):
    """Zeros of 512 MiB are packed into half a MiB. Reading them would take all of it."""
    size = 2**29
    bomb = with_entry("q.npy", header_of((size // 8,)) + bytes(size))
    assert len(bomb) < 2**20
    (tmp_path / "bomb").write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="out is refused"):
            unpacked(tmp_path / "bomb", InputError("out", "is refused"))
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    zeros = packed({"about": np.array("{}"), "q": np.zeros(2**20)})  # what compresses well is still read
    (tmp_path / "zeros").write_bytes(zeros)
    assert unpacked(tmp_path / "zeros", InputError("out", "is refused"))[1]["q"].shape == (2**20,)


def test_a_copy_of_a_piece_is_refused(filled):
    """A piece says which one it is: under another name, and under a foreign one, it is not believed."""
    for name in ("track-00007", "track-notes", "retry-00012"):
        copy = filled / f"{name}.npz"
        copy.write_bytes((filled / "track-00012.npz").read_bytes())
        message = f"out must hold every piece under its own name, got .* with track-00012 in {name}.npz: delete this"
        with pytest.raises(InputError, match=message):
            Store(filled, "mark", resume=True).load()
        copy.unlink()
    assert set(Store(filled, "mark", resume=True).load()) == set(PIECES)


def test_damaged_pieces_are_named(filled):
    path, store = filled / "track-00012.npz", Store(filled, "mark", resume=True)
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"with track-00012.npz damaged: delete this file") as raised:
            store.load()
        assert "pickle" not in str(raised.value)
    path.unlink()
    assert set(store.load()) == set(PIECES) - {"track-00012"}
    path.mkdir()
    with pytest.raises(InputError, match="damaged: delete this file"):
        store.load()


def test_pieces_of_another_version_are_refused(filled, monkeypatch):
    monkeypatch.setattr("tiedattn_jax.base.files.VERSION", "0.0.1")
    with pytest.raises(InputError, match="same model, nodes, axes and version only"):
        Store(filled, "mark", resume=True).load()


def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "new folder" / "file"
    write_whole(path, b"old")

    def disk_full(file):
        assert [p.name for p in path.parent.glob(".*.part")]  # the part lies beside the file, not in its place
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", disk_full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'") as raised:
        write_whole(path, b"new")
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()  # the same permissions as any other file


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_content_is_on_the_disk_before_it_has_the_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", lambda file: order.append(os.fstat(file).st_size))
    replace = os.replace
    monkeypatch.setattr("tiedattn_jax.base.files.os.replace", lambda *a: order.append("named") or replace(*a))
    write_whole(tmp_path / "file", b"four")
    assert order == [4, "named"]


def test_an_interrupted_run_leaves_what_was_finished(filled, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tiedattn_jax.base.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Store(filled, "mark", resume=True).put("track-00013", {"q": np.ones(2)})
    assert set(Store(filled, "mark", resume=True).load()) == set(PIECES)
    assert sorted(p.name for p in filled.iterdir()) == sorted(f"{name}.npz" for name in PIECES)


WRITER = """
import sys
from pathlib import Path
from tiedattn_jax.base.files import claim, write_whole
folder = Path(sys.argv[1])
held = claim(folder)
print("filling", flush=True)
while True:
    write_whole(folder / "both", b"b" * 3_000_000)
"""


@pytest.fixture
def other_process(tmp_path):
    """A folder that another process fills by writing one file over and over, until it is killed."""
    folder = tmp_path / "folder"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "filling\n"
    yield folder, process
    process.kill()
    process.wait()
    process.stdout.close()


def test_two_writers_of_one_file(other_process):
    """With two writers of one file every read gives the whole content of one of them, and no write fails."""
    path, first_bytes = other_process[0] / "both", set()
    deadline = time.monotonic() + 60
    while len(first_bytes) < 2 and time.monotonic() < deadline:
        for _ in range(5):
            write_whole(path, b"a" * 2_000_000)
            content = path.read_bytes()
            assert content in (b"a" * 2_000_000, b"b" * 3_000_000)
            first_bytes.add(content[:1])
    assert first_bytes == {b"a", b"b"}


def test_a_folder_that_another_process_fills(other_process):
    folder, process = other_process
    message = f"^out must be a folder that no other run is filling: wait for it or use another, got out='{folder}'$"
    for _ in range(2):
        with pytest.raises(InputError, match=message) as raised:
            Store(folder, "mark", resume=False)
    assert raised.value.argument == "out"
    assert list(folder.glob("track-*")) == []
    while not (folder / "both").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    whole = (folder / "both").read_bytes()
    assert whole == b"b" * 3_000_000
    (folder / ".0123.part").write_bytes(b"b")  # left by a process that was killed while it wrote
    store = Store(folder, "mark", resume=False)  # a dead process holds no claim
    store.put("track-00000", {"q": np.ones(2)})
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_a_claim_ends_with_its_last_holder(tmp_path):
    first, second = claim(tmp_path), claim(tmp_path / "." / "")
    assert first is second and first.locked  # one process may hold several claims
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    del first
    assert subprocess.run(command, capture_output=True).returncode == 1
    del second
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("tiedattn_jax.base.files.fcntl.flock", refuse)
    (tmp_path / ".0123.part").write_bytes(b"b")
    assert not claim(tmp_path).locked
    assert len(list(tmp_path.iterdir())) == 1  # the part may be another run's


@pytest.mark.parametrize("compressed", [True, False])
def test_packed_arrays(compressed, monkeypatch):
    def older(write):  # numpy 2.0 stores every other keyword as an array
        return lambda file, **arrays: (
            write(file, **arrays) if set(arrays) == {"a", "name"} else pytest.fail(str(arrays))
        )

    for name in ("savez", "savez_compressed"):
        monkeypatch.setattr(np, name, older(getattr(np, name)))
    arrays = {"a": np.arange(3), "name": np.array("x")}
    with np.load(io.BytesIO(packed(arrays, compressed=compressed))) as file:
        assert file.files == ["a", "name"] and file["a"].tolist() == [0, 1, 2] and str(file["name"]) == "x"
    with pytest.raises(TypeError, match="many must be an array of numbers or of text"):
        packed({"many": np.array([{}, {}])})
    zeros = {"a": np.zeros(10_000), "name": np.array("x")}
    assert (len(packed(zeros, compressed=compressed)) < 10_000) == compressed


def test_tables():
    rows = [{"branch": "semantic", "q": 0.5}, {"branch": "positional", "q": math.nan, "m": 1}]
    assert csv_of(rows) == b"branch,q,m\nsemantic,0.5,\npositional,nan,1\n"


def test_fingerprints(state):
    mark = fingerprint(state, 1.0)
    assert mark == fingerprint(state, 1.0) and len(mark) == 64
    weights = state.weights
    for changed in (
        eqx.tree_at(lambda s: s.weights, state, weights.at[0, 0].add(jnp.finfo(weights.dtype).eps)),
        eqx.tree_at(lambda s: s.weights, state, weights.reshape(2, 3)),
        eqx.tree_at(lambda s: s.weights, state, weights.astype(jnp.float32)),
        State(weights, state.memory, size=4),
    ):
        assert fingerprint(changed, 1.0) != mark
    assert fingerprint(state, 2.0) != mark != fingerprint(1.0, state)


def test_a_fingerprint_has_no_addresses():
    """Functions and objects in static fields have another address in every process."""

    def of_new_objects():
        return State(jnp.ones(2), {}, size=(lambda x: x, object()))

    first, second = of_new_objects(), of_new_objects()
    assert repr(jax.tree.structure(first)) != repr(jax.tree.structure(second))
    assert fingerprint(first) == fingerprint(second)


CONFIGURATION = {"rate": 0.1, "names": ["a", "b"], "runs": 2}


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path, state):
    checkpoint = Checkpoint(tmp_path / "new folder" / "run", CONFIGURATION)
    fresh = jax.tree.map(lambda a: a * 0, state)
    assert checkpoint.load(fresh) == (0, fresh)
    for done in (1, 2):
        checkpoint.save(done, eqx.tree_at(lambda s: s.memory["count"], state, jnp.array([done], jnp.int32)))
    done, loaded = Checkpoint(str(tmp_path / "new folder" / "run"), dict(CONFIGURATION)).load(fresh)
    assert done == 2 and loaded.memory["count"].tolist() == [2]
    assert_equal_trees(loaded, eqx.tree_at(lambda s: s.memory["count"], state, jnp.array([2], jnp.int32)))
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["run"]


def test_a_state_may_grow(tmp_path):
    checkpoint = Checkpoint(tmp_path / "run", CONFIGURATION)
    checkpoint.save(5, (jnp.ones(2), np.ones((2, 5))))
    assert checkpoint.load((jnp.zeros(2), np.zeros((2, 0))))[1][1].shape == (2, 5)


def test_without_a_path_nothing_is_kept(state):
    checkpoint = Checkpoint(None, CONFIGURATION)
    checkpoint.save(3, state)
    assert checkpoint.load(state) == (0, state)


def test_a_checkpoint_of_another_configuration_says_in_what_it_differs(tmp_path, state):
    Checkpoint(tmp_path / "run", CONFIGURATION).save(1, state)
    changed = {"rate": 0.2, "names": ["a", "b"], "epochs": 3}
    with pytest.raises(InputError) as raised:
        Checkpoint(tmp_path / "run", changed).load(state)
    assert raised.value.argument == "checkpoint"
    differences = "with rate=0.1 instead of 0.2, epochs=None instead of 3, runs=2 instead of None"
    assert str(raised.value).startswith("checkpoint must be of this configuration") and differences in str(raised.value)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, state, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tiedattn_jax.base.files.VERSION", "0.0.1")
        Checkpoint(tmp_path / "run", CONFIGURATION).save(1, state)
    with pytest.raises(InputError, match=r"of this configuration, .* with version='0.0.1' instead of '"):
        Checkpoint(tmp_path / "run", CONFIGURATION).load(state)


def test_damaged_checkpoints_are_named(tmp_path, state):
    path = tmp_path / "run"
    checkpoint = Checkpoint(path, CONFIGURATION)
    checkpoint.save(1, state)
    message = f"checkpoint must be one that this library wrote: delete it or name another file, got checkpoint={path}"
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            checkpoint.load(state)
    checkpoint.save(1, {"weights": state.weights})  # a state of another structure
    with pytest.raises(InputError, match=message):
        checkpoint.load(state)
    with pytest.raises(InputError, match="checkpoint must be one that this library wrote"):
        Checkpoint(tmp_path, CONFIGURATION).load(state)  # the path is a folder
