"""Quadratics f_i(x) = x'A_i x / 2 - b_i'x with given heterogeneity.

All facts are known in closed form.

quadratic         given matrices, or the random family of the quadratics paper: A_i = U_i D_i U_i',
                  mu <= D_i <= L
dialled           given gradient and Hessian dissimilarity; the mean problem depends on neither
lower_bound_pair  the two clients of the SCAFFOLD paper's Theorem II: f_1 = mu x^2 + G x, f_2 = -G x
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Facts, Floats, Problem
from fedscaffold.problems.records import reals

__all__ = ["dialled", "lower_bound_pair", "quadratic"]


def loss(x: Any, batch: Any) -> Any:
    """Mean over the batch of x'Ax/2 - b'x; a client is one record (A_i, b_i)."""
    hessian, linear = batch
    return jnp.mean(0.5 * jnp.einsum("i,nij,j->n", x, hessian, x) - linear @ x)


def gradient(x: Any, batch: Any) -> Any:
    """Mean over the batch of Ax - b."""
    hessian, linear = batch
    return jnp.mean(hessian @ x - linear, axis=0)


def quadratic(
    num_clients: int = 10,
    dim: int = 20,
    *,
    mu: float = 0.01,
    smoothness: float = 1.0,
    hessians: ArrayLike | None = None,
    linear: ArrayLike | None = None,
    noise: ArrayLike | None = None,
    x0: ArrayLike | None = None,
    seed: int = 0,
) -> Problem:
    """Quadratics from given A (N, d, d) and b (N, d), or the random family of the quadratics paper.

    The family: A_i = U_i D_i U_i' with U_i a random rotation and D_i drawn from `dim` log-spaced
    values between `mu` and `smoothness` (the two ends always present in client 0), b_i standard
    Gaussian. `noise` adds Gaussian noise to
    every gradient: a variance, one (d, d) covariance, or one per client.

    >>> problem = quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> problem.optimum(), problem.ideal_controls().ravel(), problem.mu, problem.smoothness
    (array([0.4]), array([-0.6,  0.6]), 0.25, 1.0)
    """
    if (hessians is None) != (linear is None):
        raise InputError(
            "hessians and linear go together: give both, or neither for the random family"
        )
    if hessians is None or linear is None:
        a, b = _random_family(num_clients, dim, mu, smoothness, seed)
    else:
        a, b = reals("hessians", hessians), reals("linear", linear)
    return _problem(a, b, noise, x0, "quadratic")


def dialled(
    num_clients: int = 10,
    dim: int = 20,
    *,
    gradient_dissimilarity: float = 1.0,
    hessian_dissimilarity: float = 0.0,
    mu: float = 0.1,
    smoothness: float = 1.0,
    noise: ArrayLike | None = None,
    x0: ArrayLike | None = None,
    seed: int = 0,
) -> Problem:
    """Make quadratics with a given dissimilarity of clients, and a mean that does not depend on it.

    The mean has eigenvalues from `mu` to `smoothness`. At the optimum the root mean square of the
    clients' gradients is G = `gradient_dissimilarity`; the largest ||A_i - A|| is delta =
    `hessian_dissimilarity`. delta above mu would make clients non-convex and is refused.

    >>> problem = dialled(5, 3, gradient_dissimilarity=2.0, hessian_dissimilarity=0.05, seed=1)
    >>> float(np.sqrt((problem.ideal_controls() ** 2).sum(axis=1).mean()).round(12))
    2.0
    """
    checks.whole("num_clients", num_clients, at_least=2)
    checks.whole("dim", dim)
    mu = checks.number("mu", mu, above=0)
    smoothness = checks.number("smoothness", smoothness, at_least=mu)
    checks.fits(f"{num_clients} quadratics of dim {dim}", 3 * 8 * num_clients * dim**2)
    big_g = checks.number("gradient_dissimilarity", gradient_dissimilarity, at_least=0)
    delta = checks.number("hessian_dissimilarity", hessian_dissimilarity, at_least=0)
    if delta > mu:
        raise InputError(
            f"hessian_dissimilarity must be at most mu = {mu} to keep every client convex, got "
            f"{delta}"
        )
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    mean = _rotated(rng, np.geomspace(mu, smoothness, dim))
    tilt = rng.normal(size=(num_clients, dim, dim))
    tilt = tilt + np.swapaxes(tilt, 1, 2)
    tilt -= tilt.mean(axis=0)
    tilt *= delta / np.abs(np.linalg.eigvalsh(tilt)).max()
    optimum = rng.normal(size=dim)
    pull = rng.normal(size=(num_clients, dim))
    pull -= pull.mean(axis=0)
    pull *= big_g / np.sqrt((pull**2).sum(axis=1).mean())
    hessians = mean + tilt
    return _problem(hessians, hessians @ optimum - pull, noise, x0, "dialled quadratic")


def lower_bound_pair(
    mu: float = 1.0, big_g: float = 1.0, *, x0: float = 1.0, noise: ArrayLike | None = None
) -> Problem:
    """The pair of the FedAvg lower bound (SCAFFOLD paper, Theorem II).

    f_1 = mu x^2 + G x and f_2 = -G x.

    Its mean is mu x^2 / 2 with minimiser 0; f_1 is 2 mu-smooth, and f_2 is not strongly convex, so
    mu is 0 here.

    >>> lower_bound_pair(mu=1.0, big_g=3.0).ideal_controls().ravel()
    array([ 3., -3.])
    """
    hessians = np.array([[[2.0 * checks.number("mu", mu, above=0)]], [[0.0]]])
    pull = checks.number("big_g", big_g)
    return _problem(
        hessians, np.array([[-pull], [pull]]), noise, [checks.number("x0", x0)], "lower-bound pair"
    )


def _random_family(
    num_clients: int, dim: int, mu: float, smoothness: float, seed: int
) -> tuple[Floats, Floats]:
    checks.whole("num_clients", num_clients)
    checks.whole("dim", dim)
    checks.number("mu", mu, above=0)
    checks.number("smoothness", smoothness, at_least=mu)
    checks.fits(f"{num_clients} quadratics of dim {dim}", 3 * 8 * num_clients * dim**2)
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    grid = np.geomspace(mu, smoothness, dim)
    spectra = rng.choice(grid, size=(num_clients, dim))
    spectra[0, 0], spectra[0, -1] = grid[0], grid[-1]
    hessians = np.stack([_rotated(rng, spectrum) for spectrum in spectra])
    return hessians, rng.normal(size=(num_clients, dim))


def _rotated(rng: np.random.Generator, spectrum: Floats) -> Floats:
    rotation, _ = np.linalg.qr(rng.normal(size=(len(spectrum), len(spectrum))))
    product: Floats = (rotation * spectrum) @ rotation.T
    return (product + product.T) / 2


def _problem(
    a: Floats, b: Floats, noise: ArrayLike | None, x0: ArrayLike | None, name: str
) -> Problem:
    if a.ndim != 3 or a.shape[1] != a.shape[2] or b.shape != a.shape[:2]:
        raise InputError(
            f"hessians must have shape (N, d, d) and linear (N, d), got {a.shape} and {b.shape}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("hessians and linear must be finite, got NaN or infinite values")
    if not np.allclose(a, np.swapaxes(a, 1, 2), rtol=1e-10, atol=1e-10):
        raise InputError("hessians must be symmetric matrices")
    start = np.zeros(b.shape[1]) if x0 is None else reals("x0", x0)
    if start.shape != b.shape[1:]:
        raise InputError(f"x0 must have shape {b.shape[1:]}, got {start.shape}")
    clients = list(zip(a[:, None], b[:, None], strict=True))
    noise = None if noise is None else reals("noise", noise)
    if noise is not None and noise.ndim == 0 and noise == 0:
        # or normal numbers would be drawn for every step, which cost more than the rest of it
        noise = None
    about: dict[str, Any] = {"noise": noise, "facts": _facts(a, b, noise), "coupled": False}
    return Problem(loss, start, clients, gradient=gradient, **about, name=name)


def _facts(a: Floats, b: Floats, noise: ArrayLike | None) -> Facts:
    eigenvalues = np.linalg.eigvalsh(a)

    def optimum(p: Floats) -> Floats:
        mean = np.tensordot(p, a, 1)
        if np.linalg.eigvalsh(mean)[0] <= 0:
            raise InputError(
                "the weighted mean of the hessians is not positive definite: there is no single "
                "optimum"
            )
        best: Floats = np.linalg.solve(mean, p @ b)
        return best

    def client_losses(x: Floats) -> Floats:
        values: Floats = 0.5 * (a @ x) @ x - b @ x
        return values

    def client_gradients(x: Floats) -> Floats:
        rows: Floats = a @ x - b
        return rows

    def noise_covariance(x: Floats, batch_size: int | None) -> Floats:
        given = np.zeros(()) if noise is None else np.asarray(noise, np.float64)
        return np.broadcast_to(given * np.eye(a.shape[1]) if given.ndim == 0 else given, a.shape)

    return Facts(
        float(eigenvalues.min()),
        float(eigenvalues.max()),
        optimum,
        client_losses,
        client_gradients,
        noise_covariance,
    )
