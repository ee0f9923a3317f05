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

__all__ = ["ALWAYS", "METRICS", "explained", "met", "rises", "target_of"]

METRICS = ("loss", "accuracy", "grad_norm", "gap", "distance", "drift", "control_error", "age")
ALWAYS = ("residual", "bytes_up", "bytes_down")


def explained(dtype: Any, rounds: int, scale: float = 1.0) -> float:
    """The residual that rounding explains: 1000 eps sqrt(rounds) of the size of the c_i; more than that is a fault.

    Right runs stay below 0.3 eps sqrt(rounds) with thousands of clients, and below 200 in single precision where a
    round sums a million of them. Less than that among so many cannot be told from rounding.

    >>> explained("float64", 100) < 1e-11
    True
    """
    return 1000 * float(np.finfo(dtype).eps) * math.sqrt(max(1, rounds)) * scale


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
