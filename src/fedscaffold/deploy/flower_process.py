"""The engine's process for a message (`flwr-clientapp`), as a fork of one that has loaded it.

Flower starts a command anew for every message, which takes more than a second of processor time for
imports. Its executor (`flower-superexec`, started by the node) looks for commands on PATH, as the
node does for the executor, so a folder that comes first there can hold others:

    flower-superexec    Flower's executor. Beside it waits a process that has loaded what a message
                        needs and does nothing else; a message's process is a fork of it
    flwr-clientapp      Flower's command, without what only a node needs (SQL, migrations), which
                        stands in one package with it: for an executor whose installation has
                        changed since it started
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

__all__ = ["end_with", "execute", "launcher", "main", "wait_for_message", "write_command"]

MESSAGE = "flwr-clientapp"
EXECUTOR = "flower-superexec"
NODE = "flwr.supernode.cli.flower_supernode"
# a shell script and a Python program in one: a path of Python may be too long for a first line
COMMAND = """\
#!/bin/sh
'''exec' python3 -P "$0" "$@"
'''
from fedscaffold.deploy.flower_process import {function}

{function}()
"""


def write_command(folder: Path) -> None:
    """Write the commands into a folder, which must come before flwr's own on PATH."""
    from fedscaffold.state.files import make_folder, write_private  # not for every message

    make_folder(folder, private=True)
    for name, function in ((MESSAGE, "main"), (EXECUTOR, "execute")):
        write_private(folder / name, COMMAND.format(function=function))
        (folder / name).chmod(0o700)


def main() -> None:
    """Run flwr's own command for a message."""
    _load()()


def execute() -> None:
    """Run flwr's executor, with a process beside it that is forked for every message."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    from fedscaffold.deploy.worker_wire import code_version

    run_message, version = _load(), code_version()
    waiting, launching = socket.socketpair()
    if os.fork() == 0:  # before Flower starts a thread
        launching.close()
        words = wait_for_message(waiting)
        if words is not None:
            sys.argv = words
            end_with(run_message)
        return
    waiting.close()
    popen = launcher(launching, lambda: code_version() == version)
    engine: Any = subprocess_executor
    engine.subprocess = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
    flower_superexec()


def launcher(to: socket.socket, current: Callable[[], bool]) -> Callable[..., Any]:
    """Return what starts a process as `subprocess.Popen` does, but messages by the waiting process.

    Args:
        to: A socket that the waiting process reads.
        current: Tells whether that process has loaded what is installed now.
    """

    def popen(words: list[str], **more: Any) -> Any:
        with suppress(OSError):  # it died, or is being installed: started as Flower does
            if words[0] == MESSAGE and not more and current():
                return to.sendall(json.dumps(words).encode() + b"\n")
        return subprocess.Popen(words, **more)

    return popen


def wait_for_message(waiting: socket.socket) -> list[str] | None:
    """Return the command of a message, in a process of its own; None when no more will come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a message's process ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the executor
    gc.freeze()  # or the collector of each fork would write to, and so copy, all that they share
    with waiting, waiting.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                with suppress(OSError):  # its name for `ps`, where there is such a file
                    Path("/proc/self/comm").write_text(MESSAGE, encoding="ascii")
                return [str(word) for word in json.loads(line)]
    return None


def end_with(run_message: Callable[[], None]) -> NoReturn:
    """Run flwr's command and end the process.

    Flower's exit handlers have run by then. Python's own end would visit every module, and so copy
    the memory that the process shares with the one it was forked from.
    """
    code: Any = 1
    try:
        run_message()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        with suppress(OSError, ValueError):  # of a stream that is closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _load() -> Callable[[], None]:
    """Import what a message needs, and return flwr's command."""
    unused = ModuleType(NODE)
    unused.flower_supernode = None  # type: ignore[attr-defined]
    sys.modules[NODE] = unused
    import httpcore  # noqa: F401, which Flower imports with its first connection
    from flwr.supernode.cli import flwr_clientapp

    import fedscaffold.deploy.flower_client  # noqa: F401

    run_message: Callable[[], None] = flwr_clientapp
    return run_message
