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

`metric` makes one of the user's own from a function of the model and a data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = [
    "ALWAYS",
    "METRICS",
    "Metric",
    "Stop",
    "complaint",
    "explained",
    "met",
    "metric",
    "rises",
    "stop_of",
    "target_of",
]

METRICS = ("loss", "accuracy", "grad_norm", "gap", "distance", "drift", "control_error", "age")
ALWAYS = ("residual", "bytes_up", "bytes_down")
SUMMARIES = ("mean", "min", "max", "worst")
DIRECTIONS = {">=": True, "<=": False}


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


def target_of(text: str | tuple[str, float] | Mapping[str, float], own: Collection[str] = ()) -> tuple[str, float]:
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
    return checks.choice("metric", name, (*METRICS, *own)), checks.number("the target", number)


class Stop(NamedTuple):
    """The metric that ends a run, and which way it goes."""

    metric: str
    rises: bool

    def met(self, value: Any, target: Any) -> Any:
        """Whether a value meets the target; NaN does not."""
        return value >= target if self.rises else value <= target


def stop_of(stop_at: Any, own: Mapping[str, bool | None]) -> tuple[Stop, float]:
    """What ends a run and the value to reach: as for `target_of`, or with a direction, ("f1", ">=", 0.9).

    Args:
        stop_at: what the user gave.
        own: the columns of the user's own metrics, with whether more is better; None where that was not said.

    >>> stop_of(("accuracy", 0.9), {}), stop_of(("f1", ">=", 0.5), {"f1": None})
    ((Stop(metric='accuracy', rises=True), 0.9), (Stop(metric='f1', rises=True), 0.5))
    """
    said = None
    if isinstance(stop_at, (tuple, list)) and len(stop_at) == 3:
        name, sign, value = stop_at
        said = DIRECTIONS[checks.choice("direction", sign, DIRECTIONS)]
        stop_at = (name, value)
    name, target = target_of(stop_at, own)
    direction = own.get(name, rises(name)) if said is None else said
    if direction is None:
        raise InputError(
            f"stop_at must say which way {name} goes: ({name!r}, '>=', {target:g}), ({name!r}, '<=', {target:g}), or "
            "maximize=True or False in fs.metric"
        )
    return Stop(name, direction), target


class Metric(NamedTuple):
    """A metric of the user's own; made by `metric`."""

    function: Callable[[Any, Any], Any]
    name: str
    on: Any
    by_client: bool
    summary: tuple[str | float, ...]
    model: str
    maximize: bool | None
    compiled: bool | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns in a run's history."""
        return tuple(f"{self.name}_{one}" for one in self.summary) if self.by_client else (self.name,)


def metric(
    function: Callable[[Any, Any], Any],
    *,
    on: Any = "train",
    by_client: bool = False,
    summary: Sequence[str | float] = ("mean", "min", "max"),
    model: str = "common",
    maximize: bool | None = None,
    compiled: bool | None = None,
    name: str | None = None,
) -> Metric:
    """Make a metric from a function of the model and a data set.

    The function sees real data sets only: all records at once, never padded. It is part of the compiled program where
    JAX can trace it; otherwise it is called with NumPy arrays, at the rounds that are measured only.

    Args:
        function: `function(params, data)`, one number, with the model in the user's own structure.
        on: the data set: "train" (the clients' records), "test" (the problem's test data), or data of the user's own in
            any structure. With `by_client`, a list with one data set for each client.
        by_client: measure on each client's data; the columns are summaries over clients.
        summary: what is kept of the clients' values: "mean" (weighted by the p_i of the objective), "min", "max",
            "worst", or numbers between 0 and 1 for quantiles. A column is called `name_summary`.
        model: "common" for x, or "own" for each client's own model, by an algorithm that gives it one (Ditto, FedBN);
            that is a metric by client.
        maximize: whether more is better, which "worst" and a target need to know.
        compiled: None to find out; False for a function that JAX must not trace, True for one that it must.
        name: of the column; by default the function's.

    Returns:
        What the argument `metrics` of `simulate` takes.

    Raises:
        InputError: for arguments that do not go together.

    >>> def error(params, data):
    ...     return abs(params - data).max()
    >>> metric(error, by_client=True, maximize=False, summary=("worst", 0.9)).columns
    ('error_worst', 'error_0.9')
    """
    if not callable(function):
        raise InputError(f"a metric must be a function (params, data) -> number, got {checks.shown(function)}")
    called = getattr(function, "__name__", "<lambda>") if name is None else checks.text("name", name)
    if called == "<lambda>":
        raise InputError("a metric of a function without a name needs one: fs.metric(function, name='error')")
    for option, value in (("maximize", maximize), ("compiled", compiled)):
        if value not in (None, True, False):
            raise InputError(f"{option} of {called} must be True, False or None, got {checks.shown(value)}")
    personal = checks.choice("model of a metric", model, ("common", "own")) == "own"
    by_client = bool(by_client or personal)
    if isinstance(on, str):
        checks.choice("data of a metric", on, ("train", "test"))
    trained = isinstance(on, str) and on == "train"
    if by_client and not (personal or trained or isinstance(on, list)):
        raise InputError(
            f"{called} by client needs data of each: on='train', or a list with one data set for each client"
        )
    kept = tuple(_summary(called, one) for one in ((summary,) if isinstance(summary, str) else summary))
    if by_client and "worst" in kept and maximize is None:
        raise InputError(f"the worst of {called} is the largest or the smallest: say maximize=False or True")
    return Metric(function, called, on, by_client, kept, model, maximize, compiled)


def _summary(name: str, one: Any) -> str | float:
    if isinstance(one, str):
        return checks.choice("summary", one, SUMMARIES)
    quantile = checks.number(f"a quantile of {name}", one, at_least=0)
    if quantile > 1:
        raise InputError(f"a quantile of {name} must be a number between 0 and 1, got {one}")
    return quantile
