"""`python -m papers.exercises NAME`: one of the tutorial's exercises, measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedscaffold import checks
from fedscaffold.cli.verbs import Json, print_answer

if TYPE_CHECKING:
    from papers.exercises.record import Exercise

__all__ = ["EXERCISES", "app", "exercise", "measure"]

EXERCISES = ("participation", "stale", "momentum", "compression", "richardson")
"""Each is a file of this package, with a function of the same name that returns an `Exercise`."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m papers.exercises momentum --out momentum.csv")
def exercise(
    name: Annotated[
        str, typer.Argument(help="participation, stale, momentum, compression or richardson.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the table: a .csv file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure one of the tutorial's exercises: a table, and what it says."""
    from fedscaffold.experiments.build_problem import cache_programs

    cache_programs()
    from fedscaffold.runs import tables
    from papers.exercises.record import table

    found = measure(name)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(tables.csv(found.rows), encoding="utf-8")
    lines = [found.question, "", table(found.rows), "", found.finding]
    print_answer(found._asdict(), lines + ([] if out is None else ["", f"table: {out}"]), as_json)


def measure(name: str) -> Exercise:
    """Measure the exercise of this name.

    >>> measure("momentun")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown exercise 'momentun' (did you mean 'momentum'?); known:
        ...
    """
    module = importlib.import_module(
        f"papers.exercises.{checks.choice('exercise', name, EXERCISES)}"
    )
    found: Exercise = getattr(module, name)()
    return found
