"""`exercise`: one of the tutorial's exercises, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedscaffold.cli.verbs import Json, app, say

__all__ = ["exercise"]


@app.command(epilog="Example: fedscaffold exercise momentum --out momentum.csv")
def exercise(
    name: Annotated[str, typer.Argument(help="participation, stale, momentum, compression or richardson.")],
    out: Annotated[Path | None, typer.Option("--out", help="Also write the table: a .csv file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure one of the tutorial's exercises: a table, and what it says."""
    from fedscaffold.experiments.machine import settle

    settle(0)
    from fedscaffold.experiments import exercises
    from fedscaffold.report import tables

    found = exercises.exercise(name)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(tables.csv(found.rows), encoding="utf-8")
    lines = [found.question, "", exercises.table(found.rows), "", found.finding]
    say(found._asdict(), lines + ([] if out is None else ["", f"table: {out}"]), as_json)
