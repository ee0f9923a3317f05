"""Metrics by round: their names, what they mean, and which way is better.

loss            f(x) = sum p_i f_i(x), over all clients' records
accuracy        share of records predicted right, on the test data where there is some, else on all records
grad_norm       |sum p_i grad f_i(x)|
gap             f(x) - f(x*), where the optimum x* is known
distance        |x - x*|
drift           root mean square distance of the cohort's local models from their mean, at the round's end
control_error   root mean square distance of the c_i from the ideal grad f_i(x*)
age             mean over clients of the rounds since they were last heard
residual        |c - sum p_i c_i|, the health gauge: always on; anything above rounding is a permanent bias
bytes_up, bytes_down    what the cohort sent and received in the round: always on
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = ["ALWAYS", "METRICS", "complaint", "explained", "met", "rises", "target_of"]

METRICS = ("loss", "accuracy", "grad_norm", "gap", "distance", "drift", "control_error", "age")
ALWAYS = ("residual", "bytes_up", "bytes_down")


def explained(rounds: int, clients: int, scale: float) -> float:
    """The residual that rounding explains: ten times what right runs show that hear all clients in every round.

    c and the mean of the c_i are kept in double precision whatever the precision of the run, so it is rounding of sums
    over up to so many `clients` that adds up over the `rounds`; `scale` is the size of the c_i. More is a fault.

    >>> explained(10**6, 10**6, 1.0) < 1e-6  # one c_i of size 1 lost among a million is seen after a million rounds
    True
    """
    eps = float(np.finfo(np.float64).eps)
    return (10 + 6 * math.sqrt(clients)) * eps * math.sqrt(max(1, rounds)) * scale


def complaint(round: int, residual: float, explained: float) -> str | None:
    """The sentence about a residual that rounding does not explain.

    >>> complaint(10, 1e-15, 7e-13) is None
    True
    >>> complaint(10, 0.5, 7e-13)
    'after round 10 c differs from the mean of the c_i by 0.5, where rounding explains 7e-13: a bias that never ...
    """
    if not math.isfinite(residual) or residual <= explained:
        return None
    return (
        f"after round {round} c differs from the mean of the c_i by {residual:.3g}, where rounding explains "
        f"{explained:.2g}: a bias that never heals. Likely causes: an algorithm whose server step and remember do not "
        "agree (factor S/N, weights), or state that was changed or damaged between rounds (memory, disk)"
    )


def rises(metric: str) -> bool:
    """Whether more of the metric is better."""
    return metric == "accuracy"


def met(metric: str, value: Any, target: Any) -> Any:
    """Whether a value of the metric meets the target; NaN does not."""
    return value >= target if rises(metric) else value <= target


def target_of(text: str | tuple[str, float] | Mapping[str, float]) -> tuple[str, float]:
    """A metric and the value to reach, from "accuracy:0.9", ("accuracy", 0.9) or {"accuracy": 0.9}.

    >>> target_of("accuracy:0.9")
    ('accuracy', 0.9)
    """
    if isinstance(text, str):
        parts: Any = text.split(":")
    else:
        parts = next(iter(text.items())) if isinstance(text, Mapping) and len(text) == 1 else text
    try:
        name, value = parts
    except (TypeError, ValueError):
        raise InputError(f"a target is a metric and a value, such as accuracy:0.9, got {checks.shown(text)}") from None
    number = checks.written(value) if isinstance(text, str) else value
    return checks.choice("metric", name, METRICS), checks.number("the target", number)
