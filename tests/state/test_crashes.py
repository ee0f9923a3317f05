"""Crashes at every point: a writer killed between any two system calls, a machine that loses power between any two.

A killed process leaves what it wrote; a power cut may lose whatever was not synced, in any combination. So the first
test kills a real process before every call, and in the middle of every write; the second records the calls of one
quiet run and builds the disks that may be found after a cut following each call: every subset of unsynced names with
unsynced bytes absent, present, partly there or torn. Each must be read as one of the states committed, bit for bit.
"""

import functools
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest

from fedscaffold.state import FileStore, StateError, commit, latest, vectors
from fedscaffold.state.vectors import VectorWriter

CALLS = ("open", "write", "pwrite", "pwritev", "fsync", "replace", "unlink", "mkdir", "close")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the calls are counted, not timed


def state(generation):
    return {"x": np.arange(4.0) / generation, "c": np.full(3, generation, np.float32)}


def equal(snapshot, generation):
    assert snapshot.generation == generation == snapshot.facts["generation"]
    assert not snapshot.warnings
    assert all(
        snapshot.arrays[name].tobytes() == array.tobytes()
        for name, array in state(generation).items()
    )


class Commits:
    """The third commit to a folder."""

    @staticmethod
    def prepare(root):
        for generation in (1, 2):
            commit(root / "run", state(generation), {"generation": generation})
        return 2

    @staticmethod
    def act(root, done):
        done(commit(root / "run", state(3), {"generation": 3}, after=2))

    @staticmethod
    def check(root, at_least):
        snapshot = latest(root / "run")
        assert snapshot.generation in (at_least, 3)
        equal(snapshot, snapshot.generation)
        newest = max((root / "run").glob("state-*"))
        newest.write_bytes(b"damaged")  # the one before is whole too
        before = latest(root / "run")
        assert before.generation == snapshot.generation - 1
        equal(before._replace(warnings=()), before.generation)
        commit(root / "run", state(4), {"generation": 4})
        assert latest(root / "run").facts == {"generation": 4}


def drafted(folder, values):
    """A vector of two blocks, written into a folder."""
    writer = VectorWriter(folder, values.dtype)
    for block in np.split(values, 2):
        writer.append(block)
    return writer.finish()


class VectorCommits(Commits):
    """The third commit, with a vector that changes each time, and one that changed at the second."""

    @staticmethod
    def commit(folder, generation, same, **more):
        arrays = {**state(generation), "same": same}
        arrays["new"] = drafted(folder, np.full(2, float(generation)))
        return commit(folder, arrays, {"generation": generation}, **more)

    @classmethod
    def prepare(cls, root):
        (root / "run").mkdir()
        for generation in (1, 2):
            same = drafted(root / "run", np.arange(4.0) + generation)
            cls.commit(root / "run", generation, same)
        return 2

    @classmethod
    def act(cls, root, done):
        same = latest(root / "run").arrays["same"]
        done(cls.commit(root / "run", 3, same, after=2))

    @staticmethod
    def check(root, at_least):
        snapshot = latest(root / "run")
        assert snapshot.generation in (at_least, 3)
        for generation in (snapshot.generation, snapshot.generation - 1):
            found = latest(root / "run")
            equal(found._replace(warnings=()), generation)
            assert np.asarray(found.arrays["new"]).tolist() == [generation] * 2
            begun = min(generation, 2)
            assert np.asarray(found.arrays["same"]).tolist() == (np.arange(4.0) + begun).tolist()
            max((root / "run").glob("state-*")).write_bytes(b"damaged")
        vectors._token = secrets.token_hex(4)  # what follows is another process's
        for generation in (4, 5):
            commit(root / "run", state(generation), {"generation": generation})
        assert not [*(root / "run").glob("vector-*"), *(root / "run").glob(".draft-*")]


class FirstCommit:
    """The first commit, to a folder that is not there."""

    @staticmethod
    def prepare(root):
        return 0

    @staticmethod
    def act(root, done):
        done(commit(root / "a" / "run", state(1), {"generation": 1}))

    @staticmethod
    def check(root, at_least):
        snapshot = latest(root / "a" / "run")
        if snapshot is None:
            assert at_least == 0
        else:
            equal(snapshot, 1)


N, D = 16, 3
OFTEN = np.array(
    [0.15] * 5 + [0.25 / 11] * 11
)  # some clients come again soon, some are never heard


