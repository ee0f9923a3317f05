"""Linear stochastic approximation: clients have oracles A_i x - b_i that need not be gradients.

linear_system         given matrices, symmetric or not
policy_evaluation     TD(0): values of given processes with linear features, from transitions
temporal_difference   the same on random Garnets with a given heterogeneity

On these problems FedAvg is FedLSA, and SCAFFOLD is SCAFFLSA. The solution solves A x = b for the
weighted means A = sum p_i A_i and b = sum p_i b_i, and x <- x - lr (A x - b) contracts to it for
small lr exactly if all eigenvalues of A have positive real parts (-A is Hurwitz). That is asked of
the mean alone: a client's own A_i may be singular.

TD(0) with features phi(s) and discount g follows phi(s) ((phi(s) - g phi(s'))'theta - r). For a
chain P with rewards r and stationary distribution D its mean is A theta - b with A = Phi'D(I - g
P)Phi, b = Phi'D r. A is not symmetric, -A is Hurwitz, and the solution solves the projected Bellman
equation Phi theta = Proj_D (r + g P Phi theta).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.markov import DecisionProcess, checked, garnet, perturbed, transitions
from fedscaffold.problems.problem import Facts, Floats, Problem
from fedscaffold.problems.quadratic import gradient as affine

__all__ = ["expected_system", "linear_system", "policy_evaluation", "temporal_difference"]


def linear_system(
    matrices: ArrayLike,
    right: ArrayLike,
    *,
    noise: ArrayLike | None = None,
    x0: ArrayLike | None = None,
) -> Problem:
    """Clients with oracles A_i x - b_i: `matrices` A (N, d, d), symmetric or not, `right` b (N, d).

    `noise` adds Gaussian noise to every oracle call: a variance, one (d, d) covariance, or one per
        client.

    >>> matrices = [[[1.0, 2.0], [-2.0, 1.0]], [[3.0, 0.0], [0.0, 1.0]]]
    >>> problem = linear_system(matrices, [[1.0, 0.0], [1.0, 2.0]])
    >>> problem.optimum()
    array([0., 1.])
    """
    a, b = np.asarray(matrices, np.float64), np.asarray(right, np.float64)
    if a.ndim != 3 or a.shape[1] != a.shape[2] or b.shape != a.shape[:2]:
        raise InputError(
            f"matrices must have shape (N, d, d) and right (N, d), got {a.shape} and {b.shape}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("matrices and right must be finite, got NaN or infinite values")
    start = np.zeros(b.shape[1]) if x0 is None else np.asarray(x0, np.float64)
    if start.shape != b.shape[1:]:
        raise InputError(f"x0 must have shape {b.shape[1:]}, got {start.shape}")
    clients = list(zip(a[:, None], b[:, None], strict=True))
    about: dict[str, Any] = {"noise": noise, "facts": _facts(a, b, (a, b)), "coupled": False}
    return Problem(None, start, clients, gradient=affine, **about, name="linear system")


def expected_system(
    world: DecisionProcess, features: ArrayLike, discount: float
) -> tuple[Floats, Floats]:
    """Return A = Phi'D(I - g P)Phi (d, d) and b = Phi'D r (d,).

    The mean of TD(0)'s oracle on a process.

    >>> a, b = expected_system(garnet(5, seed=1), np.eye(5), discount=0.9)
    >>> bool(np.linalg.eigvals(a).real.min() > 0)
    True
    """
    phi = np.asarray(features, np.float64)
    weighted = phi * world.stationary[:, None]
    a: Floats = weighted.T @ (phi - discount * world.chain @ phi)
    return a, weighted.T @ world.mean_rewards


@dataclass(frozen=True)
class TemporalDifference:
    """The mean over the batch of phi(s) ((phi(s) - discount phi(s'))'theta - r)."""

    discount: float

    def __call__(self, theta: Any, batch: Any) -> Any:
        """(theta, (phi(s), phi(s'), r)) -> oracle."""
        now, later, reward = batch
        error = (now - self.discount * later) @ theta - reward
        return now.T @ error / len(reward)


def policy_evaluation(
    worlds: Sequence[DecisionProcess],
    features: ArrayLike,
    *,
    discount: float = 0.95,
    records: int = 1000,
    seed: int = 0,
) -> Problem:
    """TD(0) for one process a client: `features` (S, d) of the states, `records` transitions each.

    A client's records are (phi(s), phi(s'), r), drawn independently with s from the stationary
    distribution. The optimum is that of the records, exactly; `problem.facts.population` is the
    system that they were drawn from, and `linear_system(*problem.facts.population)` the problem
    without sampling.

    >>> worlds = [garnet(6, seed=1), garnet(6, seed=2)]
    >>> policy_evaluation(worlds, np.eye(6)[:, :3], discount=0.9, records=50)
    Problem(temporal difference, 2 clients, 100 records, d = 3)
    """
    phi = np.asarray(features, np.float64)
    if phi.ndim != 2 or phi.size == 0 or not np.isfinite(phi).all():
        raise InputError(
            f"features must be a finite matrix with one row per state, got shape {phi.shape}"
        )
    worlds = [checked(f"world {i}", world, len(phi)) for i, world in enumerate(worlds)]
    if not worlds:
        raise InputError("worlds must hold one process for each client, got none")
    g = checks.number("discount", discount, at_least=0)
    if g >= 1:
        raise InputError(f"discount must be a number from 0 to below 1, got {discount!r}")
    count = checks.whole("records", records)
    seed = checks.whole("seed", seed, at_least=0)
    systems = [expected_system(world, phi, g) for world in worlds]
    clients = [
        transitions(world, phi, count, np.random.default_rng([seed, i]))
        for i, world in enumerate(worlds)
    ]
    a = np.stack([now.T @ (now - g * later) / count for now, later, _ in clients])
    b = np.stack([now.T @ reward / count for now, _, reward in clients])
    population = np.stack([a for a, _ in systems]), np.stack([b for _, b in systems])
    start = np.zeros(phi.shape[1])
    facts = _facts(a, b, population)
    about: dict[str, Any] = {"facts": facts, "coupled": False}
    return Problem(
        None, start, clients, gradient=TemporalDifference(g), **about, name="temporal difference"
    )


def temporal_difference(
    num_clients: int = 10,
    *,
    num_states: int = 30,
    num_actions: int = 2,
    branching: int = 2,
    num_features: int = 8,
    discount: float = 0.95,
    heterogeneity: float = 0.5,
    records: int = 1000,
    seed: int = 0,
) -> Problem:
    """Federated TD(0) on Garnets.

    The clients' processes are relatives of one Garnet, see `perturbed`.

    Features are random directions of length 1, the same for all clients; `policy_evaluation` says
    what the records are. More clients or records leave the processes of the others as they were.

    >>> problem = temporal_difference(3, records=200, heterogeneity=1.0)
    >>> mean = problem.facts.client_gradients(problem.optimum()).mean(axis=0)
    >>> problem.dim, bool(np.abs(mean).max() < 1e-14)
    (8, True)
    """
    checks.whole("num_clients", num_clients)
    world = garnet(num_states, num_actions, branching, seed=seed)
    size = checks.whole("num_features", num_features, at_most=num_states)
    first, *seeds = np.random.SeedSequence(seed).generate_state(1 + num_clients, np.uint64).tolist()
    phi = np.random.default_rng(first).normal(size=(num_states, size))
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    worlds = [perturbed(world, heterogeneity, seed=own) for own in seeds]
    return policy_evaluation(worlds, phi, discount=discount, records=records, seed=seed)


def _facts(a: Floats, b: Floats, population: tuple[Floats, Floats]) -> Facts:
    """What is known where client i's mean oracle is A_i x - b_i."""

    def optimum(p: Floats) -> Floats:
        mean = np.tensordot(p, a, 1)
        slowest = float(np.linalg.eigvals(mean).real.min())
        if slowest <= 1e-14 * np.abs(mean).max():
            raise InputError(
                "no step size leads x - lr (A x - b) to a solution: every eigenvalue of A, the "
                "weighted mean of the "
                f"clients' matrices, must have a real part above 0, got {slowest:.3g}"
            )
        solution: Floats = np.linalg.solve(mean, p @ b)
        return solution

    return Facts(optimum=optimum, client_gradients=lambda x: a @ x - b, population=population)
