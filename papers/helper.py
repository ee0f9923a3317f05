"""Processes that measure parts of a claim beside the one that was asked to.

A helper, `python -m papers.helper NAME SIZE FOLDER RECORDED [ONLY]`, goes through the parts of the
claim and takes those that no other process has locked; an empty RECORDED is none. It
ends with its standard input, so that none outlives the process that started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedscaffold.grids.worker import environment

__all__ = ["helping"]


@contextmanager
def helping(
    name: str,
    size: str,
    folder: Path,
    number: int,
    recorded: Path | None = None,
    only: str | None = None,
) -> Iterator[Callable[[], int]]:
    """Run helpers, and yield a function that tells how many of them are at work.

    Args:
        name: The claim.
        size: "quick" or "full".
        folder: The cache.
        number: How many.
        recorded: The folder of the claim's recorded results; None not to read them.
        only: A pattern of the keys of the parts; None for all parts.
    """
    path = os.pathsep.join(dict.fromkeys(part or str(Path.cwd()) for part in sys.path))
    words = [sys.executable, "-m", "papers.helper", name, size, str(folder.resolve())]
    words += ["" if recorded is None else str(recorded)]
    words += [] if only is None else [only]
    started = [
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a part that fails is tried, and fails, in this process too
            env=environment(os.environ) | {"PYTHONPATH": path},
            start_new_session=True,  # an interrupt is for the process that was asked
        )
        for _ in range(number)
    ]
    try:
        yield lambda: sum(one.poll() is None for one in started)
    finally:
        for one in started:
            with one:  # which closes its input and waits for its end
                one.kill()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Measure what is left of a claim."""
    from papers.cache import Selected
    from papers.claims import find, measured

    threading.Thread(target=_end_with_input, daemon=True).start()
    name, size, folder, recorded, *only = sys.argv[1:]
    with suppress(Selected):
        measured(
            find(name),
            size,
            Path(folder),
            recorded=Path(recorded) if recorded else None,
            only=only[0] if only else None,
        )


if __name__ == "__main__":
    main()
