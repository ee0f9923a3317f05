"""Findings about control variates: a sentence, a number and a recommended action each.

Shared by simulated runs and deployed servers; needs NumPy only. The severity of a finding is "ok",
"watch" (worth a look, may be intended) or "wrong" (results are not what they seem).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.metrics import explained

__all__ = [
    "NUMBERS",
    "Diagnosis",
    "Finding",
    "Memory",
    "check_ages",
    "check_finite",
    "check_norms",
    "check_privacy",
    "check_recorded_residual",
    "check_residual",
    "join_names",
    "longest_absence",
    "mean_and_norms",
    "overdue",
]

NUMBERS = {
    "residual": "norm of the mismatch, |c - sum p_i c_i|",
    "lost": "clients whose control variate is exactly zero",
    "ages": "most rounds since any client was last heard",
    "norms": "largest norm of a control variate, |c_i|",
    "alignment": "share of the clients' gradient differences that is left after correction",
    "visits": "planned rounds in which a client is heard, on average",
    "regime": "noise of the control variates over the clients' differences, sigma^2 / (K G^2)",
    "drift": "largest distance of a client from the model after one local round",
    "step size": "step size, as a multiple of the largest stable one",
    "rounds": "rounds abandoned in a row",
    "refusals": "replies refused",
    "audit": "rounds committed",
    "privacy": "epsilon spent, the largest of any client",
    "noise": "root mean squared distance to the optimum that noise and bias leave, by theory",
}
SEVERITIES = ("ok", "watch", "wrong")
CHANCE = 1e-3  # sampling explains an absence that is at least this probable
# multiples of the median norm, and of the robust deviation of its logarithm
OUTLIER, SIGMAS = 10.0, 6.0
NAMED, MOST = 5, 1000  # most clients named in a sentence, and in a finding
UNKNOWN = "a c_i or c was lost, replayed or overwritten"
STARTS_AGAIN = (
    "the mismatch never heals: go back to a checkpoint or copy from before it, or start again; "
    "then find what changed the state between rounds"
)


class Finding(NamedTuple):
    """Result of one check."""

    about: str
    severity: str
    sentence: str
    do: str = ""
    number: float | None = None
    clients: tuple[str, ...] = ()
    number_name: str | None = None
    """What the number is, if that depends on the run; else `NUMBERS` says it."""


class Diagnosis(NamedTuple):
    """Result of diagnosing a folder."""

    title: str
    round: int
    findings: list[Finding]

    @property
    def severity(self) -> str:
        """The highest severity among the findings."""
        return max((one.severity for one in self.findings), key=SEVERITIES.index, default="ok")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The control variates of a federation after a round, as its server has them."""

    name: Callable[[int], str]
    """(i) -> display name of client i."""
    p: NDArray[Any]
    c: NDArray[Any]
    mean: NDArray[Any]
    """sum p_i c_i, recomputed from all rows in double precision."""
    kept: NDArray[Any] | None
    """The same sum as updated incrementally by rounds; None if it is not maintained."""
    norms: NDArray[Any]
    """(N,) |c_i|."""
    scale: float
    """Scale of rounding errors: the largest root mean square of |c_i| so far."""
    round: int
    heard_at: NDArray[np.int64]
    """(N,) the round in which each was last heard; 0 for never."""
    share: float
    """Mean share of the clients heard in a round."""

    @property
    def explained(self) -> float:
        """The residual that rounding explains."""
        return explained(self.round, len(self.p), self.scale)


