"""One atomic commit: exact, checked, two generations deep, safe against strangers and full disks."""

import hashlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedscaffold.checks import InputError
from fedscaffold.state import Snapshot, StateError, commit, latest, load
from fedscaffold.state.files import locked

FIRST = {"x": np.array([0.1, math.nan, -0.0, math.inf]), "c": np.zeros((2, 3), np.float32)}
SECOND = {"x": np.array([0.2, 1e-310, -1.5, 7.0]), "c": np.ones((2, 3), np.float32)}


def same(snapshot, arrays, facts):
    """Bit for bit: dtype, shape and bytes of every array, and the facts."""
    assert snapshot.facts == facts
    assert snapshot.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        kept = snapshot.arrays[name]
        assert (kept.dtype, kept.shape, kept.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        ), name


def files(folder):
    return sorted(Path(folder).glob("state-*"))


def two(folder):
    """A folder with two generations."""
    commit(folder, FIRST, {"round": 1})
    commit(folder, SECOND, {"round": 2})
    return files(folder)


def forged(folder, content, generation=9):
    """A file with the right name for any bytes: what a stranger can make."""
    path = (
        Path(folder) / f"state-{generation:08d}-{hashlib.sha256(content).hexdigest()}.safetensors"
    )
    path.write_bytes(content)
    return path


def container(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


KEPT = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ">f8", ">i4"]
arrays = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != "__metadata__"),
    st.sampled_from(KEPT).flatmap(
        lambda t: hnp.arrays(t, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ),
    max_size=4,
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(arrays, st.dictionaries(st.text(max_size=5), plain, max_size=3))
def test_what_comes_back_is_what_was_committed(arrays, facts):
    with tempfile.TemporaryDirectory() as folder:
        assert commit(folder, arrays, facts) == 1
        native = {
            name: array.astype(array.dtype.newbyteorder("<")) for name, array in arrays.items()
        }
        same(latest(folder), native, facts)
        for array in latest(folder).arrays.values():
            assert array.flags.writeable
            assert array.flags.c_contiguous


def test_memory_order_does_not_matter(tmp_path):
    matrix = np.arange(12.0).reshape(3, 4)
    given = {
        "transposed": matrix.T,
        "strided": matrix[:, ::2],
        "reversed": matrix[::-1],
        "scalar": np.float32(3.5),
    }
    commit(tmp_path, given, {})
    for name, array in given.items():
        np.testing.assert_array_equal(latest(tmp_path).arrays[name], array)


def test_other_readers_of_the_format_agree(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    from safetensors import safe_open

    given = {
        **FIRST,
        "flags": np.array([True, False, True]),
        "ids": np.arange(5),
        "none": np.empty((0, 7), np.float16),
    }
    commit(tmp_path, given, {"round": 3})
    (path,) = files(tmp_path)
    read = library.load_file(path)
    same(latest(tmp_path)._replace(arrays=read), given, {"round": 3})
    with safe_open(path, "numpy") as file:
        assert json.loads(file.metadata()["facts"]) == {"round": 3}
    # and the other way round: what the library writes, under our name and metadata, we read
    meta = {"fedscaffold": "1", "generation": "9", "facts": '{"by": "library"}'}
    same(load(forged(tmp_path, library.save(given, meta))), given, {"by": "library"})


def test_the_name_is_the_checksum(tmp_path):
    commit(tmp_path, FIRST, {})
    (path,) = files(tmp_path)
    assert (
        path.name == f"state-00000001-{hashlib.sha256(path.read_bytes()).hexdigest()}.safetensors"
    )


def test_the_last_two_are_kept(tmp_path):
    for round_ in range(1, 6):
        assert commit(tmp_path, FIRST, {"round": round_}) == round_
        kept = [load(path).facts["round"] for path in files(tmp_path)]
        assert kept == [n for n in (round_ - 1, round_) if n]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("state-")) == [
        ".lock"
    ]
    assert commit(tmp_path, FIRST, {}, keep=4) == 6
    assert len(files(tmp_path)) == 3


def test_nothing_committed_is_no_error(tmp_path):
    assert latest(tmp_path / "missing") is None
    assert latest(tmp_path) is None


def test_truncated_at_every_length(tmp_path):
    _, newest = two(tmp_path)
    whole = newest.read_bytes()
    for length in range(len(whole)):
        newest.write_bytes(whole[:length])
        snapshot = latest(tmp_path)
        same(snapshot, FIRST, {"round": 1})
        (warning,) = snapshot.warnings
        assert newest.name in warning
        assert "generation 1 is used instead" in warning
    newest.write_bytes(whole + b"\0")
    same(latest(tmp_path), FIRST, {"round": 1})
    newest.write_bytes(whole)
    same(latest(tmp_path), SECOND, {"round": 2})


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bits_are_found(data):
    with tempfile.TemporaryDirectory() as folder:
        _, newest = two(folder)
        content = bytearray(newest.read_bytes())
        for place in data.draw(
            st.sets(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=4)
        ):
            content[place // 8] ^= 1 << place % 8
        newest.write_bytes(content)
        snapshot = latest(folder)
        same(snapshot, FIRST, {"round": 1})
        assert newest.name in snapshot.warnings[0]


def test_when_none_is_whole_it_says_so_of_each(tmp_path):
    for path in two(tmp_path):
        path.write_bytes(b"torn")
    with pytest.raises(
        StateError, match=r"no whole state.*00000002.*truncated.*00000001.*truncated"
    ):
        latest(tmp_path)


def test_a_caller_may_pass_over_a_snapshot(tmp_path):
    two(tmp_path)

    def not_the_second(snapshot):
        if snapshot.facts["round"] == 2:
            raise StateError("its rows are damaged")

    snapshot = latest(tmp_path, accept=not_the_second)
    assert snapshot.generation == 1
    assert snapshot.warnings == ("its rows are damaged; generation 1 is used instead",)


def test_damaged_generations_do_not_push_good_ones_out(tmp_path):
    good, bad = two(tmp_path)
    bad.write_bytes(b"torn")
    assert commit(tmp_path, SECOND, {"round": 3}, after=latest(tmp_path).generation) == 3
    assert [load(path).facts["round"] for path in files(tmp_path)] == [1, 3]
    assert good.exists()


def test_two_runs_in_one_folder_are_found_out(tmp_path):
    two(tmp_path)
    with pytest.raises(StateError, match="moved on to generation 2"):
        commit(tmp_path, FIRST, {}, after=1)
    assert latest(tmp_path).generation == 2
    with locked(tmp_path / ".lock"), pytest.raises(StateError, match="in use by another process"):
        commit(tmp_path, FIRST, {})
    assert commit(tmp_path, FIRST, {}, after=2) == 3


def test_foreign_files_are_named_and_left_alone(tmp_path):
    two(tmp_path)
    foreign = tmp_path / "model.safetensors"
    foreign.write_bytes(container({"__metadata__": {}}))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".commit.tmp").write_bytes(b"left by a crash")
    assert latest(tmp_path).warnings == (
        "model.safetensors is not a state of this folder; it is ignored",
    )
    commit(tmp_path, FIRST, {})
    assert foreign.exists()
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / ".commit.tmp").exists()