@functools.cache
def cohort(step):
    return np.random.default_rng(step).choice(N, 3, replace=False, p=OFTEN)


@functools.cache
def rows(step):
    return np.random.default_rng(100 + step).normal(size=(3, D))


@functools.cache
def history(steps):
    """The dense table after each step: what a store must be equal to."""
    table, tables = np.zeros((N, D)), []
    for step in range(steps):
        table[cohort(step)] = rows(step)
        tables.append(table.copy())
    return tables


ENDS = [
    2,
    5,
    6,
    7,
    10,
    13,
    14,
    15,
]  # the last steps of the first commits, which come after 3, 3, 1, 1, 3, ... steps


def save(root, store, step, after):
    arrays = {f"rows.{name}": array for name, array in store.snapshot().items()}
    generation = commit(root / "run", arrays, {"step": step}, after=after)
    store.committed()
    return generation


def resume(root):
    """The store of the latest commit that is whole with its rows, and that commit."""
    store = FileStore(root / "rows", N, D, "float64")

    def accept(snapshot):
        store.restore(
            {name.removeprefix("rows."): array for name, array in snapshot.arrays.items()}
        )

    try:
        return store, latest(root / "run", accept)
    except StateError:
        store.close()
        raise


class Stores:
    """Resume a store of client rows, write, commit, write, commit, write."""

    commits = 5

    @classmethod
    def prepare(cls, root):
        store, generation = FileStore(root / "rows", N, D, "float64"), None
        for step in range(ENDS[cls.commits - 1] + 1):
            store.write(cohort(step), rows(step))
            if step in ENDS:
                generation = save(root, store, step, generation)
        store.close()
        return generation

    @staticmethod
    def act(root, done):
        store, snapshot = resume(root)
        generation, first = snapshot.generation, snapshot.facts["step"] + 1
        for step in range(first, first + 5):
            store.write(cohort(step), rows(step))
            if step in ENDS:
                generation = save(root, store, step, generation)
                done(generation)
        store.close()

    @staticmethod
    def check(root, at_least):
        tables = history(20)
        store, snapshot = resume(root)
        assert not snapshot.warnings
        assert snapshot.generation in (at_least, at_least + 1)
        assert snapshot.facts["step"] == ENDS[snapshot.generation - 1]
        assert store.read(np.arange(N)).tobytes() == tables[snapshot.facts["step"]].tobytes()
        store.close()
        if snapshot.generation > 1:  # and the generation before is whole with its rows
            max((root / "run").glob("state-*")).write_bytes(b"damaged")
            store, before = resume(root)
            assert before.generation == snapshot.generation - 1
            assert store.read(np.arange(N)).tobytes() == tables[before.facts["step"]].tobytes()
            step = before.facts["step"] + 1  # it goes on from there
            store.write(cohort(step), rows(step))
            save(root, store, step, before.generation)
            store.close()
            store, snapshot = resume(root)
            assert store.read(np.arange(N)).tobytes() == tables[step].tobytes()
            store.close()


class YoungStores(Stores):
    """The same with one commit to resume from: the base is created by the way."""

    commits = 1


SCENES = {
    scene.__name__: scene for scene in (Commits, VectorCommits, FirstCommit, Stores, YoungStores)
}


# A process that is killed


