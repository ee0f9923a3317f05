"""Stores of client vectors: all give back what was written, whatever happens between; reading ahead never reads late."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscaffold.checks import InputError
from fedscaffold.state import (
    FileStore,
    Prefetched,
    SparseStore,
    StateError,
    choose,
    commit,
    latest,
    mean,
)

N, D = 10, 3
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
KINDS = ["sparse", "file", "file ahead", "sparse ahead"]


def make(kind, folder, num_clients=N, dim=D, dtype="float64"):
    name, *ahead = kind.split()
    store = SparseStore(num_clients, dim, dtype)
    if name == "file":
        store = FileStore(folder, num_clients, dim, dtype)
    return Prefetched(store) if ahead else store


cohorts = st.lists(st.integers(0, N - 1), unique=True, max_size=5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("round"), cohorts, cohorts),
        st.tuples(st.just("write"), cohorts),
        st.tuples(st.just("commit")),
        st.tuples(st.just("crash")),
        st.tuples(st.just("check")),
    ),
    max_size=25,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(steps=steps)
def test_a_store_is_a_table(kind, steps):
    """Any sequence of rounds, writes, commits and crashes gives what a plain array gives."""
    table, saved, rng = np.zeros((N, D)), np.zeros((N, D)), np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        store = make(kind, folder)
        generation = commit(folder, store.snapshot(), {})
        store.committed()
        for step, *cohort in [*steps, ("check",)]:
            if step == "round":
                np.testing.assert_array_equal(store.read(cohort[0]), table[cohort[0]])
                if isinstance(store, Prefetched):
                    store.ask(cohort[1])
            if step in ("round", "write"):
                rows = rng.normal(size=(len(cohort[0]), D))
                store.write(cohort[0], rows)
                table[cohort[0]] = rows
            if step == "round":
                np.testing.assert_array_equal(store.read(cohort[1]), table[cohort[1]])
            if step == "commit":
                generation = commit(folder, store.snapshot(), {}, after=generation)
                store.committed()
                saved = table.copy()
            if step == "crash":
                store.close()
                store, table = make(kind, folder), saved.copy()
                snapshot = latest(folder, lambda found: store.restore(found.arrays))  # noqa: B023
                assert snapshot.generation == generation
            if step == "check":
                np.testing.assert_array_equal(store.read(np.arange(N)[::-1]), table[::-1])
                found = np.zeros((N, D))
                for clients, rows in store.chunks(2):
                    assert len(clients) <= 2
                    found[clients] = rows
                np.testing.assert_array_equal(found, table)
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weighted_mean(kind, tmp_path):
    rng = np.random.default_rng(1)
    store, table = make(kind, tmp_path, 1000, 4), np.zeros((1000, 4))
    for _ in range(5):
        cohort = rng.choice(1000, 100, replace=False)
        table[cohort] = rng.normal(size=(100, 4))
        store.write(cohort, table[cohort])
    weights = rng.dirichlet(np.ones(1000))
    scale = 1000 * np.finfo(float).eps * np.abs(table).max()
    np.testing.assert_allclose(mean(store, weights), weights @ table, rtol=0, atol=scale)
    np.testing.assert_allclose(mean(store), table.mean(axis=0), rtol=0, atol=scale)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_requests_are_refused(kind, tmp_path):
    store = make(kind, tmp_path)
    for clients in ([1, 2, 1], [-1], [N], [0.5], [[1]], [True]):
        with pytest.raises(InputError, match="clients must be"):
            store.read(clients)
        with pytest.raises(InputError, match="clients must be"):
            store.write(clients, np.zeros((len(clients), D)))
    for rows in (np.zeros((1, D)), np.zeros((2, D), np.float32), np.zeros((2, D + 1)), np.zeros(D)):
        with pytest.raises(InputError, match="rows must be"):
            store.write([1, 2], rows)
    store.close()


def test_what_is_read_is_the_callers_own(tmp_path):
    for kind in KINDS:
        store = make(kind, tmp_path)
        store.write([1], np.ones((1, D)))
        store.read([1])[:] = 7
        np.testing.assert_array_equal(store.read([1]), np.ones((1, D)))
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_of_others_are_refused(kind, tmp_path):
    store, other = (
        make(kind, tmp_path / "a"),
        make(kind, tmp_path / "b", num_clients=N - 3, dtype="float32"),
    )
    store.write([1, 9], np.ones((2, D)))
    arrays = store.snapshot()
    with pytest.raises(StateError):
        other.restore(arrays)
    for name in arrays:
        with pytest.raises(StateError):
            other.restore({key: array for key, array in arrays.items() if key != name})
    other.close()
    store.close()


def file_commits(folder, count=4, seed=0):
    """A store with `count` commits of one cohort of four each; the table after each."""
    rng, table, tables = np.random.default_rng(seed), np.zeros((N, D)), []
    store = FileStore(folder, N, D, "float64")
    for _ in range(count):
        cohort = rng.choice(N, 4, replace=False)
        table[cohort] = rng.normal(size=(4, D))
        store.write(cohort, table[cohort])
        commit(folder, store.snapshot(), {})
        store.committed()
        tables.append(table.copy())
    store.close()
    return tables


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "link"])
def test_damage_to_the_last_segment_means_the_generation_before(damage, tmp_path):
    tables = file_commits(tmp_path)
    segment = max(tmp_path.glob("rows-*-*"))
    content = segment.read_bytes()
    segment.unlink()
    if damage == "flip":
        segment.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "cut":
        segment.write_bytes(content[:-1])
    elif damage == "link":
        (tmp_path / "copy").write_bytes(content)
        segment.symlink_to(tmp_path / "copy")
    store = FileStore(tmp_path, N, D, "float64")
    snapshot = latest(tmp_path, lambda found: store.restore(found.arrays))
    assert snapshot.generation == 3
    assert segment.name in snapshot.warnings[0]
    np.testing.assert_array_equal(store.read(range(N)), tables[2])
    store.close()


def test_damage_to_the_base_is_never_read(tmp_path):
    tables = file_commits(tmp_path, 8)
    (base,) = (path for path in tmp_path.glob("rows-*") if path.name.count("-") == 1)
    content = base.read_bytes()
    refused = 0
    for place in range(len(content)):
        base.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        store = FileStore(tmp_path, N, D, "float64")
        latest(tmp_path, lambda found: store.restore(found.arrays))  # noqa: B023
        client = place // (D * 8 + 4)
        if store.find_segment(client) is None:  # its row is read from the base
            with pytest.raises(StateError, match=f"client {client} "):
                store.read(range(N))
            refused += 1
        others = [other for other in range(N) if other != client or store.find_segment(client)]
        np.testing.assert_array_equal(store.read(others), tables[-1][others])
        store.close()
    assert refused >= D * 8 + 4
    base.unlink()
    with pytest.raises(StateError, match="no whole state"):
        latest(tmp_path, refuse(tmp_path))


def refuse(folder):
    """Accept a snapshot only with its rows."""

    def accept(snapshot):
        store = FileStore(folder, N, D, "float64")
        try:
            store.restore(snapshot.arrays)
        finally:
            store.close()

    return accept


def test_rows_of_another_run_do_not_fit(tmp_path):
    file_commits(tmp_path / "a", seed=1)
    file_commits(tmp_path / "b", seed=2)
    with pytest.raises(StateError, match="no whole state"):
        latest(tmp_path / "a", refuse(tmp_path / "b"))


def test_misuse_around_a_commit_is_refused(tmp_path):
    store = FileStore(tmp_path, N, D, "float64")
    with pytest.raises(StateError, match="must follow snapshot"):
        store.committed()
    store.snapshot()
    with pytest.raises(StateError, match="between snapshot"):
        store.write([1], np.ones((1, D)))
    store.snapshot()  # a commit that failed may be tried again
    store.committed()
    store.write([1], np.ones((1, D)))
    with pytest.raises(StateError, match="in use"):
        FileStore(tmp_path, N, D, "float64")
    store.close()
    FileStore(tmp_path, N, D, "float64").close()


def test_files_do_not_pile_up(tmp_path):
    file_commits(tmp_path, 12)
    names = [path.name for path in tmp_path.glob("rows-*")]
    assert (
        len(names) == 1 + 3
    )  # the base; the segments of the last two commits, and one the older of them lists
    store = FileStore(tmp_path / "other", N, D, "float64")
    store.write([1], np.ones((1, D)))
    store.close()
    assert list((tmp_path / "other").glob("rows-*")) == []  # nothing committed, nothing left


def test_onlookers_see_the_generation_they_restored(tmp_path):
    """A reader of generation g is right for as long as the commit of g is there, however far the writer is."""
    table, rng = np.zeros((N, D)), np.random.default_rng(3)
    store = FileStore(tmp_path, N, D, "float64")
    onlookers = []
    for generation in range(1, 10):
        for cohort in (rng.choice(N, 4, replace=False) for _ in range(2)):
            table[cohort] = rng.normal(size=(4, D))
            store.write(cohort, table[cohort])
            checked = [pair for pair in onlookers if pair[1].exists()]
            for onlooker, _, expected in checked:
                np.testing.assert_array_equal(onlooker.read(range(N)), expected)
        assert len(checked) == min(2, generation - 1)
        commit(tmp_path, store.snapshot(), {})
        for onlooker, path, expected in onlookers:
            if path.exists():  # and while the writer changes the base
                np.testing.assert_array_equal(onlooker.read(range(N)), expected)
        store.committed()
        onlooker = FileStore(tmp_path, N, D, "float64", read_only=True)
        latest(tmp_path, lambda found: onlooker.restore(found.arrays))  # noqa: B023
        onlookers.append((onlooker, max(tmp_path.glob("state-*")), table.copy()))
    with pytest.raises(StateError, match="read only"):
        onlooker.write([1], np.ones((1, D)))
    for onlooker, *_ in onlookers:
        onlooker.close()
    store.close()


def calls_of_a_round(num_clients, folder, monkeypatch):
    """System calls, bytes of disk and peak memory of rounds and commits with ten clients."""
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return real(*args, **kwargs)

        return call

    rng = np.random.default_rng(0)
    with monkeypatch.context() as patch:
        for name in ("open", "preadv", "pwritev", "fsync", "posix_fadvise"):
            patch.setattr(os, name, counted(getattr(os, name)))
        tracemalloc.start()
        store = FileStore(folder, num_clients, 1000, "float32")
        for _ in range(6):
            cohort = np.sort(rng.choice(10_000, 10, replace=False)) * (num_clients // 10_000)
            store.write(cohort, store.read(cohort) + np.float32(1))
            commit(folder, store.snapshot(), {})
            store.committed()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        store.close()
    used = sum(path.stat().st_blocks * 512 for path in Path(folder).glob("rows-*"))
    return count, used, peak


def test_a_round_costs_the_same_whatever_the_number_of_clients(tmp_path, monkeypatch):
    few = calls_of_a_round(10_000, tmp_path / "few", monkeypatch)
    many = calls_of_a_round(10_000_000, tmp_path / "many", monkeypatch)
    assert few[0] == many[0]
    assert (
        many[1] < 20 * 60 * 4096
    )  # 60 rows of 4 kB each, in blocks of a few pages, of a table of 40 GB
    assert many[2] < 8e6  # the bitmap of ten million clients has 1.25 MB


# Reading ahead


class Slow:
    """A store whose reads and writes take a while, and that complains when two of them meet."""

    def __init__(self, store):
        self.store, self.busy = store, threading.Lock()
        self.num_clients, self.dim, self.dtype = store.num_clients, store.dim, store.dtype

    def read(self, clients):
        assert self.busy.acquire(blocking=False)
        rows = self.store.read(clients)
        time.sleep(0.0005)
        self.busy.release()
        return rows

    def write(self, clients, rows):
        assert self.busy.acquire(blocking=False)
        time.sleep(0.0005)
        self.store.write(clients, rows)
        self.busy.release()

    def close(self):
        self.store.close()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=4), min_size=2, max_size=12
    )
)
def test_reading_ahead_sees_every_write(cohorts):
    """Six clients, so cohorts overlap nearly always: what is computed is what a plain array gives."""
    table, store = np.zeros((6, 1)), Prefetched(Slow(SparseStore(6, 1, "float64")))
    for number, cohort in enumerate(cohorts):
        rows = store.read(cohort)
        np.testing.assert_array_equal(rows, table[cohort])
        if number + 1 < len(cohorts):
            store.ask(cohorts[number + 1])
        new = 2 * rows + number + 1.0
        store.write(cohort, new)
        table[cohort] = 2 * table[cohort] + number + 1.0
    np.testing.assert_array_equal(store.read(range(6)), table)
    store.close()


def test_reading_ahead_does_not_wait(tmp_path):
    """`ask` and `write` return while the disk is held up; the rows asked for are read meanwhile."""
    held, reads = threading.Event(), []

    class Held(Slow):
        def read(self, clients):
            reads.append(list(clients))
            assert held.wait(60)
            return super().read(clients)

    store = Prefetched(Held(SparseStore(6, 1, "float64")))
    store.ask([1, 2])
    store.write([2, 3], np.ones((2, 1)))  # 2 was asked for: it must be read again
    held.set()
    np.testing.assert_array_equal(store.read([1, 2]), [[0.0], [1.0]])
    store.ask([2, 4])  # 2 is at work: only 4 is read ahead
    store.write([1, 2], np.full((2, 1), 5.0))
    np.testing.assert_array_equal(store.read([2, 4]), [[5.0], [0.0]])
    assert reads == [[1, 2], [2], [4], [2]]
    store.close()


def test_a_failed_write_is_raised_by_the_next_call(tmp_path):
    inner = FileStore(tmp_path, N, D, "float64")
    store = Prefetched(inner)
    inner.snapshot()  # behind its back: the store refuses writes from now on
    store.write([1], np.ones((1, D)))
    with pytest.raises(StateError, match="between snapshot"):
        store.snapshot()
    store.close()


@pytest.mark.parametrize(
    ("num_clients", "cohort", "rounds", "kind"),
    [
        (10**4, 10, 10**6, "array"),
        (10**9, 100, 100, "sparse"),
        (10**6, 100, 10**5, "file"),
        (10**6, 10**6, 1, "file"),
    ],
)
def test_the_store_is_chosen_by_what_it_will_hold(num_clients, cohort, rounds, kind):
    assert choose(num_clients, 10_000, "float32", cohort, rounds) == kind


FULL_DISK = """
import resource, signal, sys, numpy as np
from fedscaffold.state import FileStore, StateError, commit, latest
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = FileStore(sys.argv[1], 100, 1000, "float64")
for step in range(4):
    store.write([step, 50], np.full((2, 1000), step + 1.0))
    commit(sys.argv[1], store.snapshot(), {"step": step})
    store.committed()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    store.write(range(20, 40), np.full((20, 1000), 9.0))
    store.snapshot()
    sys.exit("it fitted")
except StateError as error:
    assert "full" in str(error) and "resume from the last" in str(error), error
"""


@pytest.mark.process
@pytest.mark.parametrize("room", [0, 5, 9_000, 100_000])
def test_a_full_disk_leaves_the_rows_committed(tmp_path, room):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path, str(room)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    store = FileStore(tmp_path, 100, 1000, "float64")
    snapshot = latest(tmp_path, lambda found: store.restore(found.arrays))
    assert snapshot.facts == {"step": 3}
    assert not snapshot.warnings
    expected = np.zeros((100, 1000))
    expected[:4] = np.arange(1.0, 5.0)[:, None]
    expected[50] = 4
    np.testing.assert_array_equal(store.read(range(100)), expected)
    store.close()
