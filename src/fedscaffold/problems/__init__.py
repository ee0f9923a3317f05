"""WHAT is minimised: objective, gradient oracle, client data, known facts (optimum, mu, L, noise)."""

from fedscaffold.problems.layout import Layout
from fedscaffold.problems.models import mlp, softmax
from fedscaffold.problems.problem import Facts, Problem, weights_of
from fedscaffold.problems.quadratic import dialled, lower_bound_pair, quadratic
from fedscaffold.problems.regression import linear, logistic, two_datasets

__all__ = [
    "Facts",
    "Layout",
    "Problem",
    "dialled",
    "linear",
    "logistic",
    "lower_bound_pair",
    "mlp",
    "quadratic",
    "softmax",
    "two_datasets",
    "weights_of",
]
