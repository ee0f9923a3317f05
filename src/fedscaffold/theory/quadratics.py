"""One round on quadratics in closed form (F1-F4, F7): any number of local steps at the cost of one.

For f_c(x) = x'A_c x / 2 - b_c'x let Gamma_c = I - gamma A_c and

    Upsilon_c = Gamma_c^H                                  what H local steps leave of the start
    M_c = gamma sum_{h<H} Gamma_c^h                        what they make of a constant push
    B_c = I - M_c / (gamma H)                              by how much that falls behind gamma H

All are functions of A_c, so one eigendecomposition A_c = V_c diag(a) V_c' of each client gives them
for every step size and every H. With u = theta - theta*, v_c = xi_c - xi_c*, xi_c = c - c_c and r_c
= gamma H v_c, sum r_c = 0, a noiseless round of SCAFFOLD with all clients is (F1, F4)

    z_c = Upsilon_c u + B_c r_c
    u+ = mean z_c,    r_c+ = z_c - mean z_c

so |u+|^2 + mean |r_c+|^2 = mean |z_c|^2: this is F3, the norm on the left being the Lambda-norm. A
server step eta_g makes it u+ = u + eta_g (mean z_c - u), option I makes it r_c+ = gamma H (mean A_i
- A_c) u, FedAvg has r_c = 0. FedProx, with a pull mu towards x, is FedAvg with Gamma_c = I - gamma
(A_c + mu) and Upsilon_c = Gamma_c^H + mu M_c; in all cases I - Upsilon_c = A_c M_c.

Symbols: gamma = lr, H = local_steps, eta_g = server_lr, theta = x, N = num_clients; E = (V_1 ..
V_N), a (d, N d) matrix with E E' = N I, takes the clients' own coordinates to the common ones.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.round_map import Form, client_quadratics

__all__ = [
    "LinearRound",
    "Overflows",
    "Spectra",
    "geometric",
    "lag",
    "linear_round",
    "power",
    "spectra",
    "to_xi",
]

LARGEST = 1e100  # a client that grows by more in a round diverges, and its squares would overflow
SERIES = 24  # terms of the power series of `lag` where |w| H <= 1: the last is below 1e-24


class Overflows(InputError):
    """Raised for a step size with which a single client overflows within a round."""


class _Spectra(NamedTuple):
    values: Floats
    """(N, d) eigenvalues a of A_c, rising."""
    vectors: Floats
    """(N, d, d) eigenvectors of A_c, in columns."""
    linear: Floats
    """(N, d) b_c."""


class Spectra(_Spectra):
    """Eigenvalues and eigenvectors of every client's Hessian, and the linear terms."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.values)

    @property
    def dim(self) -> int:
        """The number of coordinates of the model, d."""
        return int(self.values.shape[1])

    @cached_property
    def basis(self) -> Floats:
        """E (d, N d): all eigenvectors side by side."""
        return np.ascontiguousarray(np.swapaxes(self.vectors, 0, 1).reshape(self.dim, -1))

    def mean(self, function: Floats) -> Floats:
        """Mean over clients of f(A_c), given the values f(a)."""
        basis = self.basis
        product: Floats = (basis * (function.ravel() / self.num_clients)) @ basis.T
        return product

    @cached_property
    def optimum(self) -> Floats:
        """theta*, the minimiser of the mean loss."""
        mean = self.mean(self.values)
        smallest = np.linalg.eigvalsh(mean)[0]
        if smallest <= 1e-14 * np.abs(self.values).max():
            raise InputError(
                "the mean of the hessians is not positive definite: there is no single optimum"
            )
        best: Floats = np.linalg.solve(mean, self.linear.mean(axis=0))
        return best

    @cached_property
    def xi(self) -> Floats:
        """(N d,) xi_c* = -grad f_c(theta*), in the clients' own coordinates."""
        basis = self.basis
        turned = np.einsum("cji,cj->ci", self.vectors, self.linear).ravel()
        star = turned - self.values.ravel() * (self.optimum @ basis)
        # their sum is zero but for the rounding errors of theta*, which would never leave a run of
        # the map
        centred: Floats = star - (basis @ star / self.num_clients) @ basis
        return centred


