"""What keeping state costs on this machine.

Python benchmarks/state.py [FOLDER], about a minute and 3 GB of disk there.

A commit of 40 MB; then rounds of 100 clients with d = 10,000 in float32 (4 MB of rows), of N =
10,000 and 1,000,000.
In milliseconds: the least, the median and the most by the clock, and the median of the processor's
    time, which other
work on the machine does not lengthen. Cold: the rows were dropped from the page cache.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedscaffold.state import FileStore, Prefetched, commit, latest

DIM, COHORT, EVERY, COMPUTE = 10_000, 100, 10, 0.05


class Clock:
    """Times by name, of the wall and of the processor, in milliseconds."""

    def __init__(self):
        self.times = {}

    def __call__(self, name, function, *args):
        wall, own = time.perf_counter(), time.process_time()
        result = function(*args)
        spent = time.perf_counter() - wall, time.process_time() - own
        self.times.setdefault(name, []).append(spent)
        return result

    def show(self):
        for name, times in self.times.items():
            wall, own = 1e3 * np.transpose(times)
            print(
                f"{name:34s} {min(wall):7.1f} {np.median(wall):7.1f} {max(wall):7.1f} "
                f"{np.median(own):9.1f}"
            )


def commits(folder):
    clock, state = Clock(), {"x": np.random.default_rng(0).normal(size=5_000_000)}
    for _ in range(7):
        clock("commit 40 MB", commit, folder, state, {"round": 1})
        clock("read it back", latest, folder)
    clock.show()


def dropped(store):
    """Put the store's files out of the page cache."""
    for file in [store.base, *(segment.file for segment in store.listed)]:
        file.sync()
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def rows(folder, num_clients, rounds=60):
    clock, rng = Clock(), np.random.default_rng(0)
    store, heard = FileStore(folder, num_clients, DIM), []
    noise = rng.normal(size=(COHORT, DIM)).astype(np.float32)
    for number in range(1, rounds + 1):
        cohort = rng.choice(num_clients, COHORT, replace=False)
        heard.append(cohort)
        clock("read, mostly clients never heard", store.read, cohort)
        clock("write", store.write, cohort, noise)
        if number % EVERY == 0:
            save(clock, folder, store)
    for cohort in heard[:20]:
        clock("read, warm", store.read, cohort)
    for cohort in heard[:20]:
        dropped(store)
        clock("read, cold", store.read, cohort)
    store.close()
    again = FileStore(folder, num_clients, DIM)
    clock("restore", latest, folder, lambda snapshot: again.restore(snapshot.arrays))
    again.close()
    clock.show()


def save(clock, folder, store):
    snapshot = clock(f"make {EVERY} rounds durable", store.snapshot)
    clock("commit them", commit, folder, snapshot, {})
    clock("tidy up", store.committed)


def whole(folder, num_clients, rounds=60):
    """Rounds that wait 50 ms while the next cohort is read, with a commit every ten rounds."""
    clock, rng, total = Clock(), np.random.default_rng(1), Clock()
    store = Prefetched(FileStore(folder, num_clients, DIM))
    cohorts = [rng.choice(num_clients, COHORT, replace=False) for _ in range(rounds + 1)]
    for number, cohort in enumerate(cohorts[:-1], 1):

        def work(number=number, cohort=cohort):
            state = store.read(cohort)
            store.ask(cohorts[number])
            time.sleep(COMPUTE)
            store.write(cohort, state + np.float32(1))

        total("round of 50 ms, rows in files", work)
        if number % EVERY == 0:
            save(clock, folder, store)
    store.close()
    total.show()


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else None
    print(f"{'milliseconds':34s}   least  median    most  processor")
    for measure in (
        commits,
        *(
            lambda folder, n=n, f=f: f(folder, n)
            for n in (10_000, 1_000_000)
            for f in (rows, whole)
        ),
    ):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            measure(folder)
            disk = sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{'':41s}{disk / 1e6:.0f} MB of disk, {most:.0f} MB of memory at most\n")