OURS = {"fedscaffold": "1", "generation": "9", "facts": "{}"}


def entry(dtype="F64", shape=(1,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "empty": b"",
    "header longer than the file": container({"__metadata__": OURS}, length=1 << 62),
    "header of 1 GiB claimed": container(b"{}", length=1 << 30),
    "not JSON": container(b"\xff" * 64),
    "a list": container([1, 2]),
    "deep nesting": container(b"[" * 200_000),
    "repeated key": container(b'{"__metadata__": {}, "__metadata__": {}}'),
    "NaN in the header": container(b'{"x": NaN}'),
    "number of a million digits": container(b'{"x": ' + b"9" * 1_000_000 + b"}"),
    "no metadata": container({"x": entry()}, bytes(8)),
    "metadata not text": container({"__metadata__": {"fedscaffold": 1}}),
    "another format": container({"__metadata__": {**OURS, "fedscaffold": "2"}}),
    "another generation": container({"__metadata__": {**OURS, "generation": "8"}}),
    "facts missing": container({"__metadata__": {"fedscaffold": "1", "generation": "9"}}),
    "facts not an object": container({"__metadata__": {**OURS, "facts": "[]"}}),
    "facts with NaN": container({"__metadata__": {**OURS, "facts": '{"a": NaN}'}}),
    "1 TiB claimed": container(
        {"__metadata__": OURS, "x": entry(shape=(1 << 37,), offsets=(0, 1 << 40))}, bytes(8)
    ),
    "product overflows 64 bits": container(
        {"__metadata__": OURS, "x": entry(shape=(1 << 32, 1 << 32), offsets=(0, 0))}
    ),
    "empty but absurd": container(
        {"__metadata__": OURS, "x": entry(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0))}
    ),
    "hundred dimensions": container({"__metadata__": OURS, "x": entry(shape=(1,) * 100)}, bytes(8)),
    "negative shape": container({"__metadata__": OURS, "x": entry(shape=(-1, -1))}, bytes(8)),
    "truth for a shape": container({"__metadata__": OURS, "x": entry(shape=(True,))}, bytes(8)),
    "offsets backwards": container({"__metadata__": OURS, "x": entry(offsets=(8, 0))}, bytes(8)),
    "offsets negative": container({"__metadata__": OURS, "x": entry(offsets=(-8, 0))}, bytes(8)),
    "hole": container({"__metadata__": OURS, "x": entry(offsets=(8, 16))}, bytes(16)),
    "overlap": container({"__metadata__": OURS, "x": entry(), "y": entry()}, bytes(8)),
    "bytes left over": container({"__metadata__": OURS, "x": entry()}, bytes(16)),
    "pickled objects": container({"__metadata__": OURS, "x": entry(dtype="O")}, bytes(8)),
    "dtype is a list": container({"__metadata__": OURS, "x": entry(dtype=["F64"])}, bytes(8)),
    "an extra field": container({"__metadata__": OURS, "x": {**entry(), "run": "me"}}, bytes(8)),
    "truth value 2": container({"__metadata__": OURS, "x": entry("BOOL", (8,))}, b"\x02" * 8),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_strangers_get_a_typed_error_and_no_memory(tmp_path, content):
    path = forged(tmp_path, content)
    tracemalloc.start()
    with pytest.raises(StateError):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (1 << 20) + 10 * len(content)  # NumPy reports its arrays to tracemalloc too
    commit(tmp_path, FIRST, {"round": 1})
    forged(tmp_path, content, generation=11)
    same(latest(tmp_path), FIRST, {"round": 1})


def test_names_of_arrays_are_only_names(tmp_path):
    given = {"../../escape": np.ones(2), "/etc/passwd": np.ones(1), "a\0b": np.ones(3)}
    commit(tmp_path / "run", given, {})
    same(latest(tmp_path / "run"), given, {})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_links_pipes_and_folders_are_refused(tmp_path):
    two(tmp_path / "elsewhere")
    target = files(tmp_path / "elsewhere")[-1]
    folder = tmp_path / "run"
    commit(folder, FIRST, {"round": 1})
    (folder / target.name).symlink_to(target)
    assert "symbolic link" in latest(folder).warnings[0]
    (folder / target.name).unlink()
    os.mkfifo(folder / target.name)  # opening a pipe would wait for ever
    assert "not a regular file" in latest(folder).warnings[0]
    (folder / target.name).unlink()
    (folder / target.name).mkdir()
    assert "not a regular file" in latest(folder).warnings[0]


def test_a_planted_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    commit(folder, FIRST, {})
    (folder / ".commit.tmp").symlink_to(victim)
    commit(folder, SECOND, {})
    assert victim.read_text() == "precious"
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(StateError):
        commit(folder, SECOND, {})


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"x": np.array([1j])}, {}),
        ({"x": np.array([object()])}, {}),
        ({"x": np.array(["text"])}, {}),
        ({"__metadata__": np.ones(1)}, {}),
        ({}, {"loss": math.nan}),
        ({}, {"loss": math.inf}),
        ({}, {"pair": (1, 2)}),
        ({}, {"nested": {1: "key"}}),
        ({}, {3: "key"}),
        ({}, {"object": object()}),
        ({}, {"long": "x" * (5 << 20)}),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_before(tmp_path, arrays, facts):
    commit(tmp_path, FIRST, {"round": 1})
    with pytest.raises(StateError):
        commit(tmp_path, arrays, facts)
    same(latest(tmp_path), FIRST, {"round": 1})
    assert issubclass(StateError, InputError)


