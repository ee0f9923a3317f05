"""`python -m benchmarks`: the simulator beside PyTorch loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedscaffold.cli import run_program

if TYPE_CHECKING:
    import typer


def _load() -> typer.Typer:
    from benchmarks.command import app

    return app


def main() -> None:
    """Run the command line; heavy imports come after interrupts are handled."""
    run_program("python -m benchmarks", _load)


if __name__ == "__main__":
    main()
