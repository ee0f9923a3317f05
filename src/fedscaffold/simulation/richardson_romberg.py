"""Federated Richardson-Romberg (Mangold et al. 2025): two runs, with steps lr and 2 lr, combined.

    x = 2 x_lr - x_2lr

The limit of a method with a bias is x* + lr b + O(lr^2), so the first order cancels. It is a
combinator over any
algorithm, not an algorithm: both runs have the same seed, hence the same cohorts and batches. The
price is a second run, and up to nine times the variance where the two runs' noise is independent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.result import Run
from fedscaffold.simulation.simulator import simulate

__all__ = ["Richardson", "extrapolate", "richardson"]


class Richardson(NamedTuple):
    """Result of `richardson`: the combined model and the two runs."""

    def __repr__(self) -> str:
        return brief(self)

    x: Any
    """The model, with the pytree structure of the problem's params."""
    vector: NDArray[Any]
    fine: Run
    """The run with step size lr."""
    coarse: Run
    """The run with step size 2 lr."""


def richardson(algorithm: Algorithm, problem: Problem, *, lr: float, **same: Any) -> Richardson:
    """Run `algorithm` with lr and with 2 lr, and extrapolate.

    The other arguments are those of `simulate`.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.2, seed=1)
    >>> ask = dict(rounds=400, local_steps=5, precision="float64")
    >>> both = fs.richardson(fs.fedavg(), problem, lr=0.01, **ask)
    >>> def error(vector):
    ...     return float(abs(vector - problem.optimum()).max())
    >>> error(both.vector) < error(both.fine.vector) / 20
    True
    """
    lr = checks.number("lr", lr, above=0)
    if same.get("privacy") is not None:
        raise InputError("richardson does not take privacy: it runs twice, and both runs spend")
    fine, coarse = (simulate(algorithm, problem, lr=step, **same) for step in (lr, 2 * lr))
    vector = extrapolate(fine.vector, coarse.vector)
    return Richardson(problem.layout.unflatten(vector), vector, fine, coarse)


def extrapolate(fine: NDArray[Any], coarse: NDArray[Any]) -> NDArray[Any]:
    """Return 2 fine - coarse, in which the first order in the step size cancels."""
    combined: NDArray[Any] = 2 * fine - coarse
    return combined
