"""The affine map of one noiseless round with all clients, by differentiating the algorithm's own code.

On quadratics f_c(x) = x'A_c x / 2 - b_c'x a round is affine in the state X, which is x alone for a method without
memory, (x, c) where only the server has one, and (x, c, c_1 .. c_N) for one with control variates:

    X+ = M X + v

`round_map` runs the engine's own round and pushes a basis through it in forward mode, so M and v are those of the
code that simulations run: any algorithm has one. Where a coin decides the number of local steps (Scaffnew) it is the
expected map, summed over all numbers that matter: that of the mean state. Its cost grows with the number of local
steps; `quadratics.py` has closed forms, free of that cost, for every algorithm whose own functions have the `Form` of
SCAFFOLD or FedAvg.

On the states with c = mean c_i, where every correct run stays, the map is one of (x, c_1 .. c_N). Off them it conserves
c - mean c_i, that is, it has the eigenvalue 1 with multiplicity d (I15), so rates are taken on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.algorithms import Algorithm, scaffold
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.problems.quadratic import loss as quadratic_loss
from fedscaffold.problems.regression import SquaredLoss
from fedscaffold.simulation.rounds import rounds
from fedscaffold.simulation.setup import Request, prepare
from fedscaffold.simulation.spec import Draws, Federation, Settings, Spec, State

__all__ = ["AffineMap", "Form", "a_problem", "client_quadratics", "form_of", "is_quadratic", "round_map"]

SCAFFOLD = scaffold()
PROBE = (0.7, -1.3, 0.4, 1.9)  # arguments at which a function that is linear must be what its coefficients say


class AffineMap(NamedTuple):
    """X+ = matrix X + offset, for X = (x), (x, c), or (x, c, c_1 .. c_N) where clients have a memory."""

    def __repr__(self) -> str:
        return brief(self)

    matrix: Floats
    offset: Floats
    num_clients: int
    dim: int
    memory: bool

    def __call__(self, state: Floats) -> Floats:
        """Return the state one round later."""
        after: Floats = self.matrix @ state + self.offset
        return after

    def invariant(self) -> tuple[Floats, Floats]:
        """Return matrix and offset on the states with c = mean c_i, as a map of (x, c_1 .. c_N)."""
        if not self.memory:
            return self.matrix, self.offset
        d = self.dim
        kept = np.r_[:d, 2 * d : len(self.offset)]
        mean = np.tile(np.eye(d), self.num_clients) / self.num_clients
        matrix = self.matrix[np.ix_(kept, kept)]
        matrix[:, d:] += self.matrix[kept, d : 2 * d] @ mean
        return matrix, self.offset[kept]

    def spectral_radius(self) -> float:
        """Largest |eigenvalue| on the states with c = mean c_i: the error shrinks by this factor a round."""
        return float(np.abs(np.linalg.eigvals(self.invariant()[0])).max())

    def fixed_point(self) -> Floats:
        """The state with c = mean c_i that a round does not change, in the full order (x, c, c_1 .. c_N)."""
        matrix, offset = self.invariant()
        at: Floats = np.linalg.solve(np.eye(len(offset)) - matrix, offset)
        if not self.memory:
            return at
        x, c_i = at[: self.dim], at[self.dim :]
        return np.concatenate([x, c_i.reshape(-1, self.dim).mean(axis=0), c_i])


def round_map(problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD) -> AffineMap:
    """Differentiate one noiseless round of `algorithm`, all clients taking part with equal weight.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> one = round_map(problem, lr=0.2, local_steps=4)
    >>> one.matrix.shape, one.fixed_point()[[0, 2, 3]].round(12), round(one.spectral_radius() ** 2, 10)
    ((4, 4), array([ 0.4, -0.6,  0.6]), 0.3177239083)
    """
    client_quadratics(problem)
    request = Request(algorithm, problem, 1, local_steps, lr=lr, metrics=(), precision="float64")
    with jax.enable_x64(True):
        ready = prepare(request)
        settings = Settings(ready.lr, np.zeros(2, np.uint32), np.array(np.nan))
        federation = ready.federation._replace(noise=None)
        arguments = (ready.spec, federation, settings, ready.drawer.draw(0, 0, 1, 1), ready.start)
        somewhere = np.cos(np.arange(1, _size(ready.start) + 1))
        parts: list[tuple[Floats, ...]] = []
        for chance, draws in _outcomes(ready.spec, arguments[3]):
            given = (*arguments[:3], draws, ready.start)
            one = (*_differentiated(*given), _round(*given, jnp.asarray(somewhere)))
            parts.append(tuple(chance * np.array(part) for part in one))
    offset, matrix, there = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
    found = AffineMap(matrix, offset, problem.num_clients, problem.dim, ready.start.c_i is not None)
    if not np.allclose(there, found(somewhere), rtol=1e-9, atol=1e-9 * (1 + np.abs(there).max())):
        raise InputError(f"a round of {algorithm.name} is not affine on quadratics: it has no matrix")
    return found


def _outcomes(spec: Spec, draws: Draws) -> Iterator[tuple[float, Draws]]:
    """The numbers of local steps that a coin may allow, with their chances, up to one in 1e17; or the one there is."""
    if spec.mean_steps is None:
        yield 1.0, draws
        return
    tails = 1 - 1 / spec.mean_steps
    most = 1 if tails == 0 else math.ceil(math.log(1e-17) / math.log(tails))
    for steps in range(1, most + 1):
        yield tails ** (steps - 1) / spec.mean_steps, draws._replace(steps=np.array([steps], np.int32))


def _size(start: State) -> int:
    return sum(np.size(a) for a in (start.x, start.c, start.c_i) if a is not None)


@partial(jax.jit, static_argnums=0)
def _differentiated(spec: Spec, federation: Federation, settings: Settings, draws: Draws, start: State) -> Any:
    """The round at X = 0 and its Jacobian; forward mode, as the program is made of loops."""
    one = partial(_round, spec, federation, settings, draws, start)
    origin = jnp.zeros(_size(start))
    return one(origin), jax.jacfwd(one)(origin)


@partial(jax.jit, static_argnums=0)
def _round(spec: Spec, federation: Federation, settings: Settings, draws: Draws, start: State, stacked: Any) -> Any:
    """The engine's round as a function of the stacked state."""
    d = spec.layout.size
    state = start._replace(x=stacked[:d])
    if start.c is not None:
        state = state._replace(c=stacked[d : 2 * d])
    if start.c_i is not None:
        state = state._replace(c_i=stacked[2 * d :].reshape(start.c_i.shape), mean=state.c)
    after, _ = rounds(spec, federation, settings, state, draws, jnp.int32(1), jnp.int32(1))
    return jnp.concatenate([jnp.ravel(a) for a in (after.x, after.c, after.c_i) if a is not None])


