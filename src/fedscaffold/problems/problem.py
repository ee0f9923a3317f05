"""Federated problems: minimise sum p_i f_i(x), f_i the mean loss over the records of client i.

A problem is a loss on a model and a batch of records, an initial model, and every client's records.
The records of all clients are concatenated in flat arrays; `offsets` holds the start of each
client, so clients may have any number of records and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold import checks
from fedscaffold.brief import brief
from fedscaffold.checks import InputError, taken_by_name
from fedscaffold.model_functions import refuse_state
from fedscaffold.precision import narrowed
from fedscaffold.problems.batches import NO_LOSS, Functions, Kinds, no_loss
from fedscaffold.problems.function_kinds import inspect_functions
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.records import (
    counted,
    joined,
    model,
    reals,
    refuse_non_finite,
)

__all__ = ["Facts", "Functions", "Problem", "no_loss", "weights_of"]

Tree: TypeAlias = Any
Floats: TypeAlias = NDArray[Any]  # of float64


class Facts(NamedTuple):
    """Closed-form facts of a problem; None if unknown."""

    def __repr__(self) -> str:
        return brief(self)

    mu: float | None = None
    """Strong convexity: the smallest eigenvalue of any client's Hessian."""
    smoothness: float | None = None
    """L: the largest eigenvalue of any client's Hessian."""
    optimum: Callable[[Floats], Floats] | None = None
    """(weights) -> the minimiser of sum p_i f_i; the zero of the mean oracle where there is no
    loss."""
    client_losses: Callable[[Floats], Floats] | None = None
    """(x) -> the N exact client losses at x."""
    client_gradients: Callable[[Floats], Floats] | None = None
    """(x) -> the N exact client gradients at x, one a row."""
    noise_covariance: Callable[[Floats, int | None], Floats] | None = None
    """(x, batch_size) -> covariance of the stochastic gradient at x, one (d, d) per client."""
    population: tuple[Floats, Floats] | None = None
    """A (N, d, d) and b (N, d) of the mean oracles A_i x - b_i over the distributions of the
    clients' records."""


