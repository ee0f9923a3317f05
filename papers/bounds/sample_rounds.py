"""Runs on quadratics with Gaussian noise, exact in law.

A round costs one draw, whatever its number of local steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.error_dynamics import chain, started
from fedscaffold.theory.round_map import SCAFFOLD
from fedscaffold.theory.second_moments import root

__all__ = ["sample_rounds"]


def sample_rounds(
    problem: Problem,
    *,
    lr: float,
    local_steps: int,
    noise: ArrayLike,
    rounds: int,
    seed: int,
    runs: int = 1,
    x0: ArrayLike | None = None,
    algorithm: Algorithm = SCAFFOLD,
) -> Floats:
    """Draw runs with Gaussian noise, exact in law.

    x of every round, shape (runs, rounds + 1, d), x0 first.

    A round of any number of local steps costs one draw of the accumulated noise (F5). All clients
    take part.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=5, dim=3, seed=0)
    >>> run = {"lr": 0.1, "local_steps": 10**6, "rounds": 50}
    >>> sample_rounds(problem, noise=0.01, seed=0, runs=4, **run).shape
    (4, 51, 3)
    """
    rounds, runs = checks.whole("rounds", rounds), checks.whole("runs", runs)
    law = chain(problem, lr=lr, local_steps=local_steps, noise=noise, algorithm=algorithm)
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    roots = [root(source.covariance) for source in law.sources]
    u, r = (np.tile(a, runs) for a in law.start(started(x0, problem)))
    path = np.empty((runs, rounds + 1, len(law.fixed)))
    path[:, 0] = u.T
    for t in range(1, rounds + 1):
        u, r = law.one.forward(u, r)
        for source, half in zip(law.sources, roots, strict=True):
            e = (half @ rng.normal(size=(*half.shape[:2], runs))).reshape(-1, runs)
            u = u - source.to_u * (law.one.basis @ e / law.one.num_clients)
            r = r - source.to_r * law.one.centred(e)
        path[:, t] = u.T
    return path + law.fixed
