"""What may be wrong with a federation's memory, each in one plain sentence with a number and what to do about it.

Numbers in, sentences out: what is here serves simulated runs and deployed servers alike, and needs NumPy only. A
finding is "ok", "watch" (worth a look, may be meant so) or "wrong" (results are not what they seem).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.metrics import explained

__all__ = [
    "Finding",
    "Memory",
    "ages",
    "broken",
    "gathered",
    "listed",
    "mismatch",
    "oldest",
    "recorded",
    "sizes",
    "too_long",
    "worst",
]

SEVERITIES = ("ok", "watch", "wrong")
CHANCE = 1e-3  # a client's absence is explained by sampling if it is that likely among all clients
OUTLIER, SIGMAS = 10.0, 6.0  # a norm so many times the median, and so many robust deviations of the logarithm from it
NAMED, MOST = 5, 1000  # clients named in a sentence, and in a finding at most
UNKNOWN = "a c_i or c was lost, replayed or overwritten"
STARTS_AGAIN = (
    "the mismatch never heals: go back to a checkpoint or copy from before it, or start again; then find what "
    "changed the state between rounds"
)


class Finding(NamedTuple):
    """One thing that was looked at."""

    about: str
    severity: str
    sentence: str
    do: str = ""
    number: float | None = None
    clients: tuple[str, ...] = ()


class Memory(NamedTuple):
    """The control variates of a federation, as its server has them after a round."""

    name: Callable[[int], str]
    """(i) -> what client i is called."""
    p: NDArray[Any]
    c: NDArray[Any]
    mean: NDArray[Any]
    """sum p_i c_i, summed anew from all rows in double precision."""
    kept: NDArray[Any] | None
    """The same as rounds kept it up; None where nobody does."""
    norms: NDArray[Any]
    """(N,) |c_i|."""
    scale: float
    """What rounding is relative to: the root mean square of |c_i|, the largest so far."""
    round: int
    heard_at: NDArray[np.int64]
    """(N,) the round in which each was last heard; 0 for never."""
    share: float
    """Of the clients that a round hears, on average."""

    @property
    def explained(self) -> float:
        """The residual that rounding explains."""
        return explained(self.round, len(self.p), self.scale)


def worst(findings: Iterable[Finding]) -> str:
    """The gravest severity.

    >>> worst([Finding("a", "ok", "All is well."), Finding("b", "watch", "Look.")])
    'watch'
    """
    return max((one.severity for one in findings), key=SEVERITIES.index, default="ok")


def gathered(
    chunks: Iterable[tuple[NDArray[Any], NDArray[Any]]], p: NDArray[Any], dim: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One pass over all rows: sum p_i c_i in double precision, and the norms |c_i|.

    >>> mean, norms = gathered([(np.array([1]), np.array([[3.0, 4.0]]))], np.array([0.5, 0.5]), 2)
    >>> mean.tolist(), norms.tolist()
    ([1.5, 2.0], [0.0, 5.0])
    """
    mean, norms = np.zeros(dim), np.zeros(len(p))
    for clients, rows in chunks:
        wide = rows.astype(np.float64)
        mean += np.einsum("n,nd->d", p[clients], wide)  # not by BLAS: see simulation/health.py
        norms[clients] = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    return mean, norms


def broken(memory: Memory | None, x: NDArray[Any], c: NDArray[Any] | None) -> list[Finding]:
    """Values that are not finite, in x, in c and in the clients' rows."""
    found = []
    for name, vector in (("the model x", x), ("the server's c", c)):
        if vector is not None and not np.isfinite(vector).all():
            bad = int((~np.isfinite(vector)).sum())
            found.append(f"{name} has {bad} of {vector.size} values that are NaN or infinite")
    spoilt = () if memory is None else _named(memory, ~np.isfinite(memory.norms))
    if spoilt:
        found.append(f"the control variate of {listed(spoilt)} is NaN or infinite")
    do = "the run diverged or its state was damaged: take a smaller step size, or go back to a checkpoint from before"
    said = "; ".join(found)
    return [Finding("finite", "wrong", f"{said[0].upper()}{said[1:]}.", do, None, spoilt)] if found else []


