"""Python scripts and commands in children of one process that has imported everything already.

`run(code, *words)` does what `subprocess.run([sys.executable, "-c", code, *words])` does, without the seconds that
importing JAX, SciPy, scikit-learn and Matplotlib takes: the first call starts a server that imports them and forks a
child for each call. No JAX backend is started before a fork. A child has the caller's folder and environment, as a new
process has. Tests of how a process starts, of what it imports and of signals at its start need real processes.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

COMMAND = "from fedscaffold.cli import main; main()"
PRELOADED = (
    "jax",
    "jax.numpy",
    "optax",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.stats",
    "sklearn.datasets",
    "pydantic",
    "typer",
    "tomli_w",
    "fedscaffold.cli.deploy",
    "fedscaffold.cli.theory",
    "fedscaffold.cli.verbs",
    "fedscaffold.estimators",
    "fedscaffold.experiments",
    "fedscaffold.conformance",
    "fedscaffold.problems",
    "fedscaffold.simulation",
    "fedscaffold.theory",
    "matplotlib.pyplot",
    "papers.claims",
    "papers.command",
    "papers.exercises.command",
)
_server = None


def fedscaffold(*words, **given):
    """Run the command line; returns a `subprocess.CompletedProcess`."""
    return run(COMMAND, *words, **given)


def run(code, *words, cwd=None, env=None, input=None, check=False):
    """Run a script with `sys.argv[1:] = words` in a child; returns a `subprocess.CompletedProcess` with text.

    `env` are variables besides the caller's. JAX_COMPILATION_CACHE_DIR and what else `_configure_jax` names are heard;
    other variables that libraries read when they are imported are those of the first call.
    """
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        streams = {name: str(Path(folder, name)) for name in ("stdin", "stdout", "stderr")}
        Path(streams["stdin"]).write_text(input or "", encoding="utf-8")
        asked = {
            "code": code,
            "words": [str(word) for word in words],
            "cwd": str(cwd or Path.cwd()),
        }
        server = _started()
        server.stdin.write(
            json.dumps({**asked, "env": {**os.environ, **(env or {})}, "streams": streams}) + "\n"
        )
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the fork server has ended"
        out, err = (
            Path(streams[name]).read_text("utf-8", "backslashreplace")
            for name in ("stdout", "stderr")
        )
    done = subprocess.CompletedProcess([code, *words], json.loads(answer), out, err)
    if check:
        done.check_returncode()
    return done


def _started():
    global _server
    if _server is None:
        words = [sys.executable, __file__]
        _server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(_server.communicate)  # the end of its input ends it
    return _server


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # children need not search it for cycles
    for line in requests:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


def _child(asked):
    """Become the process that was asked for, and end as it does."""
    for number, (name, flags) in enumerate([("stdin", 0), ("stdout", 1), ("stderr", 1)]):
        kind = [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND][flags]
        os.dup2(os.open(asked["streams"][name], kind, 0o600), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    _configure_jax()
    sys.argv = ["-c", *asked["words"]]
    sys.path.insert(0, "")
    code = 1
    try:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)


def _configure_jax():
    """The variables that JAX read when it was imported, as they are now."""
    import jax

    for name, kind in (
        ("JAX_COMPILATION_CACHE_DIR", str),
        ("JAX_DISABLE_MOST_OPTIMIZATIONS", lambda text: text == "1"),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", float),
        ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", int),
    ):
        if name in os.environ:
            jax.config.update(name.lower(), kind(os.environ[name]))


if __name__ == "__main__":
    _serve()
