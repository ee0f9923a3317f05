"""A private site that is killed at any moment of an answer: what it sent was charged, and is sent again byte for byte."""

import os
import shutil
import signal
import sys
from pathlib import Path

import forkserver
import private_case as case
import pytest

CALLS = ("open", "write", "fsync", "ftruncate", "lseek", "close", "rename", "replace", "unlink")


def kill_everywhere(root):
    """Kill -9 a site before each system call of an answer, or in the middle of a write."""
    config = case.settings()
    _, requests = case.requests_of(config, Path(root, "server"))
    request = requests["ant"]
    Path(root, "told").touch()
    calls, untrained = 0, 0
    for torn in (False, True):
        fatal, code = 0, -9
        while code:
            fatal += 1
            folder, told = Path(root, f"{torn}{fatal}"), Path(root, "told")
            told.write_bytes(b"")
            if (child := os.fork()) == 0:
                doomed(request, config, folder, fatal, torn, told)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, -9), code
            charged = where(folder)
            again = case.ask(request, config, folder)
            assert "d" in again.blobs, again.facts
            if sent := told.read_bytes():
                assert charged == 1
                assert again.blobs["d"].data == sent
            assert where(folder) == 1  # the second answer has used the charge of the first, if any
            untrained += charged and not sent
            calls += code != 0
            shutil.rmtree(folder)
    print(calls, untrained)


def where(folder):
    """The number of charges on the disk."""
    path = case.place(folder, "ant") / "privacy.ledger"
    return path.read_bytes().count(b'"kind": "charge"') if path.exists() else 0


def doomed(request, config, folder, fatal, torn, told):
    genuine = {name: getattr(os, name) for name in CALLS}
    left = [fatal]

    def wrap(name):
        def call(*given, **more):
            left[0] -= 1
            if left[0] == 0:
                if torn:
                    genuine["write"](given[0], bytes(given[1])[:20])
                os.kill(os.getpid(), signal.SIGKILL)
            return genuine[name](*given, **more)

        return call

    for name in ("write",) if torn else CALLS:
        setattr(os, name, wrap(name))
    reply = case.ask(request, config, folder)
    for name in CALLS:
        setattr(os, name, genuine[name])
    told.write_bytes(reply.blobs["d"].data)
    os._exit(0)


@pytest.mark.process
def test_killed_at_any_moment_nothing_was_sent_that_is_not_charged(tmp_path):
    code = "import sys, test_private_crashes as t; t.kill_everywhere(sys.argv[1])"
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = forkserver.run(f"import sys; sys.path[:0] = {here!r}.split(':')\n{code}", tmp_path)
    assert done.returncode == 0, done.stderr
    calls, untrained = map(int, done.stdout.split())
    assert calls > 40
    assert untrained > 5  # charged, and not yet trained or sent
