"""`diagnose RUN`: a run's folder, or a deployed server's, looked at from outside; and how findings are said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import prepared, say

if TYPE_CHECKING:
    from fedscaffold.deploy.audit import Head
    from fedscaffold.deploy.store import Kept
    from fedscaffold.experiments.findings import Finding

__all__ = ["look"]

MARKS = {"ok": "  ok   ", "watch": "  watch", "wrong": "  WRONG"}
STUCK = 3  # rounds in a row without a quorum
COMPARE = "compare the log with a copy; the state itself is checked apart"


def look(folder: Path, data: str | None, as_json: bool) -> int:
    """Diagnose a folder and say what was found; 1 where something is wrong."""
    if (folder / "config.toml").is_file():
        title, round, found = _run(folder, data)
    elif (folder / "state").is_dir():
        title, round, found = _server(folder)
    else:
        raise InputError(
            f"{folder} holds no run: neither config.toml (a run) nor state/ (a deployed server) is there; give the "
            "folder that `fedscaffold run` or `fedscaffold deploy` wrote"
        )
    from fedscaffold.experiments.findings import worst

    severity = worst(found)
    counts = Counter(one.severity for one in found)
    verdict = {"ok": "nothing is wrong", "watch": "nothing is wrong; some things are worth a look"}.get(severity, "")
    verdict = verdict or f"{counts['wrong']} thing{'s are' if counts['wrong'] > 1 else ' is'} wrong"
    lines = [f"{title}: {verdict}"]
    for one in found:
        lines += [f"{MARKS[one.severity]}  {one.about}: {one.sentence}"]
        lines += [f"         -> {one.do}"] if one.do else []
    answer = {"folder": str(folder), "title": title, "round": round, "severity": severity}
    say(answer | {"findings": [one._asdict() for one in found]}, lines, as_json)
    return 1 if severity == "wrong" else 0


def _run(folder: Path, data: str | None) -> tuple[str, int, list[Finding]]:
    from fedscaffold.experiments import diagnosis

    config = diagnosis.configured(folder)
    if data is not None:
        config = config.model_copy(update={"problem": config.problem.model_copy(update={"data": data})})
    built = prepared(config)
    done = diagnosis.diagnose(folder, config, built)
    return done.title, done.round, done.findings


def _server(folder: Path) -> tuple[str, int, list[Finding]]:
    """What a deployed server's folder tells: c, the c_i where it keeps them, who is in, and the audit log."""
    from fedscaffold.deploy.store import seen
    from fedscaffold.experiments.findings import Finding, ages, broken, mismatch, sizes

    kept = seen(folder / "state")
    if kept is None:
        raise InputError(f"{folder} holds a server that has not committed anything yet")
    state, (events, found) = kept.state, _log(folder / "audit.jsonl", kept.audit)
    found += [Finding("checkpoint", "watch", f"{one}.", "look at the disk") for one in kept.warnings]
    title = f"deployed server, {len(state.roster)} sites, {state.round} rounds"
    memory = _memory(kept, events) if state.c is not None and state.roster else None
    spoilt = broken(memory, state.x, state.c)
    if kept.resync:
        do = "it happens with the next round; let all sites take part in it"
        found.append(Finding("resync", "watch", "A client lost its c_i: c is to be made anew from all.", do))
    if spoilt or memory is None:
        return title, state.round, [*found, *spoilt]
    if state.c_i or not any(member.digest for member in state.roster.values()):
        found += [*mismatch(memory), ages(memory), sizes(memory)]
    else:
        said = "The sites keep the c_i themselves, so only a resync can tell whether c is their mean."
        found += [Finding("residual", "ok", said), ages(memory)]
    return title, state.round, found


def _memory(kept: Kept, events: list[dict[str, Any]]) -> Any:
    from fedscaffold.deploy.rounds import shares
    from fedscaffold.experiments.findings import Memory, gathered

    state = kept.state
    sites = sorted(state.roster)
    p = shares(state.roster)
    weights = np.array([p[site] for site in sites])
    rows = [(np.array([i]), state.c_i[site][None]) for i, site in enumerate(sites) if site in state.c_i]
    mean, norms = gathered(rows, weights, state.x.size)
    heard = [len(e["heard"]) for e in events if e["event"] == "committed" and e.get("kind") == "train"]
    share = min(1.0, float(np.mean(heard)) / len(sites)) if heard else 1.0
    at = np.array([state.roster[site].applied for site in sites], np.int64)
    c = np.asarray(state.c, np.float64)
    return Memory(sites.__getitem__, weights, c, mean, None, norms, state.scale, state.round, at, share)


def _log(path: Path, head: Head | None) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The audit log, and what it says: a broken chain, rounds that failed, replies that were refused."""
    from fedscaffold.deploy.audit import verified
    from fedscaffold.experiments.findings import Finding, listed

    try:
        events = verified(path, head)
    except InputError as error:
        return [], [Finding("audit", "wrong", f"{error}.", COMPARE)]
    ends = [e["event"] for e in events if e["event"] in ("committed", "abandoned")]
    failed = next((i for i, event in enumerate(reversed(ends)) if event == "committed"), len(ends))
    refused = Counter(str(e.get("site")) for e in events if e["event"] == "refused")
    found = [Finding("audit", "wrong", f"{e['note']}.", COMPARE) for e in events if e["event"] == "broken"]
    if failed >= STUCK:
        said = f"The last {failed} rounds were abandoned for want of a quorum."
        found.append(
            Finding("rounds", "wrong", said, "see which sites do not answer; or a longer deploy.deadline", failed)
        )
    if refused:
        sites = tuple(site for site, _ in refused.most_common())
        said = f"{sum(refused.values())} replies were refused, of {listed(sites)}."
        do = f"the reasons are in {path.name}"
        found.append(Finding("refusals", "watch", said, do, float(sum(refused.values())), sites))
    if not found:
        done = len({e["round"] for e in events if e["event"] == "committed"})
        found = [
            Finding("audit", "ok", f"The log is whole: {len(events)} events, {done} rounds committed.", number=done)
        ]
    return events, found