def doomed(scene, root, fatal, torn, report):
    """In a child: act, and die before the fatal call, or in the middle of it if it writes."""
    count = itertools.count(1)

    def wrap(name, real):
        def call(*args, **kwargs):
            if next(count) == fatal:
                if torn and "write" in name:
                    data = b"".join(map(bytes, args[1])) if name == "pwritev" else bytes(args[1])
                    half = data[: len(data) // 2]
                    genuine["pwrite"](args[0], half, args[2]) if len(args) > 2 else genuine[
                        "write"
                    ](args[0], half)
                os._exit(10 if "write" in name else 9)
            return real(*args, **kwargs)

        return call

    genuine = {name: getattr(os, name) for name in CALLS}
    for name, real in genuine.items():
        setattr(os, name, wrap(name, real))
    try:
        scene.act(root, lambda generation: genuine["write"](report, bytes([generation])))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def crashed(scene, root, fatal, torn):
    """Run a scene in a child that dies at the fatal call: how it ended, and the commits it was told are done."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        doomed(scene, root, fatal, torn, writing)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    reports = os.read(reading, 100)
    os.close(reading)
    return os.waitstatus_to_exitcode(status), reports


def kill_everywhere(name):
    """Kill the writer of a scene before each of its calls; print how many there were."""
    scene = SCENES[name]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        prepared = Path(folder, "prepared")
        prepared.mkdir()
        start = scene.prepare(prepared)
        fatal, code = 0, 9
        while code:
            fatal += 1
            for torn in (False, True):
                root = Path(folder, "crashed")
                shutil.copytree(prepared, root)
                code, reports = crashed(scene, root, fatal, torn)
                assert code in (0, 9, 10), code
                scene.check(root, max([start, *reports]))
                shutil.rmtree(root)
                if code != 10:  # only a write can be torn
                    break
    print(fatal - 1, "calls")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["Commits", "VectorCommits", "FirstCommit", "Stores"])
def test_killed_between_any_two_calls(name):
    code = (
        f"import test_crashes as t; t.kill_everywhere({name!r})"  # a process of its own: it forks
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 8


# A machine that loses power


class Recorder:
    """Records what a run does to the files under a root, while it does it."""

    def __init__(self, root):
        self.root, self.trace, self.opened, self.names = Path(root), [], {}, {}
        self.before = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                key = self.names[self.relative(path)] = len(self.names)
                self.before[key] = path.read_bytes()
        self.folders = {self.relative(path) for path in self.root.rglob("*") if path.is_dir()}
        self.fresh = itertools.count(len(self.names))

    def relative(self, path):
        return os.path.relpath(path, self.root)

    def patch(self, monkeypatch):
        self.real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            monkeypatch.setattr(os, name, getattr(self, name))

    def open(self, path, flags, mode=0o777, **kwargs):
        fd = self.real["open"](path, flags, mode, **kwargs)
        name = self.relative(path)
        if Path(path).is_dir():
            self.opened[fd] = ("folder", name)
        else:
            if name not in self.names:
                self.names[name] = next(self.fresh)
                self.trace.append(("link", name, self.names[name]))
            self.opened[fd] = ("file", self.names[name], [0])
        return fd

    def write(self, fd, data):
        count = self.real["write"](fd, data)
        _, key, place = self.opened[fd]
        self.trace.append(("write", key, place[0], bytes(data)[:count]))
        place[0] += count
        return count

    def pwrite(self, fd, data, offset):
        count = self.real["pwrite"](fd, data, offset)
        self.trace.append(("write", self.opened[fd][1], offset, bytes(data)[:count]))
        return count

    def pwritev(self, fd, buffers, offset):
        return self.pwrite(fd, b"".join(map(bytes, buffers)), offset)

    def fsync(self, fd):
        self.real["fsync"](fd)
        kind, key, *_ = self.opened[fd]
        self.trace.append((f"sync {kind}", key))

    def replace(self, source, target, **kwargs):
        self.real["replace"](source, target, **kwargs)
        source, target = self.relative(source), self.relative(target)
        self.names[target] = self.names.pop(source)
        self.trace.append(("rename", target, source, self.names[target]))

    def unlink(self, path, **kwargs):
        self.real["unlink"](path, **kwargs)
        self.names.pop(self.relative(path), None)
        self.trace.append(("unlink", self.relative(path)))

    def mkdir(self, path, mode=0o777, **kwargs):
        self.real["mkdir"](path, mode, **kwargs)
        self.trace.append(("mkdir", self.relative(path)))

    def close(self, fd):
        self.opened.pop(fd, None)
        self.real["close"](fd)


def disks(recorder, start):
    """Every disk that may be found after a power cut: (files, folders, generation promised by then)."""
    bytes_, names, folders = dict(recorder.before), dict(start[0]), set(start[1])
    unsynced, entries, promised = {}, [], start[2]
    for event in [None, *recorder.trace]:
        match event:
            case ("write", key, offset, data):
                unsynced.setdefault(key, []).append((offset, data))
            case ("sync file", key):
                bytes_[key] = patched(bytes_.get(key, b""), unsynced.pop(key, []))
            case ("sync folder", folder):
                for entry in [entry for entry in entries if str(Path(entry[1]).parent) == folder]:
                    entries.remove(entry)
                    apply(entry, names, folders)
            case ("done", generation):
                promised = generation
            case None:
                pass
            case entry:
                entries.append(entry)
        for count in range(len(entries) + 1):
            for subset in itertools.combinations(entries, count):
                found, there = dict(names), set(folders)
                for entry in subset:
                    apply(entry, found, there)
                for lost in (
                    lambda w: [],
                    lambda w: w,
                    lambda w: w[: len(w) // 2],
                    lambda w: w[1:],
                    torn,
                ):
                    content = {
                        key: patched(bytes_.get(key, b""), lost(unsynced.get(key, [])))
                        for key in found.values()
                    }
                    reachable = {
                        name: content[key] for name, key in found.items() if inside(name, there)
                    }
                    yield reachable, {name for name in there if inside(name, there)}, promised


def inside(name, folders):
    parent = str(Path(name).parent)
    return parent == "." or (parent in folders and inside(parent, folders))


def torn(writes):
    return (
        [*writes[:-1], (writes[-1][0], writes[-1][1][: len(writes[-1][1]) // 2])] if writes else []
    )


def patched(content, writes):
    for offset, data in writes:
        content = content.ljust(offset, b"\0")
        content = content[:offset] + data + content[offset + len(data) :]
    return content


def apply(entry, names, folders):
    match entry:
        case ("link", name, key):
            names[name] = key
        case ("rename", target, source, key):
            names.pop(source, None)
            names[target] = key
        case ("unlink", name):
            names.pop(name, None)
        case ("mkdir", name):
            folders.add(name)


def cut_everywhere(scene, monkeypatch, forget=lambda recorder, event: False):
    """Run a scene once, and check every disk a power cut may leave, as if the events to forget had not happened."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root = Path(folder, "run")
        root.mkdir()
        promised = scene.prepare(root)
        recorder = Recorder(root)
        start = dict(recorder.names), recorder.folders, promised
        with monkeypatch.context() as patch:
            recorder.patch(patch)
            scene.act(root, lambda generation: recorder.trace.append(("done", generation)))
        recorder.trace = [event for event in recorder.trace if not forget(recorder, event)]
        checked = set()
        for files, folders, promised in disks(recorder, start):
            key = hash((frozenset(files.items()), frozenset(folders), promised))
            if key not in checked:
                checked.add(key)
                disk = Path(folder, f"disk{len(checked)}")
                for name in ("", *sorted(folders)):
                    (disk / name).mkdir()
                for name, content in files.items():
                    (disk / name).write_bytes(content)
                scene.check(disk, promised)
                shutil.rmtree(disk)
        return len(checked)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_power_lost_between_any_two_calls(name, monkeypatch):
    assert cut_everywhere(SCENES[name], monkeypatch) > 10


FORGOTTEN = {
    "the state's bytes": (Commits, lambda recorder, event: event[0] == "sync file"),
    "the folder": (Commits, lambda recorder, event: event[0] == "sync folder"),
    "the new folder's parent": (FirstCommit, lambda recorder, event: event == ("sync folder", ".")),
    "the vectors' bytes": (
        VectorCommits,
        lambda recorder, event: event[0] == "sync file" and event[1] in drafts(recorder),
    ),
    "the vectors' names": (VectorCommits, lambda recorder, event: first_of_two(recorder, event)),
    "the rows' bytes": (
        Stores,
        lambda recorder, event: event[0] == "sync file" and event[1] in row_files(recorder),
    ),
    "the rows' folder": (Stores, lambda recorder, event: event == ("sync folder", "rows")),
}


def drafts(recorder):
    return {event[2] for event in recorder.trace if event[0] == "link" and ".draft-" in event[1]}


def first_of_two(recorder, event):
    """The folder's sync before the generation is written."""
    return event is next(one for one in recorder.trace if one[0] == "sync folder")


def row_files(recorder):
    linked = {event[2]: event[1] for event in recorder.trace if event[0] == "link"}
    return {
        key
        for key, name in {**linked, **{k: n for n, k in recorder.names.items()}}.items()
        if "rows-" in name
    }


@pytest.mark.parametrize(("scene", "forget"), FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_a_forgotten_sync_would_be_found(scene, forget, monkeypatch):
    """The control: without one of its syncs, the same protocol fails the test above."""
    with pytest.raises((AssertionError, StateError, AttributeError)):
        cut_everywhere(scene, monkeypatch, forget)
