"""The command line: verbs, `--json` everywhere, exit codes 0 done, 1 a check failed, 2 the user's mistake.

Heavy imports are inside the commands, so that `fedscaffold --help` answers at once and without JAX.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from fedscaffold.checks import InputError

__all__ = ["main"]

EXTRAS = dict.fromkeys(("typer", "click", "pydantic", "tomli_w"), "cli")
EXTRAS |= dict.fromkeys(("jax", "scipy", "sklearn", "optax"), "sim")
EXTRAS |= {"plotly": "report", "matplotlib": "report", "torch": "bench"}


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        code = _run()
    except (InputError, FileNotFoundError) as error:
        if os.environ.get("FEDSCAFFOLD_DEBUG"):
            raise
        _leave(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        _leave(f"this needs {error.name}: pip install 'fedscaffold[{EXTRAS[error.name]}]'", 2)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _run() -> int:
    import click

    from fedscaffold.cli.theory import app

    try:
        code = app(standalone_mode=False)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        raise InputError(error.format_message().replace("\n", " ")) from None
    return code if isinstance(code, int) else 0


def _leave(line: str, code: int) -> NoReturn:
    sys.stderr.write(f"fedscaffold: {line}\n")
    sys.exit(code)
