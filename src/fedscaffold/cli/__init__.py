"""Command line. Exit codes: 0 done, 1 a check failed, 2 user error. Every verb takes `--json`.

Heavy imports are inside the commands, so that `fedscaffold --help` is fast and works without JAX.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from fedscaffold.checks import InputError, shown
from fedscaffold.cli.interrupts import exit_code_of, interruptible, message_of

if TYPE_CHECKING:
    import click
    import typer

__all__ = ["main", "run_program"]

EXTRAS = dict.fromkeys(("typer", "click", "pydantic", "tomli_w", "packaging"), "cli")
EXTRAS |= dict.fromkeys(("jax", "scipy", "sklearn", "optax"), "sim")
EXTRAS |= dict.fromkeys(("flwr", "cryptography"), "deploy")
EXTRAS |= {"matplotlib": "report", "torch": "torch", "dp_accounting": "privacy"}
REMEDIES = dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS), "mend its permissions or choose another place"
)
REMEDIES |= dict.fromkeys(
    (errno.EEXIST, errno.ENOTDIR), "a file is in the way: choose another folder"
)
REMEDIES |= {
    errno.ENOENT: "check the path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "a symbolic link is in the way: give the file or folder itself",
    errno.EMFILE: "this process has too many files open: raise the limit, ulimit -n",
    errno.EISDIR: "this is a folder: give a file",
    errno.ENOSPC: "the disk is full: make room or choose another place",
    errno.EADDRINUSE: "another program has this port: end it or give another port",
}
MAX_LINE = 1000  # characters of an error line; paths and values may be of any length


def main() -> None:
    """Run the command line; a user error is one line on stderr and exit code 2."""
    run_program("fedscaffold", _verbs)


def run_program(name: str, load: Callable[[], typer.Typer]) -> None:
    """Run a Typer application with our exit codes, one-line errors and interrupt handling.

    Args:
        name: Program name shown in its help.
        load: Imports and returns the application; called once interrupts are handled.
    """
    for stream in (sys.stdout, sys.stderr):  # paths may contain bytes that are not valid text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with interruptible():  # before anything heavy is imported
        code = _exit_code(name, load)
    sys.exit(code)


def _exit_code(name: str, load: Callable[[], typer.Typer]) -> int:
    debug = bool(os.environ.get("FEDSCAFFOLD_DEBUG"))
    try:
        return _run(name, load)
    except (InputError, FileNotFoundError) as error:
        if debug:
            raise
        return _print_error(_line_of(error), 2)
    except MemoryError as error:
        if debug:
            raise
        return _print_error(f"not enough memory for this: {error or 'take a smaller problem'}", 2)
    except ImportError as error:
        missing = (
            error.__cause__ if isinstance(error.__cause__, ImportError) else error
        )  # fedscaffold/__init__.py adds a line
        module = (missing.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        return _print_error(f"this needs {module}: pip install 'fedscaffold[{EXTRAS[module]}]'", 2)
    except KeyboardInterrupt as stop:
        return _print_error(message_of(stop), exit_code_of(stop))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None or debug:
            raise
        return _print_error(_line_of(error), 2)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or debug:  # JAX's message when out of memory
            raise
        return _print_error("not enough memory for this: take a smaller problem, batch or block", 2)


def _line_of(error: Exception) -> str:
    """Return an error in one line; what the system refused with the path and what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    where = "" if error.filename is None else f"{shown(error.filename)[1:-1]}: "
    mend = REMEDIES.get(error.errno)
    return f"{where}{error.strerror}{f'; {mend}' if mend else ''}"


def _verbs() -> typer.Typer:
    from fedscaffold.cli import deploy, doctor, privacy, resume, theatre, watch  # noqa: F401 (their verbs)
    from fedscaffold.cli.theory import app

    return app


def _run(name: str, load: Callable[[], typer.Typer]) -> int:
    import click

    command = _command(load())
    try:
        # not through its main(), which swallows KeyboardInterrupt
        with command.make_context(name, sys.argv[1:]) as context:
            code = command.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        raise InputError(error.format_message().replace("\n", " ")) from None
    return code if isinstance(code, int) else 0


@cache
def _command(app: typer.Typer) -> click.Command:
    """Return the parser of an application, made once for all commands that a process runs."""
    import typer
    import typer.core

    # we use no rich markup; where rich is installed, typer would still write \\[default: ...] for
    # it
    typer.core.HAS_RICH = False
    return typer.main.get_command(app)


def _print_error(line: str, code: int) -> int:
    line = " ".join(line.split())
    line = (
        line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"
    )
    sys.stderr.write(f"fedscaffold: {line}\n")
    return code