def mean_and_norms(
    chunks: Iterable[tuple[NDArray[Any], NDArray[Any]]], p: NDArray[Any], dim: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return sum p_i c_i in double precision and the norms |c_i|, in one pass over all rows.

    >>> chunk = np.array([1]), np.array([[3.0, 4.0]])
    >>> mean, norms = mean_and_norms([chunk], np.array([0.5, 0.5]), 2)
    >>> mean.tolist(), norms.tolist()
    ([1.5, 2.0], [0.0, 5.0])
    """
    mean, norms = np.zeros(dim), np.zeros(len(p))
    for clients, rows in chunks:
        wide = rows.astype(np.float64)
        mean += np.einsum("n,nd->d", p[clients], wide)  # not by BLAS: see simulation/invariants.py
        norms[clients] = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    return mean, norms


def check_finite(memory: Memory | None, x: NDArray[Any], c: NDArray[Any] | None) -> list[Finding]:
    """Check x, c and the clients' rows for values that are not finite."""
    found = []
    for name, vector in (("the model x", x), ("the server's c", c)):
        if vector is not None and not np.isfinite(vector).all():
            bad = int((~np.isfinite(vector)).sum())
            found.append(f"{name} has {bad} of {vector.size} values that are NaN or infinite")
    spoilt = () if memory is None else _client_names(memory, ~np.isfinite(memory.norms))
    if spoilt:
        found.append(f"the control variate of {join_names(spoilt)} is NaN or infinite")
    do = (
        "the run diverged or its state was damaged: take a smaller step size, or go back to a "
        "checkpoint from before"
    )
    said = "; ".join(found)
    if found:
        return [Finding("finite", "wrong", f"{said[0].upper()}{said[1:]}.", do, None, spoilt)]
    return []


def check_recorded_residual(
    residual: float, level: float, since: int | None = None, noised: bool = False
) -> Finding:
    """Check c = sum p_i c_i from the recorded residual and the level that rounding explains.

    Where whole clients are private (`noised`), c holds noise, and the residual is no fault.

    >>> [check_recorded_residual(residual, 1e-14).severity for residual in (1e-15, 0.1)]
    ['ok', 'wrong']
    """
    if noised:
        return _residual_noised(residual)
    if residual <= level:
        return _residual_ok(residual, level)
    return _residual_wrong(residual, level, None, since, UNKNOWN)


def check_residual(
    memory: Memory,
    since: int | None = None,
    suspects: Sequence[str] = (),
    zeros_meant: bool = False,
    noised: bool = False,
) -> list[Finding]:
    """Check c = sum p_i c_i; if violated, say which side changed, since when, and who.

    Args:
        memory: The control variates.
        since: The first round whose recorded residual rounding does not explain.
        suspects: Clients whose row alone would explain the mismatch.
        zeros_meant: Whether old control variates are set to zero on purpose.
        noised: Whether whole clients are private, so that c holds noise. Then only the sum that
            rounds keep is compared with the c_i.
    """
    level = memory.explained
    residual = float(np.linalg.norm(memory.c - memory.mean))
    kept = 0.0 if memory.kept is None else float(np.linalg.norm(memory.kept - memory.mean))
    if noised and kept <= level:
        return [_residual_noised(residual, memory.scale)]
    if noised:
        why = "rows of c_i were changed after the rounds that made them"
        return [_residual_wrong(kept, level, memory.scale, None, why, what="The kept sum of c_i")]
    largest = max(residual, kept)
    lost = () if zeros_meant else _client_names(memory, (memory.norms == 0) & (memory.heard_at > 0))
    if largest <= level:
        found = [_residual_ok(largest, level)]
        if lost and memory.scale > 0:
            said = (
                f"The control variate of {join_names(lost)} is exactly zero although heard, and c "
                "agrees with that."
            )
            do = "look whether a site was repaired or joined anew; its next round refreshes it"
            found.append(Finding("lost", "watch", said, do, float(len(lost)), lost))
        return found
    why = _explain_mismatch(memory, kept, level, lost, suspects)
    who = tuple(dict.fromkeys((*lost, *suspects)))
    return [_residual_wrong(largest, level, memory.scale, since, why, who)]


def _residual_ok(residual: float, level: float) -> Finding:
    said = (
        f"c equals the mean of the c_i: they differ by {residual:.2g}, and rounding explains up to "
        f"{level:.2g}."
    )
    return Finding("residual", "ok", said, number=residual)


def _residual_noised(residual: float, scale: float = math.inf) -> Finding:
    """Say what the residual is where whole clients are private; `scale` is the size of the c_i."""
    said = (
        "Whole clients are private: c is the server's own and holds the noise of all rounds, so it "
        f"differs from the mean of the c_i by {residual:.3g}. This is expected"
    )
    if residual <= scale:
        return Finding("residual", "ok", f"{said}.", number=residual)
    said += f", but it is larger than the c_i themselves ({scale:.3g}), so it misleads the model."
    do = "take fewer rounds, less noise or more clients; or fedavg, whose noise does not add up"
    return Finding("residual", "watch", said, do, residual)


def check_privacy(held: Mapping[str, Any]) -> Finding:
    """Say what a private run has spent, of what budget, by client.

    Args:
        held: What the run's record says of it (`Spent.facts`).

    >>> held = {"unit": "record", "epsilon": 2.5, "delta": 1e-5, "stop_at_epsilon": 3.0}
    >>> check_privacy(held | {"quantiles": [1.0, 1.2, 1.5, 2.0, 2.5]}).sentence
    'Epsilon 2.5 of a budget of 3 is spent at delta 1e-05, for single records; clients spent 1 to
        2.5, with median 1.5. A simulated epsilon protects nobody.'
    """
    unit = {"record": "single records", "client": "whole clients"}[held["unit"]]
    spent, budget, among = held.get("epsilon"), held.get("stop_at_epsilon"), held.get("quantiles")
    if spent is None:
        said = f"The accountant has no bound on epsilon at delta {held['delta']:g}, for {unit}"
        return Finding("privacy", "watch", f"{said}.", "take more noise, or fewer steps")
    said = f"Epsilon {spent:.4g}" + ("" if budget is None else f" of a budget of {budget:g}")
    said += f" is spent at delta {held['delta']:g}, for {unit}"
    if among is not None and None not in among:
        said += f"; clients spent {among[0]:.4g} to {among[-1]:.4g}, with median {among[2]:.4g}"
    if held.get("before"):
        said += f"; {held['before']:.4g} of it was spent by other runs before"
    said += ". A simulated epsilon protects nobody."
    if budget is not None and spent > budget:
        do = "nothing more may be released from these records within the budget"
        return Finding("privacy", "wrong", said, do, spent)
    return Finding("privacy", "ok", said, number=spent)


def _residual_wrong(
    residual: float,
    level: float,
    scale: float | None,
    since: int | None,
    why: str,
    who: tuple[str, ...] = (),
    what: str = "c",
) -> Finding:
    size = f" ({residual / scale:.2g} of their size)" if scale else ""
    times = (
        f"{residual / level:.2g} times what rounding explains"
        if level > 0
        else "where nothing is explained"
    )
    said = f"{what} differs from the mean of the c_i by {residual:.3g}{size}, {times}"
    said += f", since round {since}" if since is not None else ""
    return Finding("residual", "wrong", f"{said}: {why}.", STARTS_AGAIN, residual, who)


def _explain_mismatch(
    memory: Memory, kept: float, level: float, lost: Sequence[str], suspects: Sequence[str]
) -> str:
    if not np.any(memory.c) and np.any(memory.mean):
        return "c is exactly zero, so it was lost"
    if lost:
        return (
            f"the control variate of {join_names(lost)} is exactly zero although heard, so it was "
            "lost"
        )
    if suspects:
        return (
            f"the control variate of {join_names(suspects)} alone would explain it, so it was "
            "overwritten or replayed"
        )
    if memory.kept is not None and kept > level:
        apart = float(np.linalg.norm(memory.c - memory.kept))
        if apart <= level:
            return "rows of c_i were changed after the rounds that made them"
        return (
            "both c and rows of c_i were changed, or the algorithm's server step and remember do "
            "not agree"
        )
    if memory.kept is not None:
        return (
            "the c_i are as the rounds left them, so c was changed, or the server's step does not "
            "go with remember"
        )
    return UNKNOWN


def check_ages(
    memory: Memory, tended: str | None = None, pull: float | None = None, slope: float | None = None
) -> Finding:
    """Check for clients not heard for longer than sampling explains, and the effect on x.

    With S of N clients drawn uniformly in a round, N (1 - S/N)^a bounds the probability that any
    client is absent for a rounds.

    Args:
        memory: The control variates.
        tended: Name of the policy for stale control variates, if any.
        pull: |sum p_i (g_i - c_i)| over the overdue clients, the gradient norm at which training
            would end.
        slope: |grad f(x)| now.
    """
    age = memory.round - memory.heard_at
    longest = longest_absence(len(memory.p), memory.share)
    late, silent = overdue(memory), memory.heard_at == 0
    never, stale = _client_names(memory, late & silent), _client_names(memory, late & ~silent)
    usual = (
        f"clients were last heard {age.mean():.3g} rounds ago on average and {age.max()} at most; "
        f"sampling explains up to {longest:.3g}"
    )
    if not never and not stale:
        rest = f"; {silent.sum()} of {len(age)} were not heard yet" if silent.any() else ""
        return Finding(
            "ages", "ok", f"No client is overdue: {usual}{rest}.", number=float(age.max())
        )
    parts = [f"{join_names(never)} never heard in {memory.round} rounds"] if never else []
    parts += (
        [f"{join_names(stale)} not heard for {age[late & ~silent].max()} rounds"] if stale else []
    )
    said = f"{' and '.join(parts)}: {usual}"
    ends = pull is not None and slope is not None and pull > 0.5 * slope
    if pull is not None and slope is not None:
        said += f"; left so, training ends at a gradient of {pull:.2g} (now {slope:.2g})"
    grave = bool(never) or ends
    severity = "wrong" if grave and tended is None else "watch"
    do = (
        "find out why they are not reached; or leave them out, or let old memory go: stale = "
        "'drop:20'"
    )
    return Finding(
        "ages", severity, f"{said[0].upper()}{said[1:]}.", do, float(age.max()), (*never, *stale)
    )


def longest_absence(num_clients: int, share: float) -> float:
    """Return the age that sampling explains: N (1 - share)^age = 1/1000.

    >>> longest_absence(10, 1.0), round(longest_absence(10, 0.5), 6)
    (0.0, 13.287712)
    """
    if share >= 1:
        return 0.0
    return math.log(CHANCE / num_clients) / math.log1p(-share) if share > 0 else math.inf


def overdue(memory: Memory) -> NDArray[np.bool_]:
    """Return (N,) which clients were not heard for longer than sampling explains."""
    late: NDArray[np.bool_] = memory.round - memory.heard_at > longest_absence(
        len(memory.p), memory.share
    )
    return late


def check_norms(memory: Memory, gradients: NDArray[Any] | None = None) -> Finding:
    """Check the norms of the control variates for outliers.

    Args:
        memory: The control variates.
        gradients: (N,) |g_i(x)|, NaN where unknown; a norm that its gradient explains is no
            outlier.
    """
    heard = (memory.heard_at > 0) & (memory.norms > 0)
    norms = memory.norms[heard]
    if not len(norms):
        return Finding("norms", "ok", "There are no control variates yet.", number=0.0)
    middle, top = float(np.median(norms)), float(norms.max())
    spread = 1.4826 * float(np.median(np.abs(np.log(norms / middle))))
    out = (
        heard
        & (memory.norms > OUTLIER * middle)
        & (np.log(np.maximum(memory.norms, 1e-300) / middle) > SIGMAS * spread)
    )
    if gradients is not None:
        out &= ~(memory.norms <= 3 * gradients)  # NaN compares false and explains nothing
    who = _client_names(memory, out)
    said = (
        f"The norms of the control variates are {norms.min():.2g} to {top:.2g}, with median "
        f"{middle:.2g}"
    )
    if not who:
        return Finding("norms", "ok", f"{said}.", number=top)
    do = (
        "look at this client's data and replies: scaling, labels, or a site that sends what it "
        "likes (deploy.clip)"
    )
    return Finding(
        "norms",
        "watch",
        f"{said}: {join_names(who)} stands out, with {top / middle:.2g} times the median.",
        do,
        top,
        who,
    )


def _client_names(memory: Memory, which: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(memory.name(int(i)) for i in np.flatnonzero(which)[:MOST])


def join_names(names: Sequence[str]) -> str:
    """Join names to a phrase, abbreviated if they are many.

    >>> join_names(["client 1", "client 2"]), join_names([str(i) for i in range(9)])
    ('client 1 and client 2', '0, 1, 2, 3, 4 and 4 more')
    """
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
