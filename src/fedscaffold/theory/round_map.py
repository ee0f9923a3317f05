"""The affine map of one noiseless round with all clients, by differentiating its code.

On quadratics f_c(x) = x'A_c x / 2 - b_c'x a round is affine in the state X, which is x alone for a
method without memory, (x, c) where only the server has one, and (x, c, c_1 .. c_N) for one with
control variates:

    X+ = M X + v

`round_map` runs the engine's own round and pushes a basis through it in forward mode, so M and v
are those of the code that simulations run: any algorithm has one. Where a coin decides the number
of local steps (Scaffnew) it is the expected map, summed over all numbers that matter: that of the
mean state. Its cost grows with the number of local steps; `quadratics.py` has closed forms, free of
that cost, for every algorithm that declares the `Form` of SCAFFOLD or FedAvg.

On the states with c = mean c_i, where every correct run stays, the map is one of (x, c_1 .. c_N).
Off them it conserves c - mean c_i, that is, it has the eigenvalue 1 with multiplicity d (I15), so
rates are taken on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm, Form, scaffold
from fedscaffold.algorithms.round import exchange
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.problems.quadratic import loss as quadratic_loss
from fedscaffold.problems.regression import SquaredLoss
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.program import prepare
from fedscaffold.simulation.rounds import rounds
from fedscaffold.simulation.spec import Draws, Federation, Spec, State
from fedscaffold.theory.declared_form import has_declared_form

__all__ = [
    "AffineMap",
    "Form",
    "a_problem",
    "client_quadratics",
    "closed_form",
    "form_of",
    "is_quadratic",
    "round_map",
]

SCAFFOLD = scaffold()


class AffineMap(NamedTuple):
    """X+ = matrix X + offset, for X = (x), (x, c), or (x, c, c_1 .. c_N) with memory.

    A method that keeps more has more in X: all fields of the server's record, then the tables of
    the clients' memories, then of what they keep for themselves.
    """

    def __repr__(self) -> str:
        return brief(self)

    matrix: Floats
    offset: Floats
    num_clients: int
    dim: int
    memory: bool
    means: tuple[tuple[int, int], ...] = ()
    """Where c begins in X, and where the c_i do, for each field of the server's that is a mean over
    clients."""

    def __call__(self, state: Floats) -> Floats:
        """Return the state one round later."""
        after: Floats = self.matrix @ state + self.offset
        return after

    def invariant(self) -> tuple[Floats, Floats]:
        """Return matrix and offset of (x, c_1 .. c_N), on the states with c = mean c_i."""
        kept, whole = self._means()
        return self.matrix[kept] @ whole, self.offset[kept]

    def _means(self) -> tuple[NDArray[np.bool_], Floats]:
        """Return the mask of free entries, and the matrix that completes them to a state.

        The completed state has c = mean c_i.
        """
        d, whole = self.dim, np.eye(len(self.offset))
        kept = np.ones(len(whole), bool)
        for field, table in self.means:
            kept[field : field + d] = False
            tables = slice(table, table + self.num_clients * d)
            whole[field : field + d, tables] = (
                np.tile(np.eye(d), self.num_clients) / self.num_clients
            )
        return kept, whole[:, kept]

    def spectral_radius(self) -> float:
        """Return the largest |eigenvalue| on the states with c = mean c_i.

        The error shrinks by this factor per round.
        """
        return float(np.abs(np.linalg.eigvals(self.invariant()[0])).max())

    def fixed_point(self) -> Floats:
        """Return the fixed point with c = mean c_i, in the full order (x, c, c_1 .. c_N)."""
        matrix, offset = self.invariant()
        at: Floats = np.linalg.solve(np.eye(len(offset)) - matrix, offset)
        rest: Floats = self._means()[1] @ at
        return rest


def round_map(
    problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD
) -> AffineMap:
    """Differentiate one noiseless round of `algorithm`, all clients taking part with equal weight.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> one = round_map(problem, lr=0.2, local_steps=4)
    >>> one.fixed_point()[[0, 2, 3]].round(12), round(one.spectral_radius() ** 2, 10)
    (array([ 0.4, -0.6,  0.6]), 0.3177239083)
    """
    client_quadratics(problem)
    if exchange(algorithm).sums:
        raise InputError(
            f"{algorithm.name} sums over coordinates, so its rounds need not be affine: it has no "
            "matrix"
        )
    config = RunConfig(
        algorithm,
        problem,
        rounds=1,
        local_steps=local_steps,
        lr=lr,
        metrics=(),
        precision="float64",
    )
    with jax.enable_x64(True):
        ready = prepare(config)
        if any(np.ndim(value) == 0 for value in ready.start.server):
            raise InputError(
                f"{algorithm.name} counts its rounds, which are not all the same map: it has no "
                "matrix"
            )
        federation = ready.federation._replace(noise=None)
        somewhere = np.cos(np.arange(1, _size(ready.start) + 1))
        parts: list[tuple[Floats, ...]] = []
        for chance, draws in _outcomes(ready.spec, ready.drawer.draw(0, 0, 1, 1)):
            one = _differentiated(ready.spec, federation, draws, ready.start, somewhere)
            parts.append(tuple(chance * np.array(part) for part in one))
    offset, matrix, there = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
    memory = ready.start.memory is not None
    found = AffineMap(
        matrix, offset, problem.num_clients, problem.dim, memory, _places(algorithm, ready.start)
    )
    if not np.allclose(there, found(somewhere), rtol=1e-9, atol=1e-9 * (1 + np.abs(there).max())):
        raise InputError(
            f"a round of {algorithm.name} is not affine on quadratics: it has no matrix"
        )
    return found


def _outcomes(spec: Spec, draws: Draws) -> Iterator[tuple[float, Draws]]:
    """Yield each number of local steps, as draws, with its probability if above 1e-17."""
    if spec.mean_steps is None:
        yield 1.0, draws
        return
    tails = 1 - 1 / spec.mean_steps
    most = 1 if tails == 0 else math.ceil(math.log(1e-17) / math.log(tails))
    for steps in range(1, most + 1):
        yield (
            tails ** (steps - 1) / spec.mean_steps,
            draws._replace(steps=np.array([steps], np.int32)),
        )


def _vectors(state: State) -> list[Any]:
    """Return the arrays of a state: of the server, the memories and the private records."""
    return [
        vector
        for record in (state.server, state.memory, state.own)
        if record is not None
        for vector in record
    ]


def _places(algorithm: Algorithm, start: State) -> tuple[tuple[int, int], ...]:
    """Return the offsets of each pair of `means` in the stacked state."""
    records = (start.server, *(() if start.memory is None else (start.memory,)))
    names = [name for record in records for name in record._fields]
    starts = np.cumsum([0, *(np.size(a) for a in _vectors(start))]).tolist()
    first = len(start.server)
    return tuple(
        (starts[names.index(field)], starts[names.index(of, first)])
        for field, of in algorithm.means
    )


def _size(start: State) -> int:
    return sum(np.size(a) for a in _vectors(start))


@partial(jax.jit, static_argnums=0)
def _differentiated(
    spec: Spec, federation: Federation, draws: Draws, start: State, somewhere: Any
) -> Any:
    """Return the round at X = 0, its Jacobian, and the round at another X, by one program.

    The program consists of loops, so it is differentiated in forward mode.
    """
    one = partial(_round, spec, federation, draws, start)

    def value_twice(stacked: Any) -> tuple[Any, Any]:
        value = one(stacked)
        return value, value

    matrix, offset = jax.jacfwd(value_twice, has_aux=True)(jnp.zeros(_size(start)))
    return offset, matrix, one(somewhere)


@partial(jax.jit, static_argnums=0)
def _round(spec: Spec, federation: Federation, draws: Draws, start: State, stacked: Any) -> Any:
    """Evaluate the engine's round as a function of the stacked state."""
    given = _vectors(start)
    ends = np.cumsum([np.size(a) for a in given])
    parts = [
        part.reshape(np.shape(a))
        for part, a in zip(jnp.split(stacked, ends[:-1]), given, strict=True)
    ]
    left = iter(parts)
    records = (start.server, start.memory, start.own)
    server, memory, own = (
        None if like is None else type(like)(*islice(left, len(like))) for like in records
    )
    mean = tuple(getattr(server, field) for field, _ in spec.algorithm.means)
    state = start._replace(server=server, memory=memory, own=own, mean=mean)
    after, _ = rounds(spec, federation, state, draws, jnp.int32(1), jnp.int32(1))
    return jnp.concatenate([jnp.ravel(a) for a in _vectors(after)])