def a_problem(problem: object) -> Problem:
    """Return the problem, or refuse what is none.

    >>> a_problem("digits")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: problem must be a Problem, got str
    """
    if not isinstance(problem, Problem):
        raise InputError(f"problem must be a Problem, got {type(problem).__name__}")
    return problem


def is_quadratic(problem: Problem) -> bool:
    """Whether every client's loss is a known quadratic: `fs.problems.quadratic` and its kin, or `linear`.

    >>> import fedscaffold as fs
    >>> is_quadratic(fs.problems.quadratic(num_clients=2, dim=3))
    True
    """
    problem = a_problem(problem)
    return problem.functions.loss is quadratic_loss or isinstance(problem.functions.loss, SquaredLoss)


def client_quadratics(problem: Problem) -> tuple[Floats, Floats]:
    """Return A (N, d, d) and b (N, d) of the clients' losses x'A_c x / 2 - b_c'x.

    >>> import fedscaffold as fs
    >>> hessians, linear = client_quadratics(fs.problems.lower_bound_pair(mu=1.0, big_g=3.0))
    >>> hessians.ravel(), linear.ravel()
    (array([2., 0.]), array([-3.,  3.]))
    """
    if not is_quadratic(problem):
        known = "fs.problems.quadratic, dialled, lower_bound_pair or linear"
        raise InputError(f"exact rounds need a problem made of quadratics ({known}), got {problem.name}")
    loss: Any = problem.functions.loss
    first, second = (np.asarray(a, np.float64) for a in problem.records)
    if loss is quadratic_loss:
        count = problem.counts[:, None].astype(np.float64)
        starts = problem.offsets[:-1]
        return np.add.reduceat(first, starts) / count[..., None], np.add.reduceat(second, starts) / count
    clients = [slice(*ends) for ends in zip(problem.offsets[:-1], problem.offsets[1:], strict=True)]
    l2 = loss.l2 * np.eye(problem.dim)
    hessians = [first[rows].T @ first[rows] / len(first[rows]) + l2 for rows in clients]
    return np.stack(hessians), np.stack([first[rows].T @ second[rows] / len(first[rows]) for rows in clients])


