"""Vectors in files of their own: what a generation refers to is whole, written once, and removed with the last of them."""

import gc

import numpy as np
import pytest

from fedscaffold.state import StateError, commit, latest
from fedscaffold.state.vectors import VectorWriter


def written(folder, values, blocks=2):
    """A draft of `values`, in so many blocks."""
    folder.mkdir(exist_ok=True)
    writer = VectorWriter(folder, values.dtype)
    for block in np.array_split(values, blocks):
        writer.append(block)
    return writer.finish()


def files(folder, kind):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(kind))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_any_slice_is_that_of_the_array(dtype, tmp_path):
    values = np.random.default_rng(0).normal(size=13).astype(dtype)
    vector = written(tmp_path, values, blocks=3)
    for begin in range(14):
        for end in range(14):
            assert vector[begin:end].tobytes() == values[begin:end].tobytes()
    assert np.asarray(vector).tobytes() == values.tobytes()
    assert (vector.shape, len(vector), vector.nbytes) == (values.shape, 13, values.nbytes)
    with pytest.raises(IndexError, match="step 1"):
        vector[::2]


def test_a_vector_comes_back_and_is_written_once(tmp_path):
    one, two = np.arange(5.0), np.arange(4, dtype=np.float32)
    kept = written(tmp_path, one)
    commit(tmp_path, {"x": np.ones(2), "a": kept, "b": written(tmp_path, two)}, {"round": 1})
    before = kept.path.stat()
    commit(tmp_path, {"x": np.zeros(2), "a": kept}, {"round": 2}, after=1)
    after = kept.path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    snapshot = latest(tmp_path)
    assert snapshot.facts == {"round": 2}
    assert np.asarray(snapshot.arrays["a"]).tobytes() == one.tobytes()
    assert oct(after.st_mode & 0o777) == "0o600"
    # what was loaded can be committed again, and is not written again either
    commit(tmp_path, {"x": np.zeros(2), "a": snapshot.arrays["a"]}, {"round": 3}, after=2)
    assert kept.path.stat().st_ino == before.st_ino


def test_vectors_go_with_the_last_generation_that_refers_to_them(tmp_path):
    for round_ in range(1, 6):
        vector = written(tmp_path, np.full(3, float(round_)))
        commit(tmp_path, {"a": vector}, {"round": round_})
        assert len(files(tmp_path, "vector-")) == min(round_, 2)
    commit(tmp_path, {}, {"round": 6})
    commit(tmp_path, {}, {"round": 7})
    assert files(tmp_path, "vector-") == []


def test_a_draft_goes_with_its_last_reference_or_with_the_next_commit(tmp_path):
    draft = written(tmp_path, np.ones(3))
    assert len(files(tmp_path, ".draft-")) == 1
    del draft
    gc.collect()
    assert files(tmp_path, ".draft-") == []
    (tmp_path / ".draft-1-0").write_bytes(b"left by a process that was killed")
    commit(tmp_path, {}, {})
    assert files(tmp_path, ".draft-") == []


@pytest.mark.parametrize("damage", ["missing", "short", "long", "flipped", "a link"])
def test_a_generation_with_a_damaged_vector_is_passed_over(damage, tmp_path):
    old, new = written(tmp_path, np.ones(3)), written(tmp_path, np.zeros(3))
    commit(tmp_path, {"a": old}, {"round": 1})
    commit(tmp_path, {"a": new}, {"round": 2}, after=1)
    content = bytearray(new.path.read_bytes())
    new.path.unlink()
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        new.path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        content[5] ^= damage == "flipped"
        size = {"short": -1, "long": 1}.get(damage, 0)
        new.path.write_bytes(bytes(content + b"\0")[: len(content) + size])
    snapshot = latest(tmp_path)
    assert snapshot.facts == {"round": 1}
    assert "generation 1 is used instead" in snapshot.warnings[0]
    assert np.asarray(snapshot.arrays["a"]).tolist() == [1.0, 1.0, 1.0]
    commit(tmp_path, {"a": snapshot.arrays["a"]}, {"round": 3}, after=1)
    assert latest(tmp_path).facts == {"round": 3}


def test_a_vector_of_another_folder_is_refused(tmp_path):
    vector = written(tmp_path / "one", np.ones(3))
    with pytest.raises(StateError, match="where it would be committed"):
        commit(tmp_path / "two", {"a": vector}, {})


def test_without_vectors_the_format_is_the_first(tmp_path):
    """Older versions read what has no vectors, and refuse what has them rather than to lose them."""
    commit(tmp_path, {"x": np.ones(2)}, {})
    commit(tmp_path, {"a": written(tmp_path, np.ones(3))}, {})
    first, second = (
        path.read_bytes().split(b'"fedscaffold":"')[1][:1]
        for path in sorted(tmp_path.glob("state-*"))
    )
    assert (first, second) == (b"1", b"2")
