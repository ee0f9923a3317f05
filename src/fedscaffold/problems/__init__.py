"""WHAT is minimised: objective, gradient oracle, client data, known facts (optimum, mu, L, noise)."""

from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Facts, Problem, weights_of
from fedscaffold.problems.quadratic import dialled, lower_bound_pair, quadratic

__all__ = ["Facts", "Layout", "Problem", "dialled", "lower_bound_pair", "quadratic", "weights_of"]