class Problem:
    """A federated problem: a loss, an initial model, and every client's records.

    The objective f_i of client i is the loss over its records. `loss(params, batch)` is usually a
    mean over the batch's records, but may couple them in any way (Cox, contrastive losses, batch
    normalisation, AUC for `accuracy`). Coupled functions are detected before the first run and are
    never called with padded batches.

    Args:
        loss: `loss(params, batch)`, one number, for any JAX pytree `params`. It may take `weights`
            by name (one number per record, summing to 1, zero for padding) and `key` (a random key
            in training, None in evaluation). None if the problem has only a `gradient`.
        params: Initial model.
        clients: One pytree of arrays per client (an array, a tuple `(x, y)`, a dict ...). All
            leaves of a client have the same number of rows.
        test: Test batch, for `accuracy`.
        accuracy: `accuracy(params, batch)`, the fraction of records predicted correctly or another
            score; may take `weights`.
        gradient: `gradient(params, batch)`, used instead of the gradient of the loss.
        noise: Covariance of Gaussian noise added to gradients: a variance, one matrix, or one
            matrix per client.
        facts: Facts known in closed form.
        name: Name of the problem in messages.
        coupled: Whether the functions couple the records of a batch. None: detect it; False: they
            are means over records; True: always evaluate them on unpadded batches.
        evaluation_batch: Number of records on which a coupled function is evaluated at a time.
            None: all records of a client, or all test data. Means over records do not depend on it.
        state: Arrays that the loss updates and gradients do not train, such as running statistics.
            A loss that takes `state` by name returns a pair, its value and the new state;
            `accuracy` may take it too. A function that takes `train` by name is called with True in
            training and False in evaluation.

    Raises:
        InputError: An argument is invalid; the message names it.

    >>> import numpy as np
    >>> import fedscaffold as fs
    >>> def loss(params, batch):
    ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
    >>> rng = np.random.default_rng(0)
    >>> clients = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in (5, 8)]
    >>> problem = fs.Problem(loss, {"w": np.zeros(3)}, clients)
    >>> problem.num_clients, problem.dim, problem.counts.tolist()
    (2, 3, [5, 8])
    """

    def __init__(
        self,
        loss: Callable[..., Any] | None,
        params: Tree,
        clients: Sequence[Tree],
        *,
        test: Tree | None = None,
        accuracy: Callable[..., Any] | None = None,
        gradient: Callable[..., Tree] | None = None,
        noise: ArrayLike | None = None,
        facts: Facts | None = None,
        name: str = "problem",
        coupled: bool | None = None,
        evaluation_batch: int | None = None,
        state: Tree | None = None,
    ) -> None:
        counts = counted(clients)
        if loss is None and gradient is None:
            raise InputError(
                "a problem needs a loss, or a gradient for an oracle that comes from none; got "
                "neither"
            )
        self.functions = Functions(no_loss if loss is None else loss, accuracy, gradient)
        for called, function in (("loss", loss), ("accuracy", accuracy), ("gradient", gradient)):
            if function is not None:
                taken_by_name(function, called)
        if coupled not in (None, True, False):
            raise InputError(f"coupled must be True, False or None, got {coupled!r}")
        self.coupled = coupled
        whole = evaluation_batch is None
        self.evaluation_batch = (
            None if whole else checks.whole("evaluation_batch", evaluation_batch)
        )
        self.state = None if state is None else jax.tree.map(np.asarray, state)
        given = {name: one for name, one in self.functions._asdict().items() if one is not None}
        refuse_state(given, self.functions.stateful, self.state, "Problem")
        refuse_non_finite("state", self.state)
        self.params = model(params)
        self.layout = Layout.of(self.params)
        refuse_non_finite("params", self.params)
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)])
        self.records = joined(clients)
        refuse_non_finite("the clients' data", self.records)
        self.test = None if test is None else jax.tree.map(np.asarray, test)
        refuse_non_finite("the test data", self.test)
        self.noise = None if noise is None else _noise_factor(noise, len(clients), self.dim)
        self.facts = facts or Facts()
        self.name = name
        self._device: dict[str, Any] = {}

    def __repr__(self) -> str:
        size = f"{self.num_clients} clients, {self.offsets[-1]} records, d = {self.dim}"
        return f"Problem({self.name}, {size})"

    @cached_property
    def kinds(self) -> Kinds:
        """Kinds of the problem's functions, found by inspecting them on first use.

        Raises:
            InputError: An array of the parameters holds batch statistics.
        """
        return inspect_functions(self)

    def with_clients(self, clients: Sequence[Tree]) -> Problem:
        """Return a problem with the same functions and model on other clients' records.

        The functions are not inspected anew.

        Args:
            clients: As for `Problem`.

        Returns:
            A problem without test data, facts or noise.
        """
        loss, gradient = (
            self.functions.loss if self.functions.has_loss else None,
            self.functions.gradient,
        )
        size, state = self.evaluation_batch, self.state
        made = Problem(
            loss, self.params, clients, gradient=gradient, evaluation_batch=size, state=state
        )
        made.kinds = self.kinds
        return made

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    @property
    def dim(self) -> int:
        """Number of parameters d of the model."""
        return self.layout.size

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of records of each client."""
        return np.diff(self.offsets)

    @property
    def mu(self) -> float | None:
        """Strong convexity constant of the clients' losses; None if unknown."""
        return self.facts.mu

    @property
    def smoothness(self) -> float | None:
        """Smoothness constant L of the clients' losses; None if unknown."""
        return self.facts.smoothness

    def optimum(self, weights: str | ArrayLike = "equal") -> Floats:
        """Return the minimiser of sum p_i f_i as a flat vector.

        >>> import fedscaffold as fs
        >>> fs.problems.quadratic(hessians=[[[1.0]], [[3.0]]], linear=[[1.0], [-2.0]]).optimum()
        array([-0.25])
        """
        if self.facts.optimum is None:
            raise InputError(
                f"the optimum of {self.name} is not known in closed form; watch 'loss' or "
                "'grad_norm' instead"
            )
        return self.facts.optimum(weights_of(self, weights))

    def ideal_controls(self, weights: str | ArrayLike = "equal") -> Floats:
        """Return the (N, d) fixed point of SCAFFOLD's c_i.

        Every client's gradient at the optimum.
        """
        optimum = self.optimum(weights)
        assert self.facts.client_gradients is not None, (
            "a problem that knows its optimum knows its gradients"
        )
        return self.facts.client_gradients(optimum)

    def optimal_loss(self, weights: str | ArrayLike = "equal") -> float:
        """Return f(x*)."""
        optimum = self.optimum(weights)
        if not self.functions.has_loss:
            raise InputError(NO_LOSS.format(self.name))
        assert self.facts.client_losses is not None, (
            "a problem that knows its optimum knows its losses"
        )
        return float(weights_of(self, weights) @ self.facts.client_losses(optimum))

    def on_device(self, dtype: str) -> tuple[Tree, Tree]:
        """Return records and test data as device arrays of a run in this precision, cached."""
        if dtype not in self._device:
            held = jax.tree.map(
                lambda array: narrowed("the records", array, dtype), (self.records, self.test)
            )
            self._device[dtype] = jax.device_put(held, may_alias=False)
        device: tuple[Tree, Tree] = self._device[dtype]
        return device


