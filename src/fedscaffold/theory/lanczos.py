"""Lanczos' method for several symmetric operators at once, with full reorthogonalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedscaffold.problems.problem import Floats

__all__ = ["Chain", "lanczos", "lanczos_chain"]


class Chain(NamedTuple):
    """Lanczos' three-term recurrences for k operators at once."""

    diagonal: Floats
    """(k, steps)."""
    beside: Floats
    """(k, steps); the last is what is left over."""
    basis: Floats
    """(k, steps, d), orthonormal rows."""

    def tridiagonal(self, i: int) -> tuple[Floats, Floats, float]:
        """Return Ritz values and vectors of the i-th operator, and its residual coefficient."""
        a, b = self.diagonal[i], self.beside[i]
        short = np.flatnonzero(b <= 1e-10 * np.abs(a).max())
        # an invariant subspace was found: what follows is rounding
        m = int(short[0]) + 1 if len(short) else len(a)
        values, vectors = np.linalg.eigh(
            np.diag(a[:m]) + np.diag(b[: m - 1], 1) + np.diag(b[: m - 1], -1)
        )
        return values, vectors, float(b[m - 1])


def lanczos_chain(apply: Callable[[Floats], Floats], start: Floats, steps: int) -> Chain:
    """Run Lanczos' method for k symmetric operators at once, from the k rows `start`.

    `apply` maps rows to their products.

    >>> chain = lanczos_chain(lambda v: v * np.array([1.0, 3.0]), np.ones((1, 2)), 2)
    >>> chain.tridiagonal(0)[0].round(9)
    array([1., 3.])
    """
    count = min(steps, start.shape[1])
    basis = np.empty((len(start), count + 1, start.shape[1]))
    basis[:, 0] = start / np.maximum(np.linalg.norm(start, axis=1, keepdims=True), 1e-300)
    diagonal, beside = [], []
    for j in range(count):
        w, known = apply(basis[:, j]), basis[:, : j + 1]
        diagonal.append((w * basis[:, j]).sum(axis=1))
        for _ in range(2):  # full reorthogonalisation: without it eigenvalues appear twice
            w = w - np.matmul(np.matmul(w[:, None], np.swapaxes(known, 1, 2)), known)[:, 0]
        beside.append(np.linalg.norm(w, axis=1))
        basis[:, j + 1] = w / np.maximum(beside[-1], 1e-300)[:, None]
    return Chain(np.transpose(diagonal), np.transpose(beside), basis[:, :count])


def lanczos(
    apply: Callable[[Floats], Floats], size: tuple[int, int], steps: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return extreme eigenvalues of k symmetric operators, and bounds on their errors.

    The results are the k smallest, the k largest, and the residuals of both.

    `apply` maps k vectors (k, d), one for each operator, to their k products. All in step is what
    SciPy's `eigsh` does not offer: a product with every client's Hessian costs no more than one
    with their mean.

    >>> rng = np.random.default_rng(0)
    >>> low, high, *_ = lanczos(lambda v: v * np.array([1.0, 2.0, 5.0]), (1, 3), 3, rng)
    >>> low.round(9), high.round(9)
    (array([1.]), array([5.]))
    """
    chain = lanczos_chain(apply, rng.normal(size=size), steps)
    ends = []
    for i in range(size[0]):
        values, vectors, out = chain.tridiagonal(i)
        ends.append((values[0], values[-1], *(out * np.abs(vectors[-1, [0, -1]]))))
    low, high, low_error, high_error = np.transpose(ends)
    return low, high, low_error, high_error
