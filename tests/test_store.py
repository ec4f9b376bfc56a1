"""Files that are whole or absent, pieces and checkpoints that computations resume from."""

import io
import os
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.errors import InputError
from tiedattn_jax.store import Checkpoint, Store, fingerprint, packed, write_whole

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


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) and x.dtype == y.dtype and np.shape(x) == np.shape(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_pieces_come_back_bit_by_bit(filled):
    found = Store(filled, "mark", resume=True).load()
    same(found, {name: jax.tree.map(np.asarray, arrays) for name, arrays in PIECES.items()})
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
    message = r"out must hold pieces of the same .* with retry-00001\.npz of others"
    with pytest.raises(InputError, match=message) as raised:
        Store(filled, "other mark", resume=True).load()
    assert raised.value.argument == "out"
    with pytest.raises(InputError, match="out must not hold the pieces of an earlier run unless resume is asked for"):
        Store(filled, "mark", resume=False)


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out must be a folder"):
        Store(tmp_path / "file", "mark", resume=False)
    if os.geteuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(InputError, match="out must be a folder that can be written"):
            Store(tmp_path / "closed", "mark", resume=False)


def test_damaged_pieces_are_named(filled):
    """Every kind of damage is an error about this file, or found to do no harm by its check sum."""
    path, rng = filled / "track-00012.npz", random.Random(0)
    whole = path.read_bytes()
    store, expected = Store(filled, "mark", resume=True), Store(filled, "mark", resume=True).load()
    npy, other = io.BytesIO(), io.BytesIO()
    np.save(npy, np.ones(3))
    np.savez(other, q=np.ones(3))
    contents = [b"", b"\x93 something else", npy.getvalue(), other.getvalue()]
    contents += [whole[:k] for k in range(0, len(whole), 40)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"with track-00012.npz damaged: delete this file"):
            store.load()
    for _ in range(300):
        content = bytearray(whole)
        content[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(bytes(content))
        try:
            found = store.load()
        except InputError as problem:
            assert "track-00012.npz" in str(problem)
        else:
            if set(found["track-00012"]) == {"q", "n"}:  # a name in the zip file's directory has no check sum
                same(found, expected)
    path.unlink()
    assert set(store.load()) == set(PIECES) - {"track-00012"}


def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "new folder" / "file"
    write_whole(path, b"old")

    def full(file):
        raise OSError("no space left")

    monkeypatch.setattr("tiedattn_jax.store.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


def test_a_killed_run_leaves_what_was_finished(filled, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tiedattn_jax.store.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Store(filled, "mark", resume=True).put("track-00013", {"q": np.ones(2)})
    assert set(Store(filled, "mark", resume=True).load()) == set(PIECES)


def test_packed_arrays():
    with np.load(io.BytesIO(packed({"a": np.arange(3), "name": np.array("x")}))) as file:
        assert file.files == ["a", "name"] and file["a"].tolist() == [0, 1, 2] and str(file["name"]) == "x"


def test_fingerprints(state):
    mark = fingerprint(state, 1.0)
    assert mark == fingerprint(state, 1.0) and len(mark) == 64
    weights = state.weights
    for other in (
        eqx.tree_at(lambda s: s.weights, state, weights.at[0, 0].add(jnp.finfo(weights.dtype).eps)),
        eqx.tree_at(lambda s: s.weights, state, weights.reshape(2, 3)),
        eqx.tree_at(lambda s: s.weights, state, weights.astype(jnp.float32)),
        State(weights, state.memory, size=4),
    ):
        assert fingerprint(other, 1.0) != mark
    assert fingerprint(state, 2.0) != mark != fingerprint(1.0, state)


ABOUT = {"rate": 0.1, "names": ["a", "b"], "runs": 2}


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path, state):
    kept = Checkpoint(tmp_path / "new folder" / "run", ABOUT)
    fresh = jax.tree.map(lambda a: a * 0, state)
    assert kept.load(fresh) == (0, fresh)
    for done in (1, 2):
        kept.save(done, eqx.tree_at(lambda s: s.memory["count"], state, jnp.array([done], jnp.int32)))
    done, found = Checkpoint(str(tmp_path / "new folder" / "run"), dict(ABOUT)).load(fresh)
    assert done == 2 and found.memory["count"].tolist() == [2]
    same(found, eqx.tree_at(lambda s: s.memory["count"], state, jnp.array([2], jnp.int32)))
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["run"]


def test_a_state_may_grow(tmp_path):
    kept = Checkpoint(tmp_path / "run", ABOUT)
    kept.save(5, (jnp.ones(2), np.ones((2, 5))))
    assert kept.load((jnp.zeros(2), np.zeros((2, 0))))[1][1].shape == (2, 5)


def test_without_a_path_nothing_is_kept(state):
    kept = Checkpoint(None, ABOUT)
    kept.save(3, state)
    assert kept.load(state) == (0, state)


def test_a_checkpoint_of_another_configuration_says_in_what_it_differs(tmp_path, state):
    Checkpoint(tmp_path / "run", ABOUT).save(1, state)
    other = {"rate": 0.2, "names": ["a", "b"], "epochs": 3}
    with pytest.raises(InputError) as raised:
        Checkpoint(tmp_path / "run", other).load(state)
    assert raised.value.argument == "checkpoint"
    differences = "with rate=0.1 instead of 0.2, epochs=None instead of 3, runs=2 instead of None"
    assert str(raised.value).startswith("checkpoint must be of this configuration") and differences in str(raised.value)


def test_damaged_checkpoints_are_named(tmp_path, state):
    path = tmp_path / "run"
    kept = Checkpoint(path, ABOUT)
    kept.save(1, state)
    whole = path.read_bytes()
    message = f"checkpoint must be one that this library wrote, got checkpoint={path}"
    for content in (b"", b"\x93 something else", whole[:100], whole[:-30], packed({"a": np.ones(2)})):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            kept.load(state)
    kept.save(1, {"weights": state.weights})  # a state of another structure
    with pytest.raises(InputError, match=message):
        kept.load(state)