def spectra(problem: Problem) -> Spectra:
    """Decompose every client's Hessian, once for all step sizes and numbers of local steps.

    >>> import fedscaffold as fs
    >>> spectra(fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])).optimum
    array([0.4])
    """
    hessians, linear = client_quadratics(problem)
    values, vectors = np.linalg.eigh(hessians)
    return Spectra(values, vectors, linear)


def power(w: Floats, count: int | NDArray[np.int64]) -> Floats:
    """Return (1 - w)^H to full precision, for w of any size and sign.

    >>> power(np.array([0.0, 1e-9, 1.0, 1.5]), 3)
    array([ 1.   ,  1.   ,  0.   , -0.125])
    """
    # 1 - w rounds, and the power would magnify its error H times; log1p sees w itself, and w - 2
    # has no error
    with np.errstate(divide="ignore", over="ignore"):
        magnitude: Floats = np.exp(count * np.log1p(np.where(w < 1, -w, w - 2)))
    return np.where((w > 1) & (count % 2 == 1), -magnitude, magnitude)


def geometric(w: Floats, count: int | NDArray[np.int64]) -> Floats:
    """Return sum_{h<H} (1 - w)^h = (1 - (1 - w)^H) / w to full precision; H where w = 0.

    >>> geometric(np.array([0.0, 0.5, 2.0]), 3)
    array([3.  , 1.75, 1.  ])
    """
    safe = np.where(w == 0, 1, w)
    with np.errstate(over="ignore"):
        near = -np.expm1(count * np.log1p(-np.where(w < 0.5, w, 0)))
    total: Floats = np.where(w < 0.5, near, 1 - power(w, count)) / safe
    return np.where(w == 0, count, total)


def lag(w: Floats, count: int) -> Floats:
    """Return 1 - sum_{h<H} (1 - w)^h / H to full precision, the eigenvalues of B_c.

    They are 0 where w = 0 or H = 1.

    >>> lag(np.array([0.0, 1e-12, 0.5]), 3)
    array([0.00000000e+00, 1.00000000e-12, 4.16666667e-01])
    """
    # where it is small, by its power series sum_k (-1)^(k+1) C(H, k+1) w^k / H
    small = np.where(np.abs(w) * count <= 1, w, 0)
    term = (count - 1) / 2 * small
    series = term
    for k in range(1, SERIES):
        term = -term * (count - k - 1) / (k + 2) * small
        series = series + term
    return np.where(np.abs(w) * count <= 1, series, 1 - geometric(w, count) / count)


