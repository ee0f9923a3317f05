"""One small federation of quadratics, and its runs: what the tests of the family have in common."""

import numpy as np

import fedscaffold as fs

N, D = 6, 3
RNG = np.random.default_rng(7)
ROOTS = RNG.normal(size=(N, D, D))
HESSIANS = ROOTS @ ROOTS.swapaxes(1, 2) / D + 0.1 * np.eye(D)
HESSIANS /= np.linalg.eigvalsh(HESSIANS).max()
LINEAR = RNG.normal(size=(N, D))
X0 = np.array([1.0, -2.0, 0.5])
PROBLEM = fs.problems.quadratic(hessians=HESSIANS, linear=LINEAR, x0=X0)
OPTIMUM = np.linalg.solve(HESSIANS.mean(axis=0), LINEAR.mean(axis=0))
EXACT = {"precision": "float64"}


def grad(i, y):
    return HESSIANS[i] @ y - LINEAR[i]


def close(found, expected, ulps=4000):
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=ulps * 2.3e-16 * (1 + np.abs(expected).max())
    )


def run(algorithm, rounds=30, local_steps=5, lr=0.2, metrics=(), **more):
    """A run without metrics, which would be half of what is compiled."""
    asked = {"rounds": rounds, "local_steps": local_steps, "lr": lr, "metrics": metrics}
    return fs.simulate(algorithm, PROBLEM, **asked, **EXACT, **more)
