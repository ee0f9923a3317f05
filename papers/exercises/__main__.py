"""`python -m papers.exercises`: one of the tutorial's exercises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedscaffold.cli import run_program

if TYPE_CHECKING:
    import typer


def _load() -> typer.Typer:
    from papers.exercises.command import app

    return app


def main() -> None:
    """Run the command line; heavy imports come after interrupts are handled."""
    run_program("python -m papers.exercises", _load)


if __name__ == "__main__":
    main()