def recorded(residual: float, level: float, since: int | None = None) -> Finding:
    """Is c the mean of the c_i, where only the residual is known, and the level that rounding explains.

    >>> recorded(1e-15, 1e-14).severity, recorded(0.1, 1e-14, since=3).severity
    ('ok', 'wrong')
    """
    return _agrees(residual, level) if residual <= level else _differs(residual, level, None, since, UNKNOWN)


def mismatch(
    memory: Memory, since: int | None = None, suspects: Sequence[str] = (), zeros_meant: bool = False
) -> list[Finding]:
    """Is c the mean of the c_i, and if not, which of the two was changed, when, and who is suspected.

    `since` is the first round whose recorded residual rounding does not explain; `suspects` are clients whose rows
    alone would explain the mismatch; `zeros_meant`: old control variates are dropped on purpose.
    """
    level = memory.explained
    residual = float(np.linalg.norm(memory.c - memory.mean))
    kept = 0.0 if memory.kept is None else float(np.linalg.norm(memory.kept - memory.mean))
    largest = max(residual, kept)
    lost = () if zeros_meant else _named(memory, (memory.norms == 0) & (memory.heard_at > 0))
    if largest <= level:
        found = [_agrees(largest, level)]
        if lost and memory.scale > 0:
            said = f"The control variate of {listed(lost)} is exactly zero although heard, and c agrees with that."
            do = "look whether a site was repaired or joined anew; its next round refreshes it"
            found.append(Finding("lost", "watch", said, do, float(len(lost)), lost))
        return found
    why = _cause(memory, kept, level, lost, suspects)
    who = tuple(dict.fromkeys((*lost, *suspects)))
    return [_differs(largest, level, memory.scale, since, why, who)]


def _agrees(residual: float, level: float) -> Finding:
    said = f"c is the mean of the c_i: they differ by {residual:.2g}, and rounding explains {level:.2g}."
    return Finding("residual", "ok", said, number=residual)


def _differs(
    residual: float, level: float, scale: float | None, since: int | None, why: str, who: tuple[str, ...] = ()
) -> Finding:
    size = f" ({residual / scale:.2g} of their size)" if scale else ""
    times = f"{residual / level:.2g} times what rounding explains" if level > 0 else "where nothing is explained"
    said = f"c differs from the mean of the c_i by {residual:.3g}{size}, {times}"
    said += f", since round {since}" if since is not None else ""
    return Finding("residual", "wrong", f"{said}: {why}.", STARTS_AGAIN, residual, who)


def _cause(memory: Memory, kept: float, level: float, lost: Sequence[str], suspects: Sequence[str]) -> str:
    if not np.any(memory.c) and np.any(memory.mean):
        return "c is exactly zero, so it was lost"
    if lost:
        return f"the control variate of {listed(lost)} is exactly zero although heard, so it was lost"
    if suspects:
        return f"the control variate of {listed(suspects)} alone would explain it, so it was overwritten or replayed"
    if memory.kept is not None and kept > level:
        apart = float(np.linalg.norm(memory.c - memory.kept))
        if apart <= level:
            return "rows of c_i were changed after the rounds that made them"
        return "both c and rows of c_i were changed, or the algorithm's server step and remember do not agree"
    if memory.kept is not None:
        return "the c_i are as the rounds left them, so c was changed, or the server's step does not go with remember"
    return UNKNOWN


