"""Theory: round maps, rates, best local steps, stationary distributions, bounds and plans.

Exact on quadratics, by closed forms whose cost does not depend on the number of local steps:

    round_map                       the affine map of one round of any algorithm, by differentiating its own code
    spectra, xi_round_map           the same in closed form, for SCAFFOLD and its memoryless kin
    contraction_rate, _curve        spectral radius and Lambda-norm of a round, beside the published bounds
    fixed_point, bias               where a method ends
    best_local_steps                the number of local steps that gains a digit at the least cost
    stationary, block_residual      mean and covariance in the long run; the equations they must satisfy
    mean_squared_error              of every round, without simulating, with any cohort and weights
    expected_gap                    the same for E f(x) - f(x*)
    sample_rounds                   runs with noise, exact in law, any number of local steps at the cost of one

And beyond, for smooth problems:

    expand                          first-order covariance and bias around the optimum, saturation with many clients
    heterogeneity, advise           how heterogeneous the clients are; which method to use, and why
    plan, verify                    step size, local steps, rounds and bytes for a target; predicted against measured
    speed_up                        linear speed-up in the number of clients, as far as it is proved
    bounds_*                        the published bounds with their conditions, corrected where they are wrong in print
"""

from fedscaffold.theory.advice import Advice, advise
from fedscaffold.theory.error_dynamics import expected_gap, mean_squared_error, sample_rounds
from fedscaffold.theory.expansion import Expansion, expand
from fedscaffold.theory.heterogeneity import Heterogeneity, heterogeneity
from fedscaffold.theory.local_steps import BestLocalSteps, best_local_steps
from fedscaffold.theory.planning import Plan, Proposal, Verified, plan, verify
from fedscaffold.theory.quadratics import Spectra, XiMap, spectra, xi_round_map
from fedscaffold.theory.rates import (
    ContractionRate,
    bias,
    contraction_curve,
    contraction_rate,
    fixed_point,
    rounds_per_digit,
)
from fedscaffold.theory.round_map import AffineMap, client_quadratics, is_quadratic, round_map
from fedscaffold.theory.speed_up import SpeedUp, speed_up
from fedscaffold.theory.stationary import Stationary, block_residual, stationary

__all__ = [
    "Advice",
    "AffineMap",
    "BestLocalSteps",
    "ContractionRate",
    "Expansion",
    "Heterogeneity",
    "Plan",
    "Proposal",
    "Spectra",
    "SpeedUp",
    "Stationary",
    "Verified",
    "XiMap",
    "advise",
    "best_local_steps",
    "bias",
    "block_residual",
    "client_quadratics",
    "contraction_curve",
    "contraction_rate",
    "expand",
    "expected_gap",
    "fixed_point",
    "heterogeneity",
    "is_quadratic",
    "mean_squared_error",
    "plan",
    "round_map",
    "rounds_per_digit",
    "sample_rounds",
    "spectra",
    "speed_up",
    "stationary",
    "verify",
    "xi_round_map",
]
