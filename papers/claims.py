"""Every figure and table of the papers.

One file each, with its claim, its published numbers and its check.

A new claim is one file with a `CLAIM` and one row in `CLAIMS`.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedscaffold import checks
from fedscaffold.checks import InputError
from papers.cache import RECORDED, Selected, Store, Tell, key_of
from papers.claim import Claim, Data, Drawing, Outcome, verdict
from papers.helper import helping

__all__ = ["ALIASES", "CLAIMS", "find", "judged", "measured", "reproduce", "select"]

CLAIMS = {
    "quadratics-fig1": "quadratics_fig1",
    "quadratics-fig2": "quadratics_fig2",
    "quadratics-fig3": "quadratics_fig3",
    "quadratics-fig4": "quadratics_fig4",
    "quadratics-fig5": "quadratics_fig5",
    "speedup-fig1": "speedup_fig1",
    "talk-bias": "talk_bias",
    "talk-richardson": "talk_richardson",
    "drift-fig1": "drift_fig1",
    "scaffold-fig3": "scaffold_fig3",
    "scaffold-table3": "scaffold_table3",
    "scaffold-table4": "scaffold_table4",
    "scaffold-table5": "scaffold_table5",
    "tutorial-table": "tutorial_table",
    "theorem2-lower-bound": "theorem2_lower_bound",
    "participation": "participation",
    "conjectures": "conjectures",
    "flamby-heart": "flamby_heart",
    "flamby-tcga": "flamby_tcga",
    "cyclic": "cyclic",
    "niid-bench": "niid_bench",
    "niid-tuned": "niid_tuned",
    "femnist-writers": "femnist_writers",
    "where-it-loses": "where_it_loses",
    "table3-settings": "table3_settings",
}
ALIASES = {"table3": "scaffold-table3", "table4": "scaffold-table4", "table5": "scaffold-table5"}


def find(name: str) -> Claim:
    """Return the claim of this name.

    >>> find("table3").name
    'scaffold-table3'
    >>> find("quadratic-fig1")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown claim 'quadratic-fig1' (did you mean 'quadratics-fig1'?);
        known: ...
    """
    full = ALIASES.get(name, name)
    module = importlib.import_module(f"papers.{CLAIMS[checks.choice('claim', full, CLAIMS)]}")
    claim: Claim = module.CLAIM
    return claim


def reproduce(
    claim: Claim,
    size: str,
    folder: Path,
    *,
    fresh: bool = False,
    tell: Tell = lambda done, parts, left: None,
    processes: int = 1,
) -> tuple[Outcome, Sequence[Drawing]]:
    """Measure a claim, or find it measured in the cache, judge it and draw it.

    Args:
        claim: The claim; if there are several processes, one of `CLAIMS`.
        size: "quick" or "full".
        folder: The cache.
        fresh: Whether to remove first what the cache has of it, and to read no recorded results.
        tell: Called after every part that was measured: parts done, parts, seconds left.
        processes: How many processes measure parts, with this one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome, drawings = reproduce(find("quadratics-fig2"), "quick", Path(folder))
    >>> outcome.verdict, len(drawings)
    ('reproduced', 1)
    """
    checks.choice("size", size, claim.sizes)
    kept = folder / claim.name / f"{key_of(claim, size)}.npz"
    if fresh:
        kept.unlink(missing_ok=True)
        shutil.rmtree(kept.with_name(f"{kept.stem}-cells"), ignore_errors=True)
    recorded = None if fresh else RECORDED / claim.name
    number = 0 if kept.exists() else processes - 1
    with helping(claim.name, size, folder, number, recorded) as helpers:
        data, made = measured(
            claim, size, folder, tell=tell, processes=lambda: 1 + helpers(), recorded=recorded
        )
    outcome = judged(claim, size, data)._replace(cached=not made)
    from papers import plotting

    with plotting.style():
        drawings = claim.draw(data)
    return outcome._replace(figures=[(one.name, one.caption) for one in drawings]), drawings


def select(
    claim: Claim,
    size: str,
    folder: Path,
    only: str,
    *,
    tell: Tell = lambda done, parts, left: None,
    processes: int = 1,
) -> dict[str, Data]:
    """Measure some parts of a claim, or find them in the cache or among the recorded ones.

    Args:
        claim: The claim.
        size: "quick" or "full".
        folder: The cache, where they are kept for the whole claim.
        only: A pattern of their names, with `*` and `?`; the parts that they need are measured,
            too.
        tell: As in `reproduce`.
        processes: As in `reproduce`.

    Returns:
        The results by the names of the parts.
    """
    checks.choice("size", size, claim.sizes)
    recorded = RECORDED / claim.name
    cells = folder / claim.name / f"{key_of(claim, size)}-cells"
    inner = Store(cells, tell=tell, recorded=recorded / cells.name, only=only)
    with helping(claim.name, size, folder, processes - 1, recorded, only) as helpers:
        inner.processes = lambda: 1 + helpers()
        try:
            claim.measure(claim.settings(size), inner)
        except Selected as selected:
            return selected.results
    raise InputError(f"--only: {claim.name} is measured as a whole, without parts")


def measured(
    claim: Claim, size: str, folder: Path, *, recorded: Path | None = None, **store: Any
) -> tuple[Data, list[str]]:
    """Return a claim's data, measured or found in the cache, and the keys of what was measured.

    Args:
        claim: The claim.
        size: "quick" or "full".
        folder: The cache.
        recorded: Folder of the claim's recorded results; None not to read them.
        **store: Arguments of `Store`.
    """
    kept, key = Store(folder / claim.name, **store), key_of(claim, size)
    cells = f"{key}-cells"
    inner = kept.within(cells, None if recorded is None else recorded / cells)

    def measure() -> Data:
        data = claim.measure(claim.settings(size), inner)
        return data | ({"recorded": len(inner.taken)} if inner.taken else {})

    return kept(key, measure), kept.made


def judged(claim: Claim, size: str, data: Data) -> Outcome:
    """The verdict on a claim's data: nothing is measured."""
    settings, about = claim.settings(size), list(data.get("about", []))
    if data.get("recorded"):
        about.append(
            f"Of its parts {data['recorded']} were not measured here: their results are in "
            "papers/recorded. --fresh measures all of them."
        )
    made = claim.judge(data, settings)
    word, words = verdict(made)
    return Outcome(
        claim.name,
        claim.title,
        claim.source,
        claim.says,
        size,
        word,
        words,
        made,
        claim.tables(data),
        claim.errata(data),
        [],
        claim.film(data) if claim.film else "",
        dict(settings),
        about,
        float(data.get("seconds", 0.0)),
        False,
    )
