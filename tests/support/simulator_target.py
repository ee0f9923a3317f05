"""The simulator as a target of the suite: the compiled engine, stepped one round at a time.

The compiled program calls the case for gradients, so that the suite records every evaluation. A client whose reply is
lost is left out of the cohort; a restart rebuilds the state from its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import optax

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.conformance.case import Case, Trace, Unsupported, offers
from fedscaffold.problems import Problem
from fedscaffold.simulation.simulator import Simulator
from fedscaffold.simulation.spec import State

__all__ = ["run"]


@offers("tensors", "clipping")
def run(case: Case) -> Trace:
    """Run a case in the simulator.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]], [[0.25]]], [[1.0], [-0.5]], [0.0], rounds=1, steps=4, lr=0.2)
    >>> run(case).x.round(8).tolist()
    [[0.0], [0.10970625]]
    """
    if case.clip is not None:
        raise Unsupported("clipping before the correction: the gradient is the problem's")
    simulator = Simulator(
        _algorithm(case),
        _problem(case),
        rounds=case.rounds,
        local_steps=case.local_steps,
        cohorts=[case.heard(r) for r in range(case.rounds)],
        weights=case.weights,
        metrics=(),
        precision=case.precision,
        block=1,
        **_optimizer(case),
    )
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


def _problem(case: Case) -> Problem:
    clients = [np.array([i]) for i in range(case.num_clients)]

    def ask(i: Any, y: Any) -> Any:
        return case.split(case.gradient(int(i), case.join(y)))

    def gradient(y: Any, batch: Any) -> Any:
        shapes = [
            jax.ShapeDtypeStruct(tensor.shape, case.precision) for tensor in case.split(case.x0)
        ]
        return jax.experimental.io_callback(ask, shapes, batch[0], y)

    def loss(y: Any, batch: Any) -> Any:
        return sum((tensor**2).sum() for tensor in y)

    return Problem(
        loss, case.split(case.x0), clients, gradient=gradient, coupled=False, name="case"
    )


def _algorithm(case: Case) -> Algorithm:
    whole = scaffold(option=case.option, server_lr=case.server_lr)
    if not case.frozen:
        return whole
    return whole._replace(
        remember=lambda memory, shift, message: memory, update=fedavg(case.server_lr).update
    )


def _optimizer(case: Case) -> dict[str, Any]:
    constant = len(set(case.lr)) == 1
    if case.momentum or case.clip_corrected is not None:
        lr: Any = case.lr[0] if constant else lambda k: jax.numpy.asarray(case.lr)[k]
        sgd = optax.sgd(lr, momentum=case.momentum or None)
        clip = (
            () if case.clip_corrected is None else (optax.clip_by_global_norm(case.clip_corrected),)
        )
        return {"local_optimizer": optax.chain(*clip, sgd)}
    return {"lr": case.lr[0] if constant else lambda k: case.lr[k]}


def _restored(state: State) -> State:
    """Return the state rebuilt from its bytes."""

    def reread(a: Any) -> Any:
        written = np.asarray(a)
        return np.frombuffer(written.tobytes(), written.dtype).reshape(written.shape)

    restored: State = jax.tree.map(reread, state)
    return restored
