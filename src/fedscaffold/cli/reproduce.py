"""`reproduce`: the papers' figures and tables, one command each, or all on one page."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import saying
from fedscaffold.cli.verbs import Json, app, say

if TYPE_CHECKING:
    from fedscaffold.experiments.reproduce.claim import Claim, Outcome

__all__ = ["reproduce"]

NOW_AND_THEN = 10.0  # seconds


@app.command(epilog="Example: fedscaffold reproduce quadratics-fig2 --quick --out runs/reproduce")
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Claims; --list names them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the claims.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All claims, on one page.")] = False,
    full: Annotated[bool, typer.Option("--full/--quick", help="What the paper did; seconds to hours.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever the cache has.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the page, figures and results.")] = Path(
        "runs/reproduce"
    ),
    as_json: Json = False,
) -> int:
    """Run claims of the papers, check them by their criteria, and make reproduction.html.

    Exit code 1 if a criterion fails; a published sentence that does not hold is reported, and is no failure of ours.
    """
    from fedscaffold.experiments.reproduce import CLAIMS, find

    size = "full" if full else "quick"
    if listed:
        return _list(as_json)
    if everything == bool(names):
        raise InputError("give the names of claims, or --all; --list names them")
    claims = [find(name) for name in (CLAIMS if everything else dict.fromkeys(names or []))]
    _settle()
    began = time.perf_counter()
    again = "without --fresh " if fresh else ""
    with saying(f"stopped; what was measured is kept: the same command {again}goes on"):
        outcomes = _run(claims, size, out, fresh, as_json)
        facts = _facts(time.perf_counter() - began)
        page = _keep(outcomes, out, facts)
    from fedscaffold.experiments.reproduce.page import terminal

    lines = [line for one in outcomes for line in (*terminal(one), "")]
    answer = {"size": size, "page": str(page), "facts": facts, "claims": [_plain(one) for one in outcomes]}
    say(answer, [*lines, f"page: {page}"], as_json)
    return 1 if any(one.failed for one in outcomes) else 0


def _list(as_json: bool) -> int:
    from fedscaffold.experiments.reproduce import CLAIMS, find

    claims = [find(name) for name in CLAIMS]
    lines = [f"{c.name:22} {c.source:34} {c.title} (quick about {c.seconds['quick']:g} s)" for c in claims]
    answer = {
        "claims": [{"name": c.name, "source": c.source, "title": c.title, "seconds": dict(c.seconds)} for c in claims]
    }
    say(answer, lines, as_json)
    return 0


def _settle() -> None:
    from fedscaffold.experiments.machine import settle

    settle(0.0)


def _run(claims: Sequence[Claim], size: str, out: Path, fresh: bool, as_json: bool) -> list[Outcome]:
    """One claim after the other, each kept as soon as it is done."""
    from fedscaffold.experiments.reproduce import reproduce as run
    from fedscaffold.experiments.reproduce.cache import home
    from fedscaffold.report import paper

    outcomes: list[Outcome] = []
    for i, claim in enumerate(claims):
        left = sum(c.seconds[size] for c in claims[i:])
        about = claim.seconds[size]
        progress = Progress(about, as_json)
        progress.say(f"{i + 1}/{len(claims)} {claim.name}, about {about:g} s (all: {left:.0f} s left)\n")
        outcome, drawings = run(claim, size, home(), fresh=fresh, tell=progress.cell)
        with paper.style():
            for one in drawings:
                paper.save(one.figure, out, one.name)
        (out / f"{claim.name}.json").write_text(json.dumps(_plain(outcome), indent=1), encoding="utf-8")
        outcomes.append(outcome)
        progress.say(f"  {outcome.verdict}{' (from the cache)' if outcome.cached else ''}\n")
    return outcomes


class Progress:
    """How far a claim is: on a terminal in a line that passes; elsewhere, as in a log, a line now and then."""

    def __init__(self, about: float, silent: bool) -> None:
        self.about, self.silent, self.began, self.said = about, silent, time.monotonic(), time.monotonic()

    def cell(self, line: str) -> None:
        """A part of the claim is done and kept."""
        now = time.monotonic()
        if sys.stderr.isatty() or now - self.said > NOW_AND_THEN:
            self.said = now
            self.say(f"  {line}; {now - self.began:.0f} s of about {self.about:g} s")

    def say(self, line: str) -> None:
        """Write over the line before, if that one did not end."""
        if not self.silent:
            text = line.rstrip("\n")
            sys.stderr.write(line.replace(text, f"\r{text}\x1b[K") if sys.stderr.isatty() else f"{text}\n")
            sys.stderr.flush()


def _facts(seconds: float) -> dict[str, str]:
    import platform
    import shlex

    from fedscaffold.report import versions

    return {
        "command": shlex.join(["fedscaffold", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "machine": f"{platform.machine()}, {platform.system()}",
        "time": f"{seconds:.0f} s in all; what was in the cache costs nothing again",
    }


def _keep(outcomes: Sequence[Outcome], out: Path, facts: dict[str, str]) -> Path:
    from fedscaffold.experiments.reproduce.page import page

    figures = {name: (out / f"{name}.svg").read_text(encoding="utf-8") for one in outcomes for name, _ in one.figures}
    path = out / "reproduction.html"
    path.write_text(page(outcomes, figures, facts), encoding="utf-8")
    return path


def _plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome for programs, without its moving picture."""
    told = outcome._asdict() | {
        "checks": [check._asdict() | {"ratio": check.ratio, "mark": check.mark} for check in outcome.checks],
        "tables": [table._asdict() for table in outcome.tables],
    }
    del told["film"]
    made: dict[str, Any] = _finite(told)
    return made


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: both become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
