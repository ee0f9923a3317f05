"""The command line: verbs, `--json` everywhere, exit codes 0 done, 1 a check failed, 2 the user's mistake.

Heavy imports are inside the commands, so that `fedscaffold --help` answers at once and without JAX.
"""

from __future__ import annotations

import os
import sys

import click

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import app

__all__ = ["main"]


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except click.exceptions.Abort:
        _leave("interrupted", 130)
    except click.ClickException as error:
        _leave(error.format_message().replace("\n", " "), 2)
    except (InputError, FileNotFoundError) as error:
        if os.environ.get("FEDSCAFFOLD_DEBUG"):
            raise
        _leave(str(error), 2)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(line: str, code: int) -> None:
    sys.stderr.write(f"fedscaffold: {line}\n")
    sys.exit(code)
