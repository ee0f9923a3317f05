"""Staleness policies for control variates; every policy preserves c = sum p_i c_i exactly.

The age of c_i is the number of rounds since client i was last heard: N/S - 1 on average when S of N
are drawn uniformly.

    keep              nothing: the default
    decay(rate)       all c_i and c are multiplied by `rate` at the start of every round
    drop(after)       a client not heard for `after` rounds in a row is forgotten: c loses p_i c_i,
                      and c_i is 0
    refresh(after)    a client that returns after `after` missed rounds first takes
                      c_i = grad f_i(x), over all its data (option I, one more vector up);
                      c gains p_i times the change

Every change of c_i is applied to c with weight p_i in the same round, so the residual stays at
rounding level.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError, memoised

__all__ = ["KEEP", "Policy", "decay", "drop", "keep", "of", "refresh"]


class Policy(NamedTuple):
    """A staleness policy; at most one of `rate`, `drop_after`, `refresh_after` is set."""

    name: str = "keep"
    rate: float | None = None
    drop_after: int | None = None
    refresh_after: int | None = None


KEEP = Policy()


@memoised
def keep() -> Policy:
    """Keep control variates unchanged, whatever their age.

    >>> keep().name
    'keep'
    """
    return KEEP


@memoised
def decay(rate: float) -> Policy:
    """Multiply all control variates by `rate` in every round.

    >>> decay(0.9).rate
    0.9
    """
    rate = checks.number("rate", rate, at_least=0)
    if rate > 1:
        raise InputError(f"rate must be a number between 0 and 1, got {rate:g}")
    return Policy(f"decay:{rate:g}", rate=rate)


@memoised
def drop(after: int) -> Policy:
    """Reset the control variate of a client not heard for `after` rounds to zero.

    >>> drop(10).drop_after
    10
    """
    after = checks.whole("after", after, at_most=2**31 - 1)
    return Policy(f"drop:{after}", drop_after=after)


@memoised
def refresh(after: int) -> Policy:
    """Recompute the control variate of a client that returns after at least `after` missed rounds.

    >>> refresh(3).refresh_after
    3
    """
    after = checks.whole("after", after, at_most=2**31 - 1)
    return Policy(f"refresh:{after}", refresh_after=after)


def of(text: str | Policy) -> Policy:
    """Parse a policy: keep, decay:0.9, drop:20 or refresh:5; a `Policy` is returned unchanged.

    >>> of("drop:20").name
    'drop:20'
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise InputError(
            "stale must be a policy such as fs.stale.drop(20) or 'drop:20', got "
            f"{checks.shown(text)}"
        )
    name, _, value = text.partition(":")
    checks.choice("stale policy", name, ("decay", "drop", "keep", "refresh"))
    if name == "keep":
        return keep()
    number: Any = checks.written(value)
    if isinstance(number, str):
        raise InputError(f"{name} needs a number, such as {name}:{0.9 if name == 'decay' else 10}")
    return {"decay": decay, "drop": drop, "refresh": refresh}[name](number)
