"""`python -m papers`: the papers' figures and tables, one command each, or all on one page.

Exit codes are those of the library's command line: 0 done, 1 a criterion failed, 2 a user error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import exit_with_line
from fedscaffold.cli.verbs import Json, print_answer
from fedscaffold.parsing import plain
from fedscaffold.state.files import write_whole
from fedscaffold.state.platforms import cores
from fedscaffold.status_line import StatusLine

if TYPE_CHECKING:
    from papers.cache import Tell
    from papers.claim import Claim, Outcome

__all__ = ["app", "reproduce"]

LONGEST = 60  # an array that is printed without --json
MOST = 8  # processes of --full, as each needs memory of its own
OUT = Path("runs/papers")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m papers quadratics-fig2 --quick --out runs/papers")
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Claims; --list names them.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the claims.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All claims, on one page.")] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="What the paper did; seconds to hours.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, whatever the cache has.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Of one claim, measure and print the parts of such names, with * and ?.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Default: 1, with --full a process per core."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the page, figures and results.", show_default=str(OUT)),
    ] = None,
    as_json: Json = False,
) -> int:
    """Run claims of the papers, check them by their criteria, and make reproduction.html.

    Exit code 1 if a criterion fails; a published sentence that does not hold is reported, and is no
    failure of ours.
    """
    from papers.claims import CLAIMS, find

    size = "full" if full else "quick"
    if listed:
        return _list(as_json)
    if everything == bool(names):
        raise InputError("give the names of claims, or --all; --list names them")
    claims = [find(name) for name in (CLAIMS if everything else dict.fromkeys(names or []))]
    number = processes or (min(cores(), MOST) if full else 1)
    _settle(number)
    if only is not None:
        if len(claims) != 1 or fresh or out is not None:
            raise InputError("--only prints parts of one claim, without --fresh and --out")
        return _select(claims[0], size, only, number, as_json)
    began, out = time.perf_counter(), out or OUT
    again = "without --fresh " if fresh else ""
    with exit_with_line(f"stopped; what was measured is kept: the same command {again}goes on"):
        outcomes = _run(claims, size, out, fresh, number, as_json, everything)
        facts = _facts(time.perf_counter() - began)
        page = _keep(outcomes, out, facts)
    from papers.page import terminal

    lines = [line for one in outcomes for line in (*terminal(one), "")]
    answer = {
        "size": size,
        "page": str(page),
        "facts": facts,
        "claims": [_plain(one) for one in outcomes],
    }
    print_answer(answer, [*lines, f"page: {page}"], as_json)
    return 1 if any(one.failed for one in outcomes) else 0


def _list(as_json: bool) -> int:
    from papers.claims import CLAIMS, find

    claims = [find(name) for name in CLAIMS]
    lines = [f"{c.name:22} {c.source:34} {c.title}" for c in claims]
    answer = {"claims": [{"name": c.name, "source": c.source, "title": c.title} for c in claims]}
    print_answer(answer, lines, as_json)
    return 0


def _select(claim: Claim, size: str, only: str, processes: int, as_json: bool) -> int:
    """Measure parts of a claim, which are kept for the whole of it, and print them."""
    from papers.cache import home
    from papers.claims import select

    line = StatusLine(not as_json)
    with exit_with_line("stopped; what was measured is kept: the same command goes on"):
        found = select(claim, size, home(), only, tell=_teller(line), processes=processes)
    brief = {key: plain(_lists(data, LONGEST, digits=5)) for key, data in found.items()}
    lines = [f"{key}: {json.dumps(data)}" for key, data in brief.items()]
    answer = {"claim": claim.name, "size": size, "parts": plain(_lists(found))}
    print_answer(answer, lines, as_json)
    return 0


def _lists(value: Any, longest: float = math.inf, digits: int = 17) -> Any:
    """A part's result with lists for its arrays, of which those that are longer are left out.

    >>> held = {"runs": [{"best": 0.123456789, "at": np.arange(100), "lr": np.ones(2) / 3}]}
    >>> _lists(held, longest=60, digits=5)
    {'runs': [{'best': 0.12346, 'lr': [0.33333, 0.33333]}]}
    >>> len(_lists(held)["runs"][0]["at"])
    100
    """
    if isinstance(value, dict):
        return {
            name: _lists(one, longest, digits)
            for name, one in value.items()
            if not isinstance(one, np.ndarray) or one.size <= longest
        }
    if isinstance(value, np.ndarray):
        return _lists(value.tolist(), longest, digits)
    if isinstance(value, list):
        return [_lists(one, longest, digits) for one in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _teller(line: StatusLine) -> Tell:
    def tell(done: int, parts: int, left: float) -> None:
        line.show(f"  {done} of {parts} parts, about {left:.0f} s left")

    return tell


def _settle(processes: int) -> None:
    """Set JAX up, with one thread: results do not depend on the cores, nor on the processes."""
    from fedscaffold.experiments.build_problem import cache_programs
    from fedscaffold.grids.worker import environment
    from fedscaffold.simulation.threads import choose_threads

    if processes > 1:
        os.environ.update(environment(os.environ))
    cache_programs()
    choose_threads()


def _run(
    claims: Sequence[Claim],
    size: str,
    out: Path,
    fresh: bool,
    processes: int,
    as_json: bool,
    everything: bool,
) -> list[Outcome]:
    """One claim after the other, each kept as soon as it is done.

    With `everything`, claims whose data are not there are left out.
    """
    from papers import plotting
    from papers.cache import home
    from papers.claims import reproduce as run

    line = StatusLine(not as_json)
    outcomes: list[Outcome] = []
    for i, claim in enumerate(claims, 1):
        line.keep(f"{i}/{len(claims)} {claim.name}: {claim.title}")
        try:
            outcome, drawings = run(
                claim, size, home(), fresh=fresh, tell=_teller(line), processes=processes
            )
        except FileNotFoundError as missing:
            if not everything:
                raise
            line.keep(f"  left out: {missing}")
            continue
        with plotting.style():
            for one in drawings:
                plotting.save(one.figure, out, one.name)
        write_whole(out / f"{claim.name}.json", json.dumps(_plain(outcome), indent=1))
        outcomes.append(outcome)
        took = "from the cache" if outcome.cached else f"{outcome.seconds:.0f} s"
        line.keep(f"  {outcome.verdict} ({took})")
    return outcomes


def _facts(seconds: float) -> dict[str, str]:
    import platform
    import shlex

    from fedscaffold.runs import versions

    return {
        "command": shlex.join(["python", "-m", "papers", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "machine": f"{platform.machine()}, {platform.system()}",
        "time": f"{seconds:.0f} s in all; what was in the cache costs nothing again",
    }


def _keep(outcomes: Sequence[Outcome], out: Path, facts: dict[str, str]) -> Path:
    from papers.page import page

    figures = {
        name: (out / f"{name}.svg").read_text(encoding="utf-8")
        for one in outcomes
        for name, _ in one.figures
    }
    path = out / "reproduction.html"
    path.write_text(page(outcomes, figures, facts), encoding="utf-8")
    return path


def _plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome for programs, without its moving picture."""
    told = outcome._asdict() | {
        "checks": [
            check._asdict() | {"ratio": check.ratio, "mark": check.mark} for check in outcome.checks
        ],
        "tables": [table._asdict() for table in outcome.tables],
    }
    del told["film"]
    made: dict[str, Any] = plain(told)
    return made
