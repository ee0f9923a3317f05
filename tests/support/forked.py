"""Children of a process that has imported all there is: a command costs a fork, not a start of JAX."""

import contextlib
import io
import json
import os
import signal
import sys
import traceback

import forkserver

from fedscaffold.cli import main


def codes_of(script, folder, **more):
    """Run a script that gathers `codes` in a process that may fork; returns them, and what was said on stderr."""
    env = {
        "PJRT_NPROC": "1",
        "JAX_COMPILATION_CACHE_DIR": str(
            folder / "cache"
        ),  # children may be killed while they write to it
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # children find the program compiled
        **more,
    }
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    done = forkserver.run(f"{quiet}{script}\nprint(json.dumps(codes))", cwd=folder, env=env)
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
