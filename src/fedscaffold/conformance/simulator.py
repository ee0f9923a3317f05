"""The simulator as a target of the suite: the compiled engine, stopped after every round to look at its state.

Gradients are asked of the case itself, from inside the compiled program, so that the suite sees every one. A reply that
is lost is a client not heard; a restart is a new start from the state's bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.conformance.case import Case, Trace, Unsupported, offers
from fedscaffold.problems import Problem
from fedscaffold.simulation.double import doubles
from fedscaffold.simulation.engine import start
from fedscaffold.simulation.run import noise_key
from fedscaffold.simulation.setup import Request, prepare
from fedscaffold.simulation.spec import Settings, State

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
    request = Request(
        _algorithm(case),
        _problem(case),
        case.rounds,
        local_steps=case.local_steps,
        cohorts=[case.heard(r) for r in range(case.rounds)],
        weights=case.weights,
        metrics=(),
        precision=case.precision,
        block=1,
        **_optimizer(case),
    )
    with jax.enable_x64(case.precision == "float64"):
        ready = prepare(request)
        settings = Settings(ready.lr, noise_key(0), np.array(np.nan, case.precision))
        engine, state = start(ready, settings, [0], 1, None)
        states = [jax.tree.map(np.array, state)]
        for done in range(case.rounds):
            if done == case.restart:
                with doubles():  # c is kept in double precision in every run
                    state = jax.device_put(_restored(states[-1]))
            state, _ = engine.advance(state, done, 1)
            states.append(jax.tree.map(np.array, state))
    return Trace(*(np.stack([getattr(s, name) for s in states]) for name in ("x", "c", "c_i")))


def _problem(case: Case) -> Problem:
    clients = [np.array([i]) for i in range(case.num_clients)]

    def ask(i: Any, y: Any) -> Any:
        return case.split(case.gradient(int(i), case.join(y)))

    def gradient(y: Any, batch: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(tensor.shape, case.precision) for tensor in case.split(case.x0)]
        return jax.experimental.io_callback(ask, shapes, batch[0], y)

    def loss(y: Any, batch: Any) -> Any:
        return sum((tensor**2).sum() for tensor in y)

    return Problem(loss, case.split(case.x0), clients, gradient=gradient, coupled=False, name="case")


def _algorithm(case: Case) -> Algorithm:
    whole = scaffold(option=case.option, server_lr=case.server_lr)
    if not case.frozen:
        return whole
    return whole._replace(remember=lambda c, c_i, d: c_i, server=fedavg(case.server_lr).server)


def _optimizer(case: Case) -> dict[str, Any]:
    constant = len(set(case.lr)) == 1
    if case.momentum or case.clip_corrected is not None:
        lr: Any = case.lr[0] if constant else lambda k: jax.numpy.asarray(case.lr)[k]
        sgd = optax.sgd(lr, momentum=case.momentum or None)
        clip = () if case.clip_corrected is None else (optax.clip_by_global_norm(case.clip_corrected),)
        return {"local_optimizer": optax.chain(*clip, sgd)}
    return {"lr": case.lr[0] if constant else lambda k: case.lr[k]}


def _restored(state: State) -> State:
    """The state as it comes back from its bytes."""
    restored: State = jax.tree.map(lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape), state)
    return restored
