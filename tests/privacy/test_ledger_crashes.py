"""A process that is killed while it charges a ledger; no JAX here, as it forks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedscaffold.privacy.ledger import Ledger

CALLS = ("open", "write", "fsync", "ftruncate", "lseek", "close")


def prepare(path):
    ledger = Ledger(path, "data", 2)
    ledger.begin("a", unit="record", seed=0, noise=1.1, rates=[0.1, 0.2])
    ledger.charge("a", rounds=3, steps=[15, 5])


def kill_everywhere(root):
    """Kill -9 a process before each system call of charging, or in the middle of a write."""
    calls = 0
    for torn in (False, True):
        fatal, code = 0, -9
        while code:
            fatal += 1
            folder = Path(root, f"{torn}{fatal}")
            prepare(folder / "privacy.ledger")
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:
                doomed(folder / "privacy.ledger", fatal, torn, writing)
            os.close(writing)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, -9), code
            told = len(os.read(reading, 100))
            os.close(reading)
            found = Ledger(folder / "privacy.ledger", "data", 2)
            # rounds were run only if they stand in the ledger; one more may have been charged
            assert found.rounds("a") - 3 in (told, told + 1)
            found.charge("a", rounds=9, steps=[45, 45])
            assert Ledger(folder / "privacy.ledger", "data", 2).rounds("a") == 9
            calls += code != 0
    print(calls)


def doomed(path, fatal, torn, report):
    genuine = {name: getattr(os, name) for name in CALLS}
    left = [fatal]

    def wrap(name):
        def call(*given):
            left[0] -= 1
            if left[0] == 0:
                if torn and name == "write":
                    genuine["write"](given[0], bytes(given[1])[:20])
                os.kill(os.getpid(), signal.SIGKILL)
            return genuine[name](*given)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    ledger = Ledger(path, "data", 2)
    for rounds in (4, 5):
        ledger.charge("a", rounds=rounds, steps=[5 * rounds, 5])
        genuine["write"](report, b".")
    os._exit(0)


@pytest.mark.process
def test_killed_around_its_commit_no_round_is_run_that_is_not_charged(tmp_path):
    code = f"import test_ledger_crashes as t; t.kill_everywhere({str(tmp_path)!r})"  # it forks
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 15
