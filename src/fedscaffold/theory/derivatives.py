"""Derivatives of the clients' losses in double precision, and the minimum of their mean.

    gradients    grad f_i(x)                              client_gradients
    Hessians     H_i v = d/dt grad f_i(x + t v)           client_products, client_hessians, solve
    thirds       T_i[u, v] = d/ds H_i(x + s u) v          client_thirds
    noise        C_i = Cov of a minibatch gradient        noise_covariance, noise_level

H_i is the Hessian of f_i and T_i its third derivative, a bilinear map; those of f = sum p_i f_i are
the weighted sums of the rows. All are forward derivatives of the problem's own gradient, for any
tree of parameters. Clients may hold unequal numbers of records: each is padded to the largest with
records of weight zero, so that one compiled program serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.batches import Functions, Kinds, gradient, record_values
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Floats, Problem, weights_of

__all__ = [
    "client_gradients",
    "client_hessians",
    "client_products",
    "client_thirds",
    "find_optimum",
    "noise_covariance",
    "noise_level",
    "solve",
]

Array: TypeAlias = Any  # a jax.Array inside the programs

# largest d, and largest N d^2, for which the clients' (d, d) matrices are formed
DENSE, NUMBERS = 1000, 60_000_000
# records, and record gradients, at once: small clients are run several at a time
ROWS, FLOATS = 1024, 20_000_000
SOLVED = 1e-11  # |grad f| at an optimum, relative to the clients' gradients at the start


def client_gradients(problem: Problem, x: ArrayLike) -> Floats:
    """Return the rows grad f_i(x); `x` is one point for all clients, or one a row.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> client_gradients(lower_bound_pair(mu=1.0, big_g=3.0), [0.5]).ravel()
    array([ 4., -3.])
    """
    return _run("gradient", problem, x)


def client_products(problem: Problem, x: ArrayLike, v: ArrayLike) -> Floats:
    """Return the rows H_i v_i; `v` is one vector for all clients, or one a row.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> client_products(lower_bound_pair(mu=1.0), [0.5], [10.0]).ravel()
    array([20.,  0.])
    """
    return _run("product", problem, x, v)


def client_thirds(problem: Problem, x: ArrayLike, u: ArrayLike, v: ArrayLike) -> Floats:
    """Return the rows T_i[u_i, v_i]; `u` and `v` are one vector for all clients, or one a row.

    >>> cubic = Problem(lambda x, batch: (batch * x**3).mean(), np.zeros(1), [np.ones((4, 1))])
    >>> client_thirds(cubic, [7.0], [1.0], [2.0])
    array([[12.]])
    """
    return _run("third", problem, x, u, v)


def client_hessians(problem: Problem, x: ArrayLike) -> Floats:
    """Return the Hessians H_i as matrices (N, d, d), for small d only.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> client_hessians(lower_bound_pair(mu=1.0), [0.5]).ravel()
    array([2., 0.])
    """
    _refuse_large(problem)
    rows = _run("hessian", problem, x)
    symmetric: Floats = (rows + np.swapaxes(rows, 1, 2)) / 2
    return symmetric


def noise_covariance(
    problem: Problem, x: ArrayLike, batch_size: float | int | None = None
) -> Floats:
    """Return (N, d, d) C_i = V_i / batch_size + additive noise.

    V_i is the covariance of one record's gradient.

    A batch is drawn with replacement, as `simulate` draws those of local steps: a number of
    records, a share (float) of the client's own, or None for all of them, which have no sampling
    noise.

    >>> from fedscaffold.problems import quadratic
    >>> noise_covariance(quadratic(num_clients=1, dim=1, noise=0.25), [0.0])
    array([[[0.25]]])
    """
    _refuse_large(problem)
    covariance = np.zeros((problem.num_clients, problem.dim, problem.dim))
    sizes = batch_sizes(problem, batch_size)
    if sizes is not None:
        covariance += _run("covariance", problem, x) / sizes[:, None, None]
    if problem.noise is not None:
        root = problem.noise * np.eye(problem.dim) if problem.noise.ndim == 0 else problem.noise
        covariance += root @ np.swapaxes(root, -1, -2)
    return covariance


def noise_level(problem: Problem, x: ArrayLike, batch_size: float | int | None = None) -> Floats:
    """Return tr C_i = E |g_i(x) - grad f_i(x)|^2 of each client, without forming C_i.

    >>> from fedscaffold.problems import quadratic
    >>> noise_level(quadratic(num_clients=2, dim=3, noise=0.25), np.zeros(3))
    array([0.75, 0.75])
    """
    level = np.zeros(problem.num_clients)
    sizes = batch_sizes(problem, batch_size)
    if sizes is not None:
        level += _run("variance", problem, x) / sizes
    if problem.noise is not None:
        root = problem.noise
        level += problem.dim * root**2 if root.ndim == 0 else np.square(root).sum(axis=(1, 2))
    return level


def solve(
    problem: Problem,
    x: ArrayLike,
    b: Floats,
    p: Floats,
    damping: float = 0.0,
    relative: float = 1e-8,
) -> Floats:
    """Return (H + damping I)^-1 b, H = sum p_i H_i, by conjugate gradients.

    The residual is at most `relative` |b|.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> solve(lower_bound_pair(mu=2.0), [0.0], np.ones(1), np.array([0.5, 0.5]))
    array([0.5])
    """
    found, left = np.zeros(problem.dim), b
    along, square, largest = left, float(left @ left), 0.0
    goal = relative**2 * square
    for _ in range(min(1000, 5 * problem.dim)):
        if square <= goal:
            break
        curved = p @ client_products(problem, x, along) + damping * along
        curvature = along @ curved / (along @ along)
        largest = max(largest, float(np.linalg.norm(curved) / np.linalg.norm(along)))
        if curvature < -1e-6 * largest:
            raise InputError(
                f"{problem.name} is not convex: its Hessian has a negative eigenvalue, so no one "
                "optimum"
            )
        if curvature < 1e-14 * largest:  # what is left of b lies where H is flat
            break
        rate = square / (along @ curved)
        found, left = found + rate * along, left - rate * curved
        before, square = square, float(left @ left)
        along = left + (square / before) * along
    return found


def find_optimum(problem: Problem, weights: str | ArrayLike = "equal") -> Floats:
    """Return x* = argmin sum p_i f_i: the known one, or by Newton's method.

    Newton's steps are found by conjugate gradients.

    It ends where |grad f| is `SOLVED` times the clients' gradients at the start and Newton's
    step is negligible, and refuses a problem that shows negative curvature on the way or whose loss
    falls for ever.

    >>> from fedscaffold.problems import logistic
    >>> clients = [(np.array([[1.0], [-1.0], [2.0]]), np.array([1, 0, 0]))]
    >>> known = logistic(clients, l2=0.1)
    >>> best = find_optimum(Problem(known.functions.loss, np.zeros(1), clients))
    >>> bool(abs(best - known.optimum())[0] < 1e-9)
    True
    """
    p = weights_of(problem, weights)
    if problem.facts.optimum is not None:
        return problem.facts.optimum(p)
    x = problem.layout.flatten(problem.params)
    rows = client_gradients(problem, x)
    gradient, scale = p @ rows, max(float(np.sqrt(p @ np.square(rows).sum(axis=1))), 1e-300)
    for _ in range(50):
        left = float(np.linalg.norm(gradient)) / scale
        step = solve(problem, x, -gradient, p, relative=min(0.1, np.sqrt(left)))
        stride = np.linalg.norm(step) / (1 + np.linalg.norm(x))
        if left <= SOLVED and stride <= 1e-6:
            return x
        if left <= 1e-5 and stride > 0.05:  # a vanishing slope and yet far to go
            break
        length = 1.0
        while True:  # |grad f| falls along Newton's step, once that is short enough
            gradient = p @ client_gradients(problem, x + length * step)
            if np.linalg.norm(gradient) <= (1 - 1e-4 * length) * left * scale or length < 1e-8:
                break
            length /= 2
        x = x + length * step
    raise InputError(
        f"no minimum of {problem.name} was found: its loss may fall for ever; add l2, or give its "
        "optimum"
    )


def _refuse_large(problem: Problem) -> None:
    if problem.dim > DENSE or problem.num_clients * problem.dim**2 > NUMBERS:
        size = f"N = {problem.num_clients}, d = {problem.dim}"
        raise InputError(
            f"exact matrices need d of at most {DENSE} and N d^2 of at most {NUMBERS}, got {size}"
        )


def batch_sizes(problem: Problem, batch_size: float | int | None) -> Floats | None:
    """Return the batch size of each client as `simulate` takes it; None for full batches."""
    if problem.state is not None:
        raise InputError(
            f"the loss of {problem.name} updates a state, which the theory does not know"
        )
    if problem.functions.random:
        raise InputError(
            f"the loss of {problem.name} takes a random key, whose noise the theory does not "
            "know: give it a loss without one, such as lambda params, batch: loss(params, batch, "
            "key=None)"
        )
    if batch_size is None or (isinstance(batch_size, float) and batch_size == 1):
        return None
    if isinstance(batch_size, float):
        if not 0 < batch_size < 1:
            raise InputError(
                "batch_size must be a share in (0, 1], a number of records, or None, got "
                f"{batch_size}"
            )
        return np.asarray(np.maximum(np.ceil(batch_size * problem.counts - 1e-9), 1), np.float64)
    return np.full(problem.num_clients, float(checks.whole("batch_size", batch_size)))


class _Shape(NamedTuple):
    """Static arguments of a compiled program, besides its task."""

    functions: Functions
    kinds: Kinds
    layout: Layout
    rows: int
    ragged: bool
    sizes: tuple[int, ...]
    """Numbers of records of the clients if each needs its own branch; else empty."""


class _Client(NamedTuple):
    slope: Callable[[Array], Array]
    """x -> grad f_i(x)."""
    spread: Callable[[Array], Array]
    """x -> the gradients of its records as rows, minus their mean."""
    shares: Array
    """Weights of its records: 1 / n_i, zero for the padding."""


def _along(slope: Callable[[Array], Array], v: Array) -> Callable[[Array], Array]:
    return lambda x: jax.jvp(slope, (x,), (v,))[1]


_mapped = partial(jax.lax.map, batch_size=32)
TASKS: dict[str, Callable[..., Array]] = {
    "gradient": lambda i, x: i.slope(x),
    "product": lambda i, x, v: _along(i.slope, v)(x),
    "third": lambda i, x, u, v: _along(_along(i.slope, u), v)(x),
    "hessian": lambda i, x: _mapped(lambda v: _along(i.slope, v)(x), jnp.eye(len(x))),
    "covariance": lambda i, x: (i.shares[:, None] * i.spread(x)).T @ i.spread(x),
    "variance": lambda i, x: i.shares @ jnp.square(i.spread(x)).sum(axis=1),
}


def _run(task: str, problem: Problem, *vectors: ArrayLike) -> Floats:
    """Run a task for every client and stack the results.

    Vectors are one for all clients, or one per row.
    """
    if task != "gradient" and not problem.functions.has_loss:
        raise InputError(
            f"{problem.name} has an oracle but no loss: it has no Hessians, so this theory does "
            "not apply"
        )
    n, d, counts = problem.num_clients, problem.dim, problem.counts
    arrays = [np.asarray(v, np.float64) for v in vectors]
    for a in arrays:
        if a.shape[-1:] != (d,) or (a.ndim > 1 and len(a) != n) or not np.isfinite(a).all():
            raise InputError(
                f"x and vectors must be {d} finite numbers, or {n} rows of them, got shape "
                f"{a.shape}"
            )
    rows = [np.broadcast_to(a, (n, d)) if a.ndim == 1 else a for a in arrays]
    kinds = problem.kinds
    if task in ("covariance", "variance") and kinds.gradient != "mean":
        raise InputError(
            f"{problem.name} couples the records of a batch, so the noise of its batches is not "
            "that of single records: only full batches (batch_size=None) can be predicted"
        )
    ragged = bool((counts != counts[0]).any())
    sizes = tuple(np.unique(counts).tolist()) if ragged and kinds.gradient == "coupled" else ()
    shape = _Shape(problem.functions, kinds, problem.layout, int(counts.max()), ragged, sizes)
    with jax.enable_x64(True):
        own = (problem.offsets[:-1], counts, *rows)
        return np.array(_program(task, shape, problem.on_device("float64")[0], own), np.float64)


@partial(jax.jit, static_argnums=(0, 1))
def _program(task: str, shape: _Shape, records: Any, own: tuple[Array, ...]) -> Array:
    together = min(len(own[0]), ROWS // shape.rows, FLOATS // (shape.rows * shape.layout.size))
    together = 1 if shape.sizes else together  # side by side, every client would run every branch
    return jax.lax.map(
        lambda a: TASKS[task](_client(shape, records, *a[:2]), *a[2:]),
        own,
        batch_size=max(1, together),
    )


def _client(shape: _Shape, records: Any, first: Array, count: Array) -> _Client:
    place = jnp.arange(shape.rows)
    batch = jax.tree.map(
        lambda a: a.at[first + jnp.minimum(place, count - 1)].get(mode="promise_in_bounds"), records
    )
    shares = jnp.where(place < count, 1 / count, 0.0)

    def flat(x: Array, batch: Any, weights: Array | None = None) -> Array:
        tree = gradient(
            shape.functions, shape.kinds, shape.layout.unflatten(x), batch, weights, shape.sizes
        )
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])

    def slope(x: Array) -> Array:
        return flat(x, batch, shares if shape.ragged else None)

    def spread(x: Array) -> Array:
        g = record_values(flat, x, batch)
        return g - shares @ g

    return _Client(slope, spread, shares)
