"""How fast the file store takes rows when it really takes many.

`python benchmarks/rows.py 10` writes 10 GB.

A million clients, d = 10,000, float32: 40 kB a row. Cohorts of 100 clients never heard before, a
commit every 50, as a run would write them; then cohorts drawn among those heard are read. Prints
one JSON line. The folder is made here and removed at the end; three times the rows of an interval
are needed beside the rows themselves.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedscaffold.state import FileStore, commit

CLIENTS, DIM, COHORT, EVERY = 1_000_000, 10_000, 100, 50


def main(gigabytes: float) -> None:
    """Write so many GB of rows, read some, and print the rates."""
    rng = np.random.default_rng(0)
    rounds = int(gigabytes * 1e9 / (4 * DIM * COHORT))
    order = rng.permutation(CLIENTS)[: rounds * COHORT].reshape(rounds, COHORT)
    rows = rng.normal(size=(COHORT, DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        store = FileStore(folder, CLIENTS, DIM)
        began, cpu, commits = time.perf_counter(), time.process_time(), []
        for r, cohort in enumerate(order):
            rows[:, 0] = cohort
            store.write(cohort, rows)
            if (r + 1) % EVERY == 0 or r + 1 == rounds:
                at = time.perf_counter()
                commit(folder, store.snapshot(), {"round": r + 1})
                store.committed()
                commits.append(time.perf_counter() - at)
        wrote, spent = time.perf_counter() - began, time.process_time() - cpu
        disk = sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*"))
        reads = []
        for _ in range(50):
            cohort = rng.choice(order.ravel(), COHORT, replace=False)
            at = time.perf_counter()
            found = store.read(cohort)
            reads.append(time.perf_counter() - at)
            assert (found[:, 0] == cohort.astype(np.float32)).all()
        store.close()
    answer = {
        "gigabytes_of_rows": rounds * COHORT * DIM * 4e-9,
        "mb_of_rows_a_second": rounds * COHORT * DIM * 4e-6 / wrote,
        "mb_of_rows_a_processor_second": rounds * COHORT * DIM * 4e-6 / spent,
        "seconds": wrote,
        "commit_median_s": float(np.median(commits)),
        "commit_most_s": max(commits),
        "gigabytes_on_disk": disk * 1e-9,
        "read_100_rows_median_ms": 1e3 * float(np.median(reads)),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "at": time.strftime("%H:%M"),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
