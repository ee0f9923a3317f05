"""Every figure and table of the papers.

One file each, with its claim, its published numbers and its check.

A new claim is one file with a `CLAIM` and one row in `CLAIMS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from fedscaffold import checks
from papers.cache import Store, Tell, key_of
from papers.claim import Claim, Data, Drawing, Outcome, verdict

__all__ = ["ALIASES", "CLAIMS", "find", "judged", "reproduce"]

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
) -> tuple[Outcome, Sequence[Drawing]]:
    """Measure a claim, or find it measured in the cache `folder`, judge it and draw it.

    `tell` is called after every part that was measured: parts done, parts, seconds left.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome, drawings = reproduce(find("quadratics-fig2"), "quick", Path(folder))
    >>> outcome.verdict, len(drawings)
    ('reproduced', 1)
    """
    settings = claim.settings(checks.choice("size", size, claim.sizes))
    store = Store(folder / claim.name, fresh=fresh, tell=tell)
    key = key_of(claim, size)
    data = store(key, lambda: claim.measure(settings, store.within(key + "-cells")))
    outcome = judged(claim, size, data)._replace(cached=not store.made)
    from papers import plotting

    with plotting.style():
        drawings = claim.draw(data)
    return outcome._replace(figures=[(one.name, one.caption) for one in drawings]), drawings


def judged(claim: Claim, size: str, data: Data) -> Outcome:
    """The verdict on a claim's data: nothing is measured."""
    settings = claim.settings(size)
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
        list(data.get("about", [])),
        float(data.get("seconds", 0.0)),
        False,
    )
