"""`diagnose RUN`: examine the folder of a run or a deployed server, and print the findings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import prepare_problem, print_answer

if TYPE_CHECKING:
    from fedscaffold.deploy.audit import Head
    from fedscaffold.deploy.server_state import SavedState
    from fedscaffold.diagnose.control_checks import Diagnosis, Finding

__all__ = ["print_diagnosis"]

MARKS = {"ok": "  ok   ", "watch": "  watch", "wrong": "  WRONG"}
STUCK = 3  # consecutive rounds without a quorum that are reported
COMPARE = "compare the log with a copy; the state itself is checked apart"


def print_diagnosis(folder: Path, data: str | None, as_json: bool) -> int:
    """Diagnose a folder and print the findings; return 1 if something is wrong."""
    if (folder / "config.toml").is_file() or (folder / "index.json").is_file():
        done = _diagnose_run(folder, data)
    elif (folder / "state").is_dir():
        done = _diagnose_server(folder)
    else:
        raise InputError(
            f"{folder} holds no run: neither config.toml (a run) nor state/ (a deployed server) is "
            "there; give the "
            "folder that `fedscaffold run` or `fedscaffold deploy` wrote"
        )
    from fedscaffold.diagnose.control_checks import NUMBERS

    found = [
        one._replace(number_name=one.number_name or NUMBERS.get(one.about)) for one in done.findings
    ]
    severity = done.severity
    counts = Counter(one.severity for one in found)
    verdict = {
        "ok": "nothing is wrong",
        "watch": "nothing is wrong; some things are worth a look",
    }.get(severity, "")
    verdict = verdict or f"{counts['wrong']} thing{'s are' if counts['wrong'] > 1 else ' is'} wrong"
    lines = [f"{done.title}: {verdict}"]
    for one in found:
        lines += [f"{MARKS[one.severity]}  {one.about}: {one.sentence}"]
        lines += [f"         -> {one.do}"] if one.do else []
    numbers = [one for one in found if one.number is not None]
    lines += ["numbers:"] if numbers else []
    lines += [f"  {one.number:>9.3g}  {one.number_name or one.about}" for one in numbers]
    answer = {"folder": str(folder), "title": done.title, "round": done.round, "severity": severity}
    listed = [one._asdict() for one in found]
    print_answer(answer | {"findings": listed}, lines, as_json)
    return 1 if severity == "wrong" else 0


def _diagnose_run(folder: Path, data: str | None) -> Diagnosis:
    from fedscaffold.diagnose.diagnose_run import diagnose, load_config

    config = load_config(folder)
    if data is not None:
        config = config.model_copy(
            update={"problem": config.problem.model_copy(update={"data": data})}
        )
    return diagnose(folder, config, prepare_problem(config))


def _diagnose_server(folder: Path) -> Diagnosis:
    """Examine a deployed server's folder.

    c, the c_i if it keeps them, its sites, and the audit log.
    """
    from fedscaffold.deploy.server_state import peek_state
    from fedscaffold.diagnose.control_checks import (
        Diagnosis,
        Finding,
        check_ages,
        check_finite,
        check_norms,
        check_residual,
    )

    kept = peek_state(folder / "state")
    if kept is None:
        raise InputError(f"{folder} holds a server that has not committed anything yet")
    state, (events, found) = kept.state, _examine_audit_log(folder / "audit.jsonl", kept.audit)
    found += [
        Finding("checkpoint", "watch", f"{one}.", "look at the disk") for one in kept.warnings
    ]
    title = f"deployed server, {len(state.roster)} sites, {state.round} rounds"
    memory = _load_memory(kept, events) if kept.means and state.roster else None
    spoilt = check_finite(memory, state.x, None if memory is None else memory.c)
    if kept.resync:
        do = "it happens with the next round; let all sites take part in it"
        found.append(
            Finding("resync", "watch", "A client lost its c_i: c is to be made anew from all.", do)
        )
    if spoilt or memory is None:
        return Diagnosis(title, state.round, [*found, *spoilt])
    if state.memory or not any(member.digest for member in state.roster.values()):
        found += [*check_residual(memory), check_ages(memory), check_norms(memory)]
    else:
        said = (
            "The sites keep the c_i themselves, so only a resync can tell whether c is their mean."
        )
        found += [Finding("residual", "ok", said), check_ages(memory)]
    return Diagnosis(title, state.round, found)


def _load_memory(kept: SavedState, events: list[dict[str, Any]]) -> Any:
    from fedscaffold.deploy.aggregation import shares
    from fedscaffold.diagnose.control_checks import Memory, mean_and_norms

    state = kept.state
    sites = sorted(state.roster)
    p = shares(state.roster)
    weights = np.array([p[site] for site in sites])
    c = np.concatenate(
        [np.asarray(getattr(state.server, field), np.float64) for field, _ in kept.means]
    )
    held = {
        site: np.concatenate([getattr(one, of) for _, of in kept.means])
        for site, one in state.memory.items()
    }
    rows = [(np.array([i]), held[site][None]) for i, site in enumerate(sites) if site in held]
    mean, norms = mean_and_norms(rows, weights, c.size)
    heard = [
        len(e["heard"]) for e in events if e["event"] == "committed" and e.get("kind") == "train"
    ]
    share = min(1.0, float(np.mean(heard)) / len(sites)) if heard else 1.0
    return Memory(
        name=sites.__getitem__,
        p=weights,
        c=c,
        mean=mean,
        kept=None,
        norms=norms,
        scale=state.scale,
        round=state.round,
        heard_at=np.array([state.roster[site].applied for site in sites], np.int64),
        share=share,
    )


def _examine_audit_log(path: Path, head: Head | None) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Return the events of the audit log, and findings.

    Broken chain, failed rounds, refused replies.
    """
    from fedscaffold.deploy.audit import read_verified
    from fedscaffold.diagnose.control_checks import Finding, join_names

    try:
        events = read_verified(path, head)
    except InputError as error:
        return [], [Finding("audit", "wrong", f"{error}.", COMPARE)]
    ends = [e["event"] for e in events if e["event"] in ("committed", "abandoned")]
    failed = next((i for i, event in enumerate(reversed(ends)) if event == "committed"), len(ends))
    refused = Counter(str(e.get("site")) for e in events if e["event"] == "refused")
    found = [
        Finding("audit", "wrong", f"{e['note']}.", COMPARE)
        for e in events
        if e["event"] == "broken"
    ]
    if failed >= STUCK:
        said = f"The last {failed} rounds were abandoned for want of a quorum."
        found.append(
            Finding(
                "rounds",
                "wrong",
                said,
                "see which sites do not answer; or a longer deploy.deadline",
                failed,
            )
        )
    if refused:
        sites = tuple(site for site, _ in refused.most_common())
        said = f"{sum(refused.values())} replies were refused, of {join_names(sites)}."
        do = f"the reasons are in {path.name}"
        found.append(Finding("refusals", "watch", said, do, float(sum(refused.values())), sites))
    if not found:
        done = len({e["round"] for e in events if e["event"] == "committed"})
        found = [
            Finding(
                "audit",
                "ok",
                f"The log is whole: {len(events)} events, {done} rounds committed.",
                number=done,
            )
        ]
    return events, found
