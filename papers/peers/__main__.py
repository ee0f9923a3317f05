"""`python -m papers.peers`: other projects' SCAFFOLD, judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedscaffold.cli import run_program

if TYPE_CHECKING:
    import typer


def _load() -> typer.Typer:
    from papers.peers.command import app

    return app


def main() -> None:
    """Run the command line."""
    run_program("python -m papers.peers", _load)


if __name__ == "__main__":
    main()
