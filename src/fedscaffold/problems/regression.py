"""Linear and logistic regression with l2.

D weights, no intercept, optimum known to machine precision.

    linear      f_i(w) = |X_i w - y_i|^2 / (2 n_i) + l2 |w|^2 / 2
    logistic    f_i(w) = mean log(1 + exp(-s_j x_j'w)) + l2 |w|^2 / 2,   s_j = 2 y_j - 1

`two_datasets` is the heterogeneous construction of the stochastic analysis: one data set is shared
out among the first half of the clients, another, from a different model, among the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Facts, Floats, Problem
from fedscaffold.problems.records import tables

__all__ = ["linear", "logistic", "two_datasets"]

Client = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class SquaredLoss:
    """Half the mean squared error, plus l2/2 |w|^2."""

    l2: float

    def __call__(self, w: Any, batch: Any) -> Any:
        """(w, (x, y)) -> loss."""
        x, y = batch
        error = x @ w - y
        return 0.5 * jnp.mean(error * error) + 0.5 * self.l2 * (w @ w)


@dataclass(frozen=True)
class LogisticLoss:
    """Mean logistic loss with labels 0 and 1, plus l2/2 |w|^2."""

    l2: float

    def __call__(self, w: Any, batch: Any) -> Any:
        """(w, (x, y)) -> loss."""
        x, y = batch
        return jnp.mean(log_loss(x @ w, y)) + 0.5 * self.l2 * (w @ w)


def log_loss(score: Any, y: Any) -> Any:
    """Logistic loss of each score, whose label y is 0 or 1."""
    return _softplus(score) - y * score


@jax.custom_jvp
def _softplus(score: Any) -> Any:
    return jax.nn.softplus(score)


# jax.nn.softplus is differentiated by its value, whose logarithm takes ten times as long
_softplus.defjvps(lambda along, value, score: along * jax.nn.sigmoid(score))


def right_side(w: Any, batch: Any) -> Any:
    """(w, (x, y)) -> share of records on the right side of the plane."""
    x, y = batch
    return jnp.mean((x @ w > 0) == (y > 0.5), dtype=w.dtype)


def linear(clients: Sequence[Client], *, l2: float = 0.01, test: Client | None = None) -> Problem:
    """Linear regression with l2 on clients that hold x (n, d) and y (n,).

    >>> problem = linear([(np.eye(2), np.array([1.0, 2.0]))], l2=0.0)
    >>> problem.optimum()
    array([1., 2.])
    """
    l2 = checks.number("l2", l2, at_least=0)
    clients = tables(clients)
    dim = _dim(clients)
    grams = [x.T @ x / len(x) for x in _features(clients)]
    crosses = np.stack(
        [
            x.T @ np.asarray(y, np.float64) / len(x)
            for x, (_, y) in zip(_features(clients), clients, strict=True)
        ]
    )
    hessians = np.stack(grams) + l2 * np.eye(dim)
    squares = np.array([np.mean(np.square(np.asarray(y, np.float64))) for _, y in clients])
    eigenvalues = np.linalg.eigvalsh(hessians)
    facts = Facts(
        float(eigenvalues.min()),
        float(eigenvalues.max()),
        lambda p: np.linalg.solve(np.tensordot(p, hessians, 1), p @ crosses),
        lambda w: 0.5 * (hessians @ w) @ w - crosses @ w + 0.5 * squares,
        lambda w: hessians @ w - crosses,
        lambda w, batch_size: _noise(clients, lambda x, y: (x @ w - y)[:, None] * x, batch_size),
    )
    about: dict[str, Any] = {"test": test, "facts": facts, "coupled": False}
    return Problem(
        SquaredLoss(l2), np.zeros(dim), _typed(clients), **about, name="linear regression"
    )


def logistic(clients: Sequence[Client], *, l2: float = 0.01, test: Client | None = None) -> Problem:
    """Logistic regression with l2 on clients that hold x (n, d) and labels y (n,) in {0, 1}.

    The optimum is found by Newton's method in double precision. L is the bound |x|^2 / 4 + l2 on
    the Hessian's largest eigenvalue, mu is l2.

    >>> problem = logistic([(np.array([[1.0], [1.0], [-1.0]]), np.array([1, 0, 0]))], l2=0.1)
    >>> float(np.abs(problem.ideal_controls()).max()) < 1e-12
    True
    """
    l2 = checks.number("l2", l2, at_least=0)
    clients = tables(clients)
    dim = _dim(clients)
    if not all(np.isin(y, (0, 1)).all() for _, y in clients):
        raise InputError("labels must be 0 or 1")
    half = np.concatenate([[0], np.cumsum([len(x) for x, _ in clients])])
    xs, ys = (
        np.concatenate(_features(clients)),
        np.concatenate([np.asarray(y, np.float64) for _, y in clients]),
    )
    largest = max(np.linalg.eigvalsh(x.T @ x / len(x))[-1] for x in _features(clients))

    def client_mean(rows: Floats) -> Floats:
        sums = np.add.reduceat(rows, half[:-1], axis=0)
        return sums / np.diff(half).reshape(-1, *[1] * (rows.ndim - 1))

    def gradients(w: Floats) -> Floats:
        return client_mean((_sigmoid(xs @ w) - ys)[:, None] * xs) + l2 * w

    def losses(w: Floats) -> Floats:
        score = xs @ w
        return client_mean(np.logaddexp(0, score) - ys * score) + 0.5 * l2 * (w @ w)

    def optimum(p: Floats) -> Floats:
        share = np.repeat(p / np.diff(half), np.diff(half))
        return _newton(xs, ys, share, l2)

    facts = Facts(
        l2 if l2 > 0 else None,
        float(largest / 4 + l2),
        optimum if l2 > 0 else None,
        losses,
        gradients,
        lambda w, batch_size: _noise(
            clients, lambda x, y: (_sigmoid(x @ w) - y)[:, None] * x, batch_size
        ),
    )
    about: dict[str, Any] = {"test": test, "accuracy": right_side, "facts": facts, "coupled": False}
    return Problem(
        LogisticLoss(l2), np.zeros(dim), _typed(clients), **about, name="logistic regression"
    )


def two_datasets(
    kind: str,
    num_clients: int,
    *,
    records: int = 200,
    dim: int = 20,
    l2: float = 0.01,
    seed: int = 0,
) -> Problem:
    """The heterogeneous clients of the stochastic analysis (its Figure 1).

    Two scikit-learn data sets of `dim` features with different seeds (2 and 10 informative features
    for regression); the first is shared out evenly among the first half of the clients, the second
    among the rest. Responses of the regression are divided by 100, as their scale is not given in
    the paper. Another `num_clients` is another data set: for nested populations make the largest
    one and take clients of it.

    >>> two_datasets("logistic", 4, records=10)
    Problem(logistic regression, 4 clients, 40 records, d = 20)
    """
    from sklearn.datasets import make_classification, make_regression

    checks.choice("kind", kind, ("linear", "logistic"))
    checks.whole("num_clients", num_clients, at_least=2)
    checks.whole("dim", dim)
    checks.whole("seed", seed, at_least=0, at_most=2**31 - 1)
    if num_clients % 2:
        raise InputError(
            f"num_clients must be even: half of them hold each data set, got {num_clients}"
        )
    size = checks.whole("records", records) * num_clients // 2
    checks.fits(
        f"{2 * size} records of dim {dim}", 2 * 8 * 2 * size * dim + 8 * num_clients * dim**2
    )
    halves = []
    for which, informative in enumerate((2, 10)):
        if kind == "linear":
            x, y = make_regression(
                size, dim, n_informative=min(informative, dim), random_state=2 * seed + which
            )
            y = y / 100
        else:
            x, y = make_classification(size, dim, random_state=2 * seed + which)
        halves += [(x[j : j + records], y[j : j + records]) for j in range(0, size, records)]
    return (linear if kind == "linear" else logistic)(halves, l2=l2)


def _newton(x: Floats, y: Floats, share: Floats, l2: float) -> Floats:
    """Minimise the weighted logistic loss: Newton steps, halved while they do not descend."""

    def value(w: Floats) -> float:
        score = x @ w
        return float(share @ (np.logaddexp(0, score) - y * score) + 0.5 * l2 * (w @ w))

    w = np.zeros(x.shape[1])
    for _ in range(100):
        likely = _sigmoid(x @ w)
        gradient = x.T @ (share * (likely - y)) + l2 * w
        hessian = (x * (share * likely * (1 - likely))[:, None]).T @ x + l2 * np.eye(len(w))
        step = np.linalg.solve(hessian, gradient)
        length = 1.0
        while value(w - length * step) > value(w) + 1e-14 and length > 1e-8:
            length /= 2
        w = w - length * step
        if np.abs(step).max() <= 1e-15 * (1 + np.abs(w).max()):
            break
    return w


def _sigmoid(score: Floats) -> Floats:
    return np.exp(-np.logaddexp(0, -score))


def _noise(clients: Sequence[Client], record_gradients: Any, batch_size: int | None) -> Floats:
    """Covariance, by client, of the mean of `batch_size` record gradients with replacement."""
    if batch_size is None:
        return np.zeros((len(clients), _dim(clients), _dim(clients)))
    covariances = []
    for x, y in clients:
        g = record_gradients(np.asarray(x, np.float64), np.asarray(y, np.float64))
        centred = g - g.mean(axis=0)
        covariances.append(centred.T @ centred / len(centred) / batch_size)
    return np.stack(covariances)


def _dim(clients: Sequence[Client]) -> int:
    return int(np.shape(clients[0][0])[1])


def _features(clients: Sequence[Client]) -> list[Floats]:
    return [np.asarray(x, np.float64) for x, _ in clients]


def _typed(clients: Sequence[Client]) -> list[Client]:
    return [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in clients]
