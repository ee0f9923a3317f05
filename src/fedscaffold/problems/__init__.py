"""Problems: objective, gradient oracle, client data, known facts (optimum, mu, L, noise)."""

from fedscaffold.problems.approximation import (
    expected_system,
    linear_system,
    policy_evaluation,
    temporal_difference,
)
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.markov import DecisionProcess, garnet, perturbed
from fedscaffold.problems.models import mlp, softmax
from fedscaffold.problems.problem import Facts, Problem, weights_of
from fedscaffold.problems.quadratic import dialled, lower_bound_pair, quadratic
from fedscaffold.problems.regression import linear, logistic, two_datasets
from fedscaffold.problems.torch_module import StateDict, TorchProblem
from fedscaffold.problems.torch_module import torch_problem as torch

__all__ = [
    "DecisionProcess",
    "Facts",
    "Layout",
    "Problem",
    "StateDict",
    "TorchProblem",
    "dialled",
    "expected_system",
    "garnet",
    "linear",
    "linear_system",
    "logistic",
    "lower_bound_pair",
    "mlp",
    "perturbed",
    "policy_evaluation",
    "quadratic",
    "softmax",
    "temporal_difference",
    "torch",
    "two_datasets",
    "weights_of",
]