def ages(memory: Memory, tended: str | None = None, pull: float | None = None, slope: float | None = None) -> Finding:
    """Who was not heard for longer than sampling explains, and what that does to the model.

    With S of N clients drawn uniformly in a round, N (1 - S/N)^a bounds the chance that anybody is away for a rounds.
    `tended` names the policy for old control variates; `pull` is |sum p_i (g_i - c_i)| over those away for too
    long, the gradient that training ends with, and `slope` the |grad f(x)| of now.
    """
    age = memory.round - memory.heard_at
    longest = oldest(len(memory.p), memory.share)
    late, silent = too_long(memory), memory.heard_at == 0
    never, stale = _named(memory, late & silent), _named(memory, late & ~silent)
    usual = f"the mean age is {age.mean():.3g} rounds, the oldest {age.max()}; sampling explains {longest:.3g}"
    if not never and not stale:
        rest = f"; {silent.sum()} of {len(age)} clients are not heard yet" if silent.any() else ""
        return Finding("ages", "ok", f"Nobody is away for long: {usual}{rest}.", number=float(age.max()))
    parts = [f"{listed(never)} never heard in {memory.round} rounds"] if never else []
    parts += [f"{listed(stale)} not heard for {age[late & ~silent].max()} rounds"] if stale else []
    said = f"{' and '.join(parts)}: {usual}"
    ends = pull is not None and slope is not None and pull > 0.5 * slope
    if pull is not None and slope is not None:
        said += f"; left so, training ends at a gradient of {pull:.2g} (now {slope:.2g})"
    grave = bool(never) or ends
    severity = "wrong" if grave and tended is None else "watch"
    do = "find out why they are not reached; or leave them out, or let old memory go: stale = 'drop:20'"
    return Finding("ages", severity, f"{said[0].upper()}{said[1:]}.", do, float(age.max()), (*never, *stale))


def oldest(num_clients: int, share: float) -> float:
    """The age that sampling explains: N (1 - share)^age = 1/1000.

    >>> oldest(10, 1.0), round(oldest(10, 0.5), 6)
    (0.0, 13.287712)
    """
    if share >= 1:
        return 0.0
    return math.log(CHANCE / num_clients) / math.log1p(-share) if share > 0 else math.inf


def too_long(memory: Memory) -> NDArray[np.bool_]:
    """(N,) who was not heard for longer than sampling explains."""
    late: NDArray[np.bool_] = memory.round - memory.heard_at > oldest(len(memory.p), memory.share)
    return late


def sizes(memory: Memory, gradients: NDArray[Any] | None = None) -> Finding:
    """Norms of the control variates, and who stands out; `gradients` are the |g_i(x)| that may explain it (or NaN)."""
    heard = (memory.heard_at > 0) & (memory.norms > 0)
    norms = memory.norms[heard]
    if not len(norms):
        return Finding("norms", "ok", "No control variate is there yet.", number=0.0)
    middle, top = float(np.median(norms)), float(norms.max())
    spread = 1.4826 * float(np.median(np.abs(np.log(norms / middle))))
    out = (
        heard
        & (memory.norms > OUTLIER * middle)
        & (np.log(np.maximum(memory.norms, 1e-300) / middle) > SIGMAS * spread)
    )
    if gradients is not None:
        out &= ~(memory.norms <= 3 * gradients)  # a NaN explains nothing
    who = _named(memory, out)
    said = f"The control variates measure {norms.min():.2g} to {top:.2g}, {middle:.2g} in the middle"
    if not who:
        return Finding("norms", "ok", f"{said}.", number=top)
    do = "look at this client's data and replies: scaling, labels, or a site that sends what it likes (deploy.clip)"
    return Finding("norms", "watch", f"{said}: {listed(who)} stands out, {top / middle:.2g} times that.", do, top, who)


def _named(memory: Memory, which: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(memory.name(int(i)) for i in np.flatnonzero(which)[:MOST])


def listed(names: Sequence[str]) -> str:
    """Some names in words.

    >>> listed(["client 1", "client 2"]), listed([str(i) for i in range(9)])
    ('client 1 and client 2', '0, 1, 2, 3, 4 and 4 more')
    """
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