class LinearRound(NamedTuple):
    """A round as a linear map of (u, r), for k states at once.

    u is (d, k), and r is (N d, k) in the clients' own coordinates.

    The vectors of N d numbers hold one number for each eigenvalue a of each client.
    """

    basis: Floats
    """E."""
    upsilon: Floats
    """(N d,) of Upsilon_c."""
    lost: Floats
    """(N d,) of I - Upsilon_c, to full precision."""
    lag: Floats
    """(N d,) of B_c."""
    turn: Floats
    """(N d,) r_c+ <- u: Upsilon_c, or -gamma H A_c for option I; 0 without memory."""
    keep: Floats
    """(N d,) r_c+ <- r_c: B_c, or 0."""
    leak: Floats
    """(N d,) of I - keep, to full precision."""
    travel: float
    """gamma H."""
    steps: int
    rates: Floats
    """(N, d) w = gamma (a + mu): what one local step takes away."""
    form: Form

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.rates)

    @property
    def squared_norm_bound(self) -> float:
        """F8': max u_a^2 + v_a^2, the contraction of option II in the squared Lambda-norm.

        It holds for eta_g = 1.
        """
        return float((self.upsilon**2 + self.lag**2).max())

    def forward(self, u: Floats, r: Floats) -> tuple[Floats, Floats]:
        """Apply one round (F4) to r that sum to zero over clients."""
        start = self.basis.T @ u
        ends = _times(self.upsilon, start) + _times(self.lag, r)
        z = self.basis @ ends / self.num_clients
        x = u + self.form.server_lr * (z - u)
        if not self.form.memory:
            return x, np.zeros_like(r)
        if not self.form.at_x:  # option II: r is what the ends differ from their mean by
            return x, ends - self.basis.T @ z
        return x, self.centred(_times(self.turn, start) + _times(self.keep, r))

    def backward(self, u: Floats, r: Floats) -> tuple[Floats, Floats]:
        """Apply the transpose of `forward` to r that sum to zero over clients."""
        p = self.basis.T @ u * (self.form.server_lr / self.num_clients)
        back = self.basis @ (_times(self.upsilon, p) + _times(self.turn, r))
        return (1 - self.form.server_lr) * u + back, self.centred(
            _times(self.lag, p) + _times(self.keep, r)
        )

    def mean(self, function: Floats) -> Floats:
        """Return the mean over clients of f(A_c), given the values f(a)."""
        product: Floats = (self.basis * (function / self.num_clients)) @ self.basis.T
        return product

    def centred(self, r: Floats) -> Floats:
        """Subtract the mean over clients."""
        off: Floats = r - self.basis.T @ (self.basis @ r / self.num_clients)
        return off

    def matrix(self) -> Floats:
        """Return the map of the stacked (u, r) as a matrix.

        It sends to 0 what does not sum to zero over clients.
        """
        d, n = self.basis.shape
        u, r = self.forward(np.eye(d, d + n), self.centred(np.eye(n, d + n, d)))
        return np.concatenate([u, r])


def linear_round(spectra: Spectra, form: Form, *, lr: float, local_steps: int) -> LinearRound:
    """Return the closed form of one round (F1-F4, F7) for the spectra of a problem.

    >>> import fedscaffold as fs
    >>> from fedscaffold.theory.round_map import form_of
    >>> pair = spectra(fs.problems.lower_bound_pair())  # A = (2, 0)
    >>> linear_round(pair, form_of(fs.scaffold()), lr=0.1, local_steps=2).upsilon.round(12)
    array([0.64, 1.  ])
    """
    gamma = checks.number("lr", lr, above=0)
    steps = checks.whole("local_steps", local_steps)
    steps = 1 if form.one_step else steps
    a = spectra.values.ravel()
    w = gamma * (a + form.drag)
    left = power(w, steps)
    if not (np.abs(left) <= LARGEST).all():
        raise Overflows(
            f"lr {gamma:g} with {steps} local steps overflows: a client alone diverges; keep lr "
            "below 2/L"
        )
    total = geometric(w, steps)
    upsilon = left + form.drag * gamma * total
    behind = lag(w, steps)
    none, whole = np.zeros_like(a), np.ones_like(a)
    turn, keep, leak = (upsilon, behind, total / steps) if form.memory else (none, none, whole)
    if form.memory and form.at_x:
        turn, keep, leak = -gamma * steps * a, none, whole
    rates = w.reshape(spectra.values.shape)
    lost = gamma * a * total
    return LinearRound(
        spectra.basis, upsilon, lost, behind, turn, keep, leak, gamma * steps, steps, rates, form
    )


def to_xi(spectra: Spectra, stacked: Floats, travel: float) -> Floats:
    """Convert rows (u, r) to rows (u, v_c = V_c r_c / travel).

    r is in the clients' own coordinates.
    """
    d = spectra.dim
    r = stacked[d:].reshape(spectra.num_clients, d, -1)
    v = np.matmul(spectra.vectors, r).reshape(len(stacked) - d, -1) / travel
    return np.concatenate([stacked[:d], v])


def _times(diagonal: Floats, columns: Floats) -> Floats:
    """Return diag(diagonal) @ columns."""
    product: Floats = diagonal[:, None] * columns
    return product
