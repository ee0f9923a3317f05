"""Metrics of a run, and targets.

loss            f(x) = sum p_i f_i(x), over all clients' records
accuracy        fraction of records classified correctly, on the test data if there are any, else on
                all records
grad_norm       |sum p_i grad f_i(x)|
gap             f(x) - f(x*), if the optimum x* is known
distance        |x - x*|
drift           root mean square distance of the cohort's local models from their mean, at the end
                of the round
control_error   root mean square distance of the c_i from grad f_i(x*)
age             rounds since a client was last heard, averaged over clients
residual        |c - sum p_i c_i|; always recorded. A value above rounding means a permanent bias
bytes_up, bytes_down    bytes that the cohort sent and received in the round; always recorded
time            virtual seconds at the end of the round; recorded if `delays` are given

`metric` makes a metric from a user's function of parameters and data.
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
    """Return the largest residual that rounding explains.

    It is ten times that of correct runs with full participation.

    c and the mean of the c_i are stored in double precision for any precision of the run, so
    rounding errors come from sums over clients and accumulate over rounds.

    Args:
        rounds: Number of rounds.
        clients: Number of clients.
        scale: Size of the c_i.

    >>> explained(10**6, 10**6, 1.0) < 1e-6  # one lost c_i of size 1 among a million is detected
    True
    """
    eps = float(np.finfo(np.float64).eps)
    return (10 + 6 * math.sqrt(clients)) * eps * math.sqrt(max(1, rounds)) * scale


def complaint(round: int, residual: float, explained: float) -> str | None:
    """Return a message about a residual that rounding does not explain; None if it does.

    >>> complaint(10, 1e-15, 7e-13) is None
    True
    >>> complaint(10, 0.5, 7e-13)
    'after round 10 c differs from the mean of the c_i by 0.5, where rounding explains 7e-13: a bias
    that never ...
    """
    if not math.isfinite(residual) or residual <= explained:
        return None
    return (
        f"after round {round} c differs from the mean of the c_i by {residual:.3g}, where "
        f"rounding explains {explained:.2g}: a bias that never heals. Likely causes: an algorithm "
        "whose server step and remember do not agree (factor S/N, weights), or state that was "
        "changed or damaged between rounds (memory, disk)"
    )


def rises(metric: str) -> bool:
    """Return whether larger values of the metric are better."""
    return metric == "accuracy"


def target_of(
    text: str | tuple[str, float] | Mapping[str, float], own: Collection[str] = ()
) -> tuple[str, float]:
    """Return the metric and value of a target.

    A target is "accuracy:0.9", ("accuracy", 0.9) or {"accuracy": 0.9}.

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
        raise InputError(
            f"a target is a metric and a value, such as accuracy:0.9, got {checks.shown(text)}"
        ) from None
    number = checks.written(value) if isinstance(text, str) else value
    return checks.choice("metric", name, (*METRICS, *own)), checks.number("the target", number)


class Stop(NamedTuple):
    """The metric that stops a run, and its direction."""

    metric: str
    rises: bool

    def met(self, value: Any, target: Any) -> Any:
        """Return whether a value meets the target; NaN does not."""
        return value >= target if self.rises else value <= target


def stop_of(stop_at: Any, own: Mapping[str, bool | None]) -> tuple[Stop, float]:
    """Return the stopping criterion and its target value.

    Args:
        stop_at: A target as for `target_of`, or one with a direction: ("f1", ">=", 0.9).
        own: Columns of the user's metrics, with whether larger values are better; None if unknown.

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
            f"stop_at must say which way {name} goes: ({name!r}, '>=', {target:g}), ({name!r}, "
            f"'<=', {target:g}), or maximize=True or False in fs.metric"
        )
    return Stop(name, direction), target


class Metric(NamedTuple):
    """A user's metric; made by `metric`."""

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
        """Names of its columns in the history of a run."""
        if self.by_client:
            return tuple(f"{self.name}_{one}" for one in self.summary)
        return (self.name,)


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
    """Make a metric from a function of parameters and data.

    The function receives all records of a data set at once, without padding. It is compiled with
    the rounds if JAX can trace it; otherwise it is called with NumPy arrays, only in rounds that
    are evaluated.

    Args:
        function: `function(params, data) -> number`.
        on: The data: "train" (the clients' records), "test" (the problem's test data), or the
            user's own data in any structure. With `by_client`, a list with one data set per client.
        by_client: Compute one value per client; the columns are summaries over clients.
        summary: Summaries over clients: "mean" (weighted by the p_i of the objective), "min",
            "max", "worst", or numbers between 0 and 1 for quantiles. The columns are named
            `name_summary`.
        model: "common" for x, or "own" for the personal models of an algorithm that has them
            (Ditto, FedBN), which implies `by_client`.
        maximize: Whether larger values are better; required for "worst", and for a target without a
            direction.
        compiled: True if JAX must trace the function, False if it must not, None to try.
        name: Name of the column; default: the name of the function.

    Returns:
        A metric for the argument `metrics` of `simulate`.

    Raises:
        InputError: The arguments are invalid or incompatible.

    >>> def error(params, data):
    ...     return abs(params - data).max()
    >>> metric(error, by_client=True, maximize=False, summary=("worst", 0.9)).columns
    ('error_worst', 'error_0.9')
    """
    called = _name_of(function, name)
    for option, value in (("maximize", maximize), ("compiled", compiled)):
        if value not in (None, True, False):
            raise InputError(
                f"{option} of {called} must be True, False or None, got {checks.shown(value)}"
            )
    personal = checks.choice("model of a metric", model, ("common", "own")) == "own"
    by_client = bool(by_client or personal)
    if isinstance(on, str):
        checks.choice("data of a metric", on, ("train", "test"))
    trained = isinstance(on, str) and on == "train"
    if by_client and not (personal or trained or isinstance(on, list)):
        raise InputError(
            f"{called} by client needs data of each: on='train', or a list with one data set for "
            "each client"
        )
    kept = tuple(
        _summary(called, one) for one in ((summary,) if isinstance(summary, str) else summary)
    )
    if by_client and "worst" in kept and maximize is None:
        raise InputError(
            f"the worst of {called} is the largest or the smallest: say maximize=False or True"
        )
    return Metric(function, called, on, by_client, kept, model, maximize, compiled)


def _name_of(function: Any, name: str | None) -> str:
    """Return the name of a metric."""
    if not callable(function):
        raise InputError(
            f"a metric must be a function (params, data) -> number, got {checks.shown(function)}"
        )
    called = (
        getattr(function, "__name__", "<lambda>") if name is None else checks.text("name", name)
    )
    if called == "<lambda>":
        raise InputError(
            "a metric of a function without a name needs one: fs.metric(function, name='error')"
        )
    return called


def _summary(name: str, one: Any) -> str | float:
    if isinstance(one, str):
        return checks.choice("summary", one, SUMMARIES)
    quantile = checks.number(f"a quantile of {name}", one, at_least=0)
    if quantile > 1:
        raise InputError(f"a quantile of {name} must be a number between 0 and 1, got {one}")
    return quantile