def weights_of(problem: Problem, weights: str | ArrayLike) -> Floats:
    """Return the clients' weights p_i, summing to 1, from "equal", "records", or N numbers.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=2, seed=0)
    >>> weights_of(problem, [1, 1, 2, 0])
    array([0.25, 0.25, 0.5 , 0.  ])
    """
    if isinstance(weights, str):
        if weights not in ("equal", "records"):
            raise InputError(
                f"weights must be 'equal', 'records' or one number per client, got {weights!r}"
            )
        shares = (
            np.ones(problem.num_clients)
            if weights == "equal"
            else problem.counts.astype(np.float64)
        )
    else:
        shares = reals("weights", weights)
        if shares.shape != (problem.num_clients,):
            raise InputError(
                f"weights must be one number for each of the {problem.num_clients} clients, got "
                f"shape {shares.shape}"
            )
        if not np.isfinite(shares).all() or (shares < 0).any() or not shares.any():
            raise InputError("weights must be finite, not negative, and not all zero")
        with np.errstate(over="ignore"):
            shares = shares / (shares.max() if np.isinf(shares.sum()) else 1.0)
    normalised: Floats = shares / shares.sum()
    return normalised


def _noise_factor(noise: ArrayLike, num_clients: int, dim: int) -> Floats:
    """Return the square root of the noise covariance: a scalar, (1, d, d), or (N, d, d)."""
    covariance = reals("noise", noise)
    if not np.isfinite(covariance).all():
        raise InputError("noise must be finite")
    if covariance.ndim == 0:
        if covariance < 0:
            raise InputError(
                f"noise is a variance and must be a number of at least 0, got {float(covariance)}"
            )
        deviation: Floats = np.sqrt(covariance)
        return deviation
    if covariance.shape not in ((dim, dim), (num_clients, dim, dim)):
        raise InputError(
            f"noise must be a variance, one ({dim}, {dim}) covariance, or ({num_clients}, {dim}, "
            f"{dim}), "
            f"got shape {covariance.shape}"
        )
    stacked = covariance.reshape(-1, dim, dim)
    values, vectors = np.linalg.eigh(stacked)
    level = 1e-10 * np.abs(values).max()
    if (values < -level).any() or np.abs(stacked - np.swapaxes(stacked, 1, 2)).max() > level:
        raise InputError("noise must be a covariance: symmetric without negative eigenvalues")
    root: Floats = (vectors * np.sqrt(np.maximum(values, 0))[:, None, :]) @ np.swapaxes(
        vectors, 1, 2
    )
    return root
