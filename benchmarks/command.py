"""`python -m benchmarks`: the simulator beside three PyTorch loops, in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from fedscaffold.cli.verbs import Json, print_answer

__all__ = ["app", "bench"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m benchmarks --only W1 --json")
def bench(
    only: Annotated[
        str | None, typer.Option(help="Work loads, with commas between: W1 to W10, as in W5,W9.")
    ] = None,
    growth: Annotated[
        bool, typer.Option(help="Also measure how cost grows with N, cohort and K.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Measure the simulator beside three PyTorch loops, in one run."""
    from benchmarks import measure

    answer = measure.everything(
        only, growth, lambda line: None if as_json else typer.echo(line, err=True)
    )
    print_answer(answer, measure.lines(answer), as_json)