def limited(folder, bytes_):
    """Commit 1 MB in a process whose files may not be larger than `bytes_`; what it says."""
    code = f"""
import resource, signal, numpy as np
from fedscaffold.state import commit, StateError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_}, {bytes_}))
try: commit({str(folder)!r}, {{"x": np.ones(131072)}}, {{}})
except StateError as error: print(error)
"""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.process
@pytest.mark.parametrize("room", [0, 100, 500_000])
def test_a_full_quota_leaves_the_last_good_state(tmp_path, room):
    commit(tmp_path, FIRST, {"round": 1})
    assert "full" in limited(tmp_path, room)
    same(latest(tmp_path), FIRST, {"round": 1})
    assert not (tmp_path / ".commit.tmp").exists()
    assert limited(tmp_path, resource.RLIM_INFINITY) == ""
    assert latest(tmp_path).generation == 2


FULL_DISK = """
import os, sys, numpy as np
from fedscaffold.state import StateError, commit, latest
folder = sys.argv[1]
for round_ in range(3):  # the disk holds 1 MB, a generation takes 0.3
    try:
        commit(folder, {"x": np.full(40_000, round_ + 0.0)}, {"round": round_})
    except StateError as error:
        sys.exit(f"too early: {error}")
try:
    commit(folder, {"x": np.ones(120_000)}, {"round": 3})
    sys.exit("it fitted")
except StateError as error:
    assert "No space left on device" in str(error) and "intact" in str(error), error
assert latest(folder).facts == {"round": 2} and (latest(folder).arrays["x"] == 2).all() and not latest(folder).warnings
assert ".commit.tmp" not in os.listdir(folder)
commit(folder, {"x": np.ones(10)}, {"round": 3})
assert latest(folder).facts == {"round": 3}
print("held")
"""


@pytest.mark.process
def test_a_disk_that_is_really_full(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare to mount a small disk")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} || exit 77; exec {sys.executable} -c '{FULL_DISK}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this system lets users mount nothing")
    assert done.stdout == "held\n", done.stderr


def test_errors_of_the_system_are_sentences(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"committing to .* failed: "):
        commit(tmp_path / "file" / "run", FIRST, {})


def test_a_snapshot_is_a_plain_tuple():
    assert Snapshot({}, {}, 1) == ({}, {}, 1, ())