def a_problem(problem: object) -> Problem:
    """Return the problem, or raise if it is not a `Problem`.

    >>> a_problem("digits")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: problem must be a Problem, got str
    """
    if not isinstance(problem, Problem):
        raise InputError(f"problem must be a Problem, got {type(problem).__name__}")
    return problem


def is_quadratic(problem: Problem) -> bool:
    """Return whether every client's loss is a known quadratic.

    These are `fs.problems.quadratic` and its variants, and `linear`.

    >>> import fedscaffold as fs
    >>> is_quadratic(fs.problems.quadratic(num_clients=2, dim=3))
    True
    """
    problem = a_problem(problem)
    return problem.functions.loss is quadratic_loss or isinstance(
        problem.functions.loss, SquaredLoss
    )


def client_quadratics(problem: Problem) -> tuple[Floats, Floats]:
    """Return A (N, d, d) and b (N, d) of the clients' losses x'A_c x / 2 - b_c'x.

    >>> import fedscaffold as fs
    >>> hessians, linear = client_quadratics(fs.problems.lower_bound_pair(mu=1.0, big_g=3.0))
    >>> hessians.ravel(), linear.ravel()
    (array([2., 0.]), array([-3.,  3.]))
    """
    if not is_quadratic(problem):
        known = "fs.problems.quadratic, dialled, lower_bound_pair or linear"
        raise InputError(
            f"exact rounds need a problem made of quadratics ({known}), got {problem.name}"
        )
    loss: Any = problem.functions.loss
    first, second = (np.asarray(a, np.float64) for a in problem.records)
    if loss is quadratic_loss:
        count = problem.counts[:, None].astype(np.float64)
        starts = problem.offsets[:-1]
        return np.add.reduceat(first, starts) / count[..., None], np.add.reduceat(
            second, starts
        ) / count
    clients = [slice(*ends) for ends in zip(problem.offsets[:-1], problem.offsets[1:], strict=True)]
    l2 = loss.l2 * np.eye(problem.dim)
    hessians = [first[rows].T @ first[rows] / len(first[rows]) + l2 for rows in clients]
    return np.stack(hessians), np.stack(
        [first[rows].T @ second[rows] / len(first[rows]) for rows in clients]
    )


def form_of(algorithm: Algorithm) -> Form | None:
    """Return the form that an algorithm declares; None if no closed form is known.

    Raises:
        InputError: The algorithm's functions do not have the form that it declares.

    >>> import fedscaffold as fs
    >>> form_of(fs.scaffold(server_lr=0.5))
    Form(memory=True, at_x=False, drag=0.0, server_lr=0.5, one_step=False)
    >>> form_of(fs.fedprox(mu=0.3)).drag
    0.3
    """
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fs.scaffold(), got {algorithm!r}")
    if algorithm.form is not None and not has_declared_form(algorithm):
        raise InputError(
            f"{algorithm.name} declares a form that its functions do not have; declare none, with "
            "algorithm._replace(form=None), or the right one"
        )
    return algorithm.form


def closed_form(algorithm: Algorithm) -> Form:
    """Return the form that an algorithm declares; raise InputError if it declares none."""
    form = form_of(algorithm)
    if form is None:
        raise InputError(f"{algorithm.name} has no closed form here: simulate it")
    return form
