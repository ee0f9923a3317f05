"""The privacy statement of a run: one page that a data-protection officer can read."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.privacy.accounting import round_up
from fedscaffold.runs.run_folder import RunRecord

__all__ = ["SIMULATED", "statement", "to_html", "to_text"]

NOT_COVERED = (
    "metrics computed on the clients' records (loss, accuracy, own metrics): nothing is added to "
    "them, and a published one is a further release",
    "the numbers of records, which are taken to be public",
    "an initial model that was trained on these records",
    "other runs on the same records outside this folder, such as those that chose the settings: "
    "each spends anew, and those with the same seed draw the same noise, which cancels in their "
    "difference",
    "a folder that was put back as a whole, ledger and checkpoints, or deleted",
    "floating-point arithmetic: clipped norms hold to rounding, and Gaussian noise has finitely "
    "many values, which in theory tells of what it was added to (Mironov 2012)",
)
PUBLIC = {"round", "bytes_up", "bytes_down", "epsilon", "time"}
SIMULATED = (
    "This run was SIMULATED: one process held all records, and its noise follows from a seed. It "
    "says what a deployment with these settings would spend; it protects nobody."
)


def statement(run: RunRecord) -> dict[str, Any]:
    """Return the facts of a run's privacy statement, by heading.

    Raises:
        InputError: The run was not private.
    """
    held = run.privacy
    if held is None:
        raise InputError(
            f"the record of the run of {run.algorithm} holds no privacy: run it with a table "
            "[privacy]"
        )
    if not held.get("ledger"):
        raise InputError(
            f"the run of {run.algorithm} kept no ledger, as those of comparisons do not: what else "
            "was spent on its records is not known; run it by itself"
        )
    budget = held["stop_at_epsilon"]
    shared = {
        "Adversary": "the server, and everybody who sees all that clients send in all rounds",
        "Guarantee": _guarantee(held),
        "Budget": "none was set" if budget is None else f"epsilon {budget:g}",
    }
    how = _of_records(held) if held["unit"] == "record" else _of_clients(held)
    sent = "noised gradients" if held["unit"] == "record" else "noised sums"
    facts = how | {heading: fact for heading, fact in shared.items() if heading not in how}
    if (among := held.get("quantiles")) is not None and None not in among:
        low, _, middle, _, high = (round_up(one) for one in among)
        facts["By client"] = (
            f"epsilon {low} to {high}, {middle} in the middle of {held['clients']:,} clients"
        )
    facts["Accountant"] = held["accountant"]
    facts["Released"] = (
        f"what {run.algorithm} makes known in {held['rounds']} rounds: functions of the {sent}, "
        "control variates included"
    )
    if held["before"]:
        facts["Composition"] += (
            f"; other runs on this ledger had spent epsilon {round_up(held['before'])} before, "
            "which the guarantee includes"
        )
    recorded = sorted(set(run.columns) - PUBLIC)
    if recorded:
        facts["Recorded without noise"] = (
            f"{', '.join(recorded)}: the run's folder holds these columns; to pass it on is a "
            "further release"
        )
    facts["Not covered"] = list(NOT_COVERED)
    facts["Audit"] = held.get("audit") or "none was made; see `fedscaffold privacy audit`"
    return facts


def _guarantee(held: Mapping[str, Any]) -> str:
    if held["epsilon"] is None:
        return f"NONE: the accountant has no bound on epsilon at delta {held['delta']:g}"
    return (
        f"({round_up(held['epsilon'])}, {held['delta']:g})-differential privacy for the client "
        "that spent most"
    )


def _of_clients(held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "Protected unit": "a whole client, with all its records",
        "Neighbouring data": "one client is replaced by one that adds nothing",
        "Adversary": "everybody who sees all models and sums of all rounds, and who takes part; "
        "not the server, unless sums are made without it seeing single messages",
        "Mechanism": f"messages clipped to norm {held['clip']:g}, all vectors jointly; Gaussian "
        f"noise of {held['noise']:g} times that norm on their sum, once a round",
        "Sampling assumed": "none: cohorts may be known",
        "Composition": f"up to {held['steps'][1]:,} rounds that a client attends",
        "Gauge": "c holds the noise of all rounds, and the c_i do not: c - mean c_i is not zero, "
        "by design",
    }


def _of_records(held: Mapping[str, Any]) -> dict[str, Any]:
    low, high = held["rates"]
    rate = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}, by client"
    fewest, most = held["steps"]
    steps = f"{most:,} steps" if fewest == most else f"{fewest:,} to {most:,} steps, by client"
    return {
        "Protected unit": "a single record of a client",
        "Neighbouring data": "one record of one client is replaced by one that adds nothing",
        "Mechanism": f"gradients of single records clipped to norm {held['clip']:g} over all "
        f"parameters jointly; Gaussian noise of {held['noise']:g} times that norm on their sum, "
        "independent for each client and step",
        "Sampling assumed": "Poisson: each record with its client's probability, independently",
        "Sampling used": f"{held['sampling']}, with probability {rate}",
        "Composition": f"{steps}; nothing is gained from the sampling of clients",
        "Overflow": "a batch larger than its room ends the run; its probability is part of delta",
    }


def to_text(facts: Mapping[str, Any], title: str, note: str = SIMULATED) -> str:
    """Return a statement as plain text, with a note at its head."""
    lines = [f"PRIVACY STATEMENT: {title}", "", note, ""]
    for heading, fact in facts.items():
        if isinstance(fact, str):
            lines.append(f"{heading}: {fact}")
        else:
            lines += [f"{heading}:", *(f"  - {one}" for one in fact)]
    return "\n".join(lines) + "\n"


def to_html(facts: Mapping[str, Any], title: str, note: str = SIMULATED) -> str:
    """Return a statement as a page that needs nothing else, with a note at its head."""

    def cell(fact: Any) -> str:
        if isinstance(fact, str):
            return escape(fact)
        return f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in fact)}</ul>"

    rows = "".join(
        f'<tr><th scope="row">{escape(heading)}</th><td>{cell(fact)}</td></tr>'
        for heading, fact in facts.items()
    )
    style = (
        "body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
        "th{text-align:left;vertical-align:top;padding:.4em 1em .4em 0;white-space:nowrap}"
        "td{padding:.4em 0}ul{margin:0;padding-left:1.2em}"
        "table{border-collapse:collapse}tr{border-bottom:1px solid #ccc}"
        ".note{border-left:4px solid #b40;padding:.2em 1em}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Privacy statement: '
        f"{escape(title)}</title><style>{style}</style><h1>Privacy statement</h1>"
        f'<p>{escape(title)}</p><p class="note">{escape(note)}</p>'
        f"<table>{rows}</table></html>\n"
    )
