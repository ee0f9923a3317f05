"""`theatre`: write the interactive drift page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import Json, app, print_answer

__all__ = ["theatre"]


@app.command(epilog="Example: fedscaffold theatre --out lecture/drift.html --open")
def theatre(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.html", help="The page to write.")
    ] = Path("theatre.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write the drift theatre: one offline page that shows drift and what breaks SCAFFOLD."""
    from fedscaffold.runs.theatre import write_theatre

    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out must be a page such as theatre.html, got {out}")
    try:
        page = write_theatre(out)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror}; choose another place with --out"
        ) from None
    opened = show and _open_browser(page)
    size = page.stat().st_size
    answer = {"page": str(page), "bytes": size, "opened": opened}
    lines = [
        f"theatre: {page} ({size / 1000:.0f} kB; open it in any browser, mail it, no network "
        "needed)"
    ]
    print_answer(
        answer,
        lines + (["no browser was found here to open it with"] if show and not opened else []),
        as_json,
    )


def _open_browser(page: Path) -> bool:
    import webbrowser

    return webbrowser.open(page.as_uri())
