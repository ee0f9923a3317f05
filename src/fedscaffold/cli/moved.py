"""Verbs that were moved out of the package: each names the command of a checkout that replaces it."""

from __future__ import annotations

import shlex
from typing import NoReturn

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import app

__all__ = ["MOVED", "refuse_moved"]

MOVED = {
    "reproduce": "python -m papers",
    "exercise": "python -m papers.exercises",
    "bench": "python -m benchmarks",
    "conform --faults": "python -m tests.faults",
}


def refuse_moved(verb: str, *arguments: str) -> NoReturn:
    """Raise InputError naming the command that replaces a verb.

    >>> refuse_moved("bench", "--only", "W1")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: 'fedscaffold bench' has left the package: run 'python -m benchmarks --only W1' ...
    """
    command = shlex.join([*MOVED[verb].split(), *arguments])
    raise InputError(f"'fedscaffold {verb}' has left the package: run '{command}' in a checkout of the repository")


def _moved(context: typer.Context) -> None:
    refuse_moved(str(context.info_name), *context.args)


for _verb in MOVED:
    if " " not in _verb:
        app.command(
            _verb,
            hidden=True,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_moved)
