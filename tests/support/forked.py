"""Children of a process that has imported all there is: a command costs a fork, not a start of JAX."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import fedscaffold
from fedscaffold.cli import main


def codes_of(script, folder, **more):
    """Run a script that gathers `codes` in a process that may fork; returns them, and what was said on stderr."""
    env = {
        **os.environ,
        "PJRT_NPROC": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(fedscaffold.__file__).parents[1])]),
        "PYTHONWARNINGS": "ignore",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # children find the program compiled
        **more,
    }
    words = [sys.executable, "-c", script + "\nprint(json.dumps(codes))"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def child(work):
    """Do the work in a child; returns its process id. Its exit code is what the work returns, 99 if it raises."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 99
        try:
            code = work() or 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def command(*words):
    """Run the command line in a child."""

    def work():
        sys.argv = ["fedscaffold", *words]
        with contextlib.redirect_stdout(io.StringIO()):
            main()

    return child(work)


def ended(pid):
    """Wait for a child; returns its exit code, less than zero for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
