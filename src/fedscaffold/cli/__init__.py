"""The command line: verbs, `--json` everywhere, exit codes 0 done, 1 a check failed, 2 the user's mistake.

Heavy imports are inside the commands, so that `fedscaffold --help` answers at once and without JAX.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from fedscaffold.checks import InputError, shown
from fedscaffold.cli.interrupts import code_of, interruptible, line_of

__all__ = ["main"]

EXTRAS = dict.fromkeys(("typer", "click", "pydantic", "tomli_w"), "cli")
EXTRAS |= dict.fromkeys(("jax", "scipy", "sklearn", "optax"), "sim")
EXTRAS |= dict.fromkeys(("flwr", "cryptography"), "deploy")
EXTRAS |= {"plotly": "report", "matplotlib": "report", "torch": "bench"}
MENDS = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "mend its permissions or choose another place")
MENDS |= dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in the way: choose another folder")
MENDS |= {
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "a symbolic link is in the way: give the file or folder itself",
    errno.EMFILE: "this process has too many files open: raise the limit, ulimit -n",
    errno.EISDIR: "this is a folder: give a file",
    errno.ENOSPC: "the disk is full: make room or choose another place",
    errno.EADDRINUSE: "another program has this port: end it or give another port",
}
MOST_SAID = 1000  # characters of a line: paths and values may be of any length


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with interruptible():  # before anything heavy is imported
        code = _outcome()
    sys.exit(code)


def _outcome() -> int:
    debug = bool(os.environ.get("FEDSCAFFOLD_DEBUG"))
    try:
        return _run()
    except (InputError, FileNotFoundError) as error:
        if debug:
            raise
        return _refused(str(error), 2)
    except MemoryError as error:
        if debug:
            raise
        return _refused(f"not enough memory for this: {error or 'take a smaller problem'}", 2)
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error  # the public face adds a line
        name = (missing.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        return _refused(f"this needs {name}: pip install 'fedscaffold[{EXTRAS[name]}]'", 2)
    except KeyboardInterrupt as stop:
        return _refused(line_of(stop), code_of(stop))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None or debug:
            raise
        where = "" if error.filename is None else f"{shown(error.filename)[1:-1]}: "
        mend = MENDS.get(error.errno)
        return _refused(f"{where}{error.strerror}{f'; {mend}' if mend else ''}", 2)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or debug:  # what JAX says where memory is not enough
            raise
        return _refused("not enough memory for this: take a smaller problem, batch or block", 2)


def _run() -> int:
    import click
    import typer
    import typer.core

    # we use no rich markup; where rich is installed, typer would still write \\[default: ...] for it
    typer.core.HAS_RICH = False
    from fedscaffold.cli import deploy, doctor, exercise, reproduce, resume, theatre, watch  # noqa: F401 (their verbs)
    from fedscaffold.cli.theory import app

    command = typer.main.get_command(app)
    try:
        # not through its main(), which keeps what was interrupted to itself
        with command.make_context("fedscaffold", sys.argv[1:]) as context:
            code = command.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        raise InputError(error.format_message().replace("\n", " ")) from None
    return code if isinstance(code, int) else 0


def _refused(line: str, code: int) -> int:
    line = " ".join(line.split())
    line = line if len(line) <= MOST_SAID else f"{line[: MOST_SAID // 2]} ... {line[-MOST_SAID // 2 :]}"
    sys.stderr.write(f"fedscaffold: {line}\n")
    return code
