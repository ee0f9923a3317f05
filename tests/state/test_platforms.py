"""Without POSIX: modules and system calls that Windows lacks are taken away, and everything runs."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Other libraries are imported first: they have ways of their own on Windows.
WITHOUT_POSIX = """
import asyncio, multiprocessing, os, signal, socket, subprocess, sys, tempfile, threading, types
import jax, numpy, optax, pandas, pydantic, rich, sklearn.linear_model, typer, typer.main

for name in ("fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None  # importing it raises ImportError
GONE = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "fchmod", "fork", "waitid",
        "sched_getaffinity", "sysconf", "pread", "preadv", "pwrite", "pwritev", "posix_fadvise",
        "geteuid", "getuid", "getpgid", "killpg", "setsid", "statvfs")
for name in GONE:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGCHLD", "pthread_sigmask"):
    delattr(signal, name)

held = {}

def locking(fd, mode, size):
    place = os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR)
    try:
        taken = held.get(place, fd) != fd and os.fstat(held[place]).st_ino == place[0]
    except OSError:  # closed, and with it unlocked
        taken = False
    if taken:
        raise OSError(13, "Permission denied")
    held[place] = fd

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
"""

RUNS = """
import fedscaffold as fs
import numpy as np

problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, seed=0)
ask = dict(local_steps=3, lr=0.3, cohort=0.5, precision="float64", metrics=())
whole = fs.simulate(fs.scaffold(), problem, rounds=20, **ask)
fs.simulate(fs.scaffold(), problem, rounds=10, checkpoint=FOLDER + "/a", **ask)
resumed = fs.simulate(fs.scaffold(), problem, rounds=20, checkpoint=FOLDER + "/a", **ask)
assert resumed.digest == whole.digest
sparse = fs.simulate(fs.scaffold(), problem, rounds=20, client_state="sparse", **ask)
assert np.allclose(sparse.vector, whole.vector, rtol=1e-12)
assert len(fs.sweep(fs.scaffold(), problem, rounds=20, seeds=2, **{**ask, "lr": [0.1, 0.3]}).runs) == 2
try:
    fs.simulate(fs.scaffold(), problem, rounds=2, client_state="file", checkpoint=FOLDER + "/b", **ask)
except fs.InputError as error:
    assert "client_state='file' needs a POSIX system" in str(error), error
else:
    raise AssertionError("client_state='file' ran")
from fedscaffold.state.files import StateError, owned
from pathlib import Path
with owned(Path(FOLDER, "c")):
    try:
        with owned(Path(FOLDER, "c")):
            raise AssertionError("locked twice")
    except StateError:
        pass
from fedscaffold.conformance import conform, select
assert not [one for one in conform(fs.scaffold, select(["mean", "optimum: all"])) if one.outcome != "holds"]
fs.theory.plan
import fedscaffold.estimators, fedscaffold.data, fedscaffold.diagnose, fedscaffold.runs
print("well")
"""

COMMAND = """
from fedscaffold.cli import main
with open(FOLDER + "/config.toml", "w") as file:
    file.write("rounds = 5\\n[problem]\\ndataset = 'quadratic'\\n[local]\\nsteps = 2\\nlr = 0.1\\n")
sys.argv = ["fedscaffold", "run", FOLDER + "/config.toml", "--set", f"output.dir={FOLDER}/run", "--json"]
main()
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both in one process: most of its time is imports."""
    folder = tmp_path_factory.mktemp("platforms")
    text = f"{WITHOUT_POSIX}\nFOLDER = {str(folder)!r}\n{RUNS}\n{COMMAND}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True), folder


def test_runs_checkpoints_sweeps_theory_and_conformance_work(done):
    process, _ = done
    assert process.stdout.splitlines()[:1] == ["well"], process.stderr[-2000:]


def test_the_command_line_runs_and_writes_its_folder(done):
    process, folder = done
    assert process.returncode == 0, process.stderr[-2000:]
    assert (folder / "run" / "report.html").is_file()
