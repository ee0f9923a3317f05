"""Theory: round maps, rates, best local steps, stationary distributions and plans.

Exact on quadratics, by closed forms whose cost does not depend on the number of local steps:

    round_map                       the affine map of one round of any algorithm, by differentiating
                                    its own code
    spectra                         eigenvalues of the clients' Hessians, from which the closed
                                    forms are made
    contraction_rate, _curve        spectral radius of a round
    fixed_point, bias               where a method ends
    best_local_steps                the number of local steps that gains a digit at the least cost
    stationary                      mean and covariance in the long run
    mean_squared_error              of every round, without simulating, with any cohort and weights
    delayed_step_limit              largest step size of asynchronous rounds

And beyond, for smooth problems:

    heterogeneity, advise           how heterogeneous the clients are; which method to use, and why
    plan, verify                    step size, local steps, rounds and bytes for a target; predicted
                                    against measured
    plan_privacy, verify_privacy    noise, clip, batches, local steps and error for an epsilon
"""

from fedscaffold.theory.advice import Advice, advise
from fedscaffold.theory.delayed_steps import delayed_step_limit
from fedscaffold.theory.error_dynamics import mean_squared_error
from fedscaffold.theory.heterogeneity import Heterogeneity, heterogeneity
from fedscaffold.theory.local_steps import BestLocalSteps, best_local_steps
from fedscaffold.theory.planning import Plan, Proposal, Verified, plan, verify
from fedscaffold.theory.private_plan import (
    PrivatePlan,
    PrivateProposal,
    VerifiedPrivacy,
    plan_privacy,
    verify_privacy,
)
from fedscaffold.theory.quadratics import Spectra, spectra
from fedscaffold.theory.rates import (
    ContractionRate,
    bias,
    contraction_curve,
    contraction_rate,
    fixed_point,
    rounds_per_digit,
)
from fedscaffold.theory.round_map import AffineMap, client_quadratics, is_quadratic, round_map
from fedscaffold.theory.stationary import Stationary, stationary

__all__ = [
    "Advice",
    "AffineMap",
    "BestLocalSteps",
    "ContractionRate",
    "Heterogeneity",
    "Plan",
    "PrivatePlan",
    "PrivateProposal",
    "Proposal",
    "Spectra",
    "Stationary",
    "Verified",
    "VerifiedPrivacy",
    "advise",
    "best_local_steps",
    "bias",
    "client_quadratics",
    "contraction_curve",
    "contraction_rate",
    "delayed_step_limit",
    "fixed_point",
    "heterogeneity",
    "is_quadratic",
    "mean_squared_error",
    "plan",
    "plan_privacy",
    "round_map",
    "rounds_per_digit",
    "spectra",
    "stationary",
    "verify",
    "verify_privacy",
]