class Form(NamedTuple):
    """What the closed forms know: SCAFFOLD, or a method without memory such as FedAvg, FedProx and SGD."""

    memory: bool
    """Clients keep c_i, as SCAFFOLD's do."""
    at_x: bool
    """What they keep is the gradient at x: option I."""
    drag: float
    """mu of FedProx: d = g + drag (y - x)."""
    server_lr: float
    one_step: bool
    """A round is one local step, whatever is asked for."""


def form_of(algorithm: Algorithm) -> Form | None:
    """Find the form of an algorithm by trying its own functions on numbers; None where no closed form is known.

    >>> import fedscaffold as fs
    >>> form_of(fs.scaffold(server_lr=0.5))
    Form(memory=True, at_x=False, drag=0.0, server_lr=0.5, one_step=False)
    >>> form_of(fs.fedprox(mu=0.3)).drag
    0.3
    """
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fs.scaffold(), got {algorithm!r}")
    if algorithm.coin:
        return None
    to_x = _linear(lambda x, c, move, d: algorithm.server(x, c, move, d, 1.0)[0], 4)
    if to_x is None or (to_x[0], to_x[1], to_x[3]) != (1, 0, 0):
        return None
    if algorithm.shift is None or algorithm.remember is None:
        memoryless = algorithm.shift is None and algorithm.remember is None
        step = _linear(lambda g, y, x: algorithm.direction(g, y, x, None), 3) if memoryless else None
        if step is None or step[0] != 1 or step[1] != -step[2]:
            return None
        return Form(False, False, step[1], -to_x[2], algorithm.one_step)
    found: tuple[Any, ...] = (
        _linear(algorithm.shift, 2),
        _linear(algorithm.direction, 4),
        _linear(algorithm.remember, 3),
        _linear(lambda x, c, move, d: algorithm.server(x, c, move, d, 1.0)[1], 4),
    )
    if found != ((1, -1), (1, 0, 0, 1), (-1, 1, 1), (0, 0, 0, 1)):
        return None
    return Form(True, algorithm.at_x, 0.0, -to_x[2], algorithm.one_step)


def _linear(function: Callable[..., Any], arguments: int) -> tuple[float, ...] | None:
    """Coefficients of a linear function of some numbers; None where it is not linear."""
    try:
        coefficients = tuple(float(function(*unit)) for unit in np.eye(arguments).tolist())
        value = float(function(*PROBE[:arguments]))
    except (TypeError, ValueError, AttributeError):  # it wants vectors: not one of the known forms
        return None
    expected = sum(k * p for k, p in zip(coefficients, PROBE, strict=False))
    return coefficients if abs(value - expected) <= 1e-12 * (1 + abs(value)) else None
