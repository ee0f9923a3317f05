"""`python -m papers.peers`: judge other projects' SCAFFOLD, each in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import exit_with_line
from fedscaffold.cli.verbs import Json, print_answer
from fedscaffold.status_line import StatusLine
from papers.peers.catalogue import PEERS, find
from papers.peers.judge import (
    VERDICTS,
    find_checkout,
    judge,
    load_verdicts,
    prepare_environment,
    save_verdicts,
)
from papers.peers.page import PAGE, changes, count, write_page

__all__ = ["app", "judge_peers"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m papers.peers fedlab declearn --out runs/peers")
def judge_peers(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Peers; --list names them.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the peers.")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write docs/judged.md from the recorded verdicts.")
    ] = False,
    checkouts: Annotated[
        Path | None,
        typer.Option("--checkouts", help="Folder with the checkouts of peers without a package."),
    ] = None,
    environments: Annotated[
        Path, typer.Option("--environments", help="Folder for the peers' environments.")
    ] = Path("build/peers"),
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder for the verdicts; those of docs/judged.md by default."),
    ] = VERDICTS,
    as_json: Json = False,
) -> int:
    """Run the conformance suite on other projects' SCAFFOLD.

    Exit code 0 also where rows fail: the verdict is the result.
    """
    if listed:
        return _list(as_json)
    if page == bool(names):
        raise InputError("give the names of peers, or --page; --list names them")
    if page:
        write_page(load_verdicts(out))
        print_answer({"page": str(PAGE)}, [f"page: {PAGE}"], as_json)
        return 0
    line, answers, lines = StatusLine(not as_json), {}, []
    recorded, peers = load_verdicts(VERDICTS), [find(name) for name in dict.fromkeys(names or [])]
    for peer in peers:
        find_checkout(peer, checkouts)  # before minutes of installing
    with exit_with_line("stopped; the verdicts so far are kept: name the peers that are missing"):
        for peer in peers:
            line.show(f"{peer.name}: environment")
            python = prepare_environment(peer, environments)
            line.show(f"{peer.name}: suite")
            verdicts = judge(peer, python, checkouts)
            path = save_verdicts(verdicts, out)
            line.keep(f"{peer.name}: {path}")
            answers[peer.name] = verdicts
            lines += [*_describe(verdicts), f"  {changes(verdicts, recorded.get(peer.name))}"]
    print_answer({"peers": answers}, lines, as_json)
    return 0


def _list(as_json: bool) -> int:
    """Print the peers, and where each comes from."""
    rows: list[dict[str, Any]] = [
        {
            "name": peer.name,
            "project": peer.project,
            "version": peer.version,
            "source": peer.repository or "PyPI",
        }
        for peer in PEERS.values()
    ]
    lines = [f"{r['name']:18} {r['project']:26} {r['version'][:10]:11} {r['source']}" for r in rows]
    print_answer({"peers": rows}, lines, as_json)
    return 0


def _describe(verdicts: dict[str, Any]) -> list[str]:
    """Return lines on a peer's verdicts: counts, failing rows, diagnosis."""
    failing = [name for name, row in verdicts["rows"].items() if row[0] in ("fails", "error")]
    lines = [f"{verdicts['peer']} {verdicts['version']}: {count(verdicts)}"]
    lines += [f"  fails: {', '.join(failing)}"] if failing else []
    return lines + [f"  - {sentence}" for sentence in verdicts["diagnosis"]]
