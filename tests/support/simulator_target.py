"""The simulator as a target of the suite: the compiled engine, stepped one round at a time.

The compiled program calls the case for gradients, so that the suite records every evaluation. A client whose reply is
lost is left out of the cohort; a restart rebuilds the state from its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np
import optax

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.conformance.case import Case, Trace, Unsupported, offers
from fedscaffold.privacy import records
from fedscaffold.problems import Problem
from fedscaffold.simulation.simulator import Simulator
from fedscaffold.simulation.spec import State

__all__ = ["run"]

_running: list[Case] = []  # the case whose gradients the compiled program asks for


@offers("tensors", "clipping", "private optimiser", "private noise")
def run(case: Case) -> Trace:
    """Run a case in the simulator.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]], [[0.25]]], [[1.0], [-0.5]], [0.0], rounds=1, steps=4, lr=0.2)
    >>> run(case).x.round(8).tolist()
    [[0.0], [0.10970625]]
    """
    if case.clip is not None:
        raise Unsupported("clipping before the correction: the gradient is the problem's")
    if case.private and not case.noise:
        raise Unsupported("a private optimiser without noise")
    simulator = Simulator(
        _algorithm(case),
        _private_problem(case) if case.private else _problem(case),
        rounds=case.rounds,
        local_steps=case.local_steps,
        cohorts=[case.heard(r) for r in range(case.rounds)],
        weights=case.weights,
        metrics=(),
        precision=case.precision,
        block=1,
        privacy=records(clip=1.0, noise=case.noise, delta=0.5) if case.private else None,
        **_optimizer(case.lr, case.momentum, case.clip_corrected),
    )
    _running[:] = [case]
    with _precision_of_all_threads(case.precision):
        states = [simulator.init()]
        for done in range(case.rounds):
            state, _ = simulator.step(_restored(states[-1]) if done == case.restart else states[-1])
            states.append(state)
    return Trace(
        np.stack([np.asarray(s.server.x) for s in states]),
        np.stack([np.asarray(s.server.c) for s in states]),
        np.stack([np.asarray(s.memory.c_i) for s in states]),
    )


@contextmanager
def _precision_of_all_threads(precision: str) -> Iterator[None]:
    """Set the precision of threads that JAX may run callbacks on; `jax.enable_x64` sets that of the caller's alone."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", precision == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _ask(i: Any, y: Any) -> Any:
    """Return the gradient of client i at y, of the case that is being run."""
    case = _running[0]
    return case.split(case.gradient(int(i), case.join(y)))


def _gradient(y: Any, batch: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in y]
    return jax.experimental.io_callback(_ask, shapes, batch[0], y)


def _loss(y: Any, batch: Any) -> Any:
    return sum((tensor**2).sum() for tensor in y)


def _problem(case: Case) -> Problem:
    """Return the case as a problem. All have the same functions: those of equal shapes share a program."""
    clients = [np.array([i]) for i in range(case.num_clients)]
    return Problem(
        _loss, case.split(case.x0), clients, gradient=_gradient, coupled=False, name="case"
    )


def _private_problem(case: Case) -> Problem:
    """Clients of one record, whose gradient the mechanism clips and noises."""
    clients = [(case.hessians[i][None], case.linear[i][None]) for i in range(case.num_clients)]

    def loss(y: Any, batch: Any) -> Any:
        hessians, linear = batch
        return jax.numpy.mean(0.5 * (hessians @ y) @ y - linear @ y)

    return Problem(loss, case.x0, clients, coupled=False, name="case")


def _algorithm(case: Case) -> Algorithm:
    whole = scaffold(option=case.option, server_lr=case.server_lr)
    if not case.frozen:
        return whole
    return whole._replace(
        remember=lambda memory, shift, message: memory, update=fedavg(case.server_lr).update
    )


@cache
def _optimizer(
    lr: tuple[float, ...], momentum: float, clip_corrected: float | None
) -> dict[str, Any]:
    """Return the local optimizer as arguments; the same for equal settings, as programs are."""
    constant = len(set(lr)) == 1
    if momentum or clip_corrected is not None:
        step: Any = lr[0] if constant else lambda k: jax.numpy.asarray(lr)[k]
        sgd = optax.sgd(step, momentum=momentum or None)
        clip = () if clip_corrected is None else (optax.clip_by_global_norm(clip_corrected),)
        return {"local_optimizer": optax.chain(*clip, sgd)}
    return {"lr": lr[0] if constant else lambda k: lr[k]}


def _restored(state: State) -> State:
    """Return the state rebuilt from its bytes."""

    def reread(a: Any) -> Any:
        written = np.asarray(a)
        return np.frombuffer(written.tobytes(), written.dtype).reshape(written.shape)

    restored: State = jax.tree.map(reread, state)
    return restored
