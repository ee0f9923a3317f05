"""A run held against its problem: the state of its last checkpoint beside the clients' gradients at the present model.

Where clients are many, gradients are taken of a sample, and of those not heard for longest or with the largest c_i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.experiments import symptoms
from fedscaffold.experiments.config import Config
from fedscaffold.experiments.findings import Finding, Memory, ages, broken, gathered, mismatch, sizes, too_long
from fedscaffold.experiments.symptoms import Slope
from fedscaffold.problems import Problem
from fedscaffold.simulation.inspection import Standing, local_moves
from fedscaffold.simulation.setup import Request
from fedscaffold.theory.alignment import alignment, cosines, pull
from fedscaffold.theory.derivatives import client_gradients, noise_level
from fedscaffold.theory.stable_step import StableStep, stable_step

__all__ = ["examined"]

LOOKED_AT, EXTREME = 256, 16  # clients of a sample; and how many of the oldest and of the largest are added
WORK = 300_000_000  # records times d up to which all clients are looked at


class View(NamedTuple):
    """Some clients, or all, with their rows and gradients at the present x."""

    clients: NDArray[np.int64]
    q: NDArray[Any]
    """Their weights in means over clients; 0 for those taken because they are extreme."""
    c_i: NDArray[Any]
    gradients: NDArray[Any]
    part: Problem


def called(client: int) -> str:
    """What a simulated client is called.

    >>> called(3)
    'client 3'
    """
    return f"client {client}"


def examined(config: Config, request: Request, standing: Standing) -> list[Finding]:
    """Everything that is found in a run as its last checkpoint has it."""
    state, spec = standing.state, standing.ready.spec
    with np.errstate(over="ignore", invalid="ignore"):  # a run on its way to infinity
        memory = _memory(standing) if spec.keeps else None
        spoilt = broken(memory, np.asarray(state.x), None if state.c is None else np.asarray(state.c))
        found = [*_checkpoint(standing), *spoilt]
        if spoilt or standing.diverged_at is not None:
            ended = symptoms.progress(standing.columns, standing.diverged_at, None, state.x.dtype, False, spec.keeps)
            rest = [ended, _step(config, _stable(config, request, standing, None), standing, True)]
        else:
            view = _view(request, standing, memory)
            stable = _stable(config, request, standing, np.asarray(state.x, np.float64))
            slope = _slope(request, standing, view, stable)
            found += [] if memory is None else _of_memory(request, standing, memory, view, slope)
            rest = _of_course(config, request, standing, view, slope, stable)
    return [*found, *(one for one in rest if one is not None)]


def _of_course(
    config: Config, request: Request, standing: Standing, view: View, slope: Slope, stable: StableStep | None
) -> list[Finding | None]:
    """Drift, step size and progress."""
    state, spec = standing.state, standing.ready.spec
    recorded = standing.columns.get("drift", np.zeros(0))
    lengths = local_moves(request, standing, view.clients, view.c_i)
    seen = float(recorded[-1]) if len(recorded) else None
    noisy = spec.compressor is not None or not spec.full_batch or request.problem.noise is not None
    gets_on = symptoms.progress(standing.columns, standing.diverged_at, slope, state.x.dtype, noisy, spec.keeps)
    ailing = gets_on is not None and gets_on.severity == "wrong"
    return [
        symptoms.drifting(lengths, seen, called, view.clients, _reach(standing, view)),
        _step(config, stable, standing, ailing),
        gets_on,
    ]


def _reach(standing: Standing, view: View) -> NDArray[Any]:
    """K lr |g_i|: how far plain steps along the gradient at x would go; 0 for an optimiser with steps of its own."""
    steps = standing.ready.drawer.steps[view.clients]
    reach: NDArray[Any] = float(np.max(standing.ready.lr)) * steps * np.linalg.norm(view.gradients, axis=1)
    return reach


def _checkpoint(standing: Standing) -> list[Finding]:
    found = [
        Finding(
            "checkpoint", "watch", f"{one[0].upper()}{one[1:]}.", "look at the disk; the run goes on from the older"
        )
        for one in standing.warnings
    ]
    if standing.changed is not None:
        said = f"config.toml is not the configuration that ran: {standing.changed}."
        found.append(Finding("config", "wrong", said, "put it back: resume refuses to go on with another"))
    return found


def _memory(standing: Standing) -> Memory:
    state, p = standing.state, standing.weights
    mean, norms = gathered(standing.chunks(), p, len(state.x))
    drawer = standing.ready.drawer
    trace = drawer.available
    here = drawer.num_clients if trace is None else float(np.minimum(trace.sum(axis=1), drawer.size).mean())
    share = min(drawer.size, here) / drawer.num_clients
    return Memory(
        called,
        p,
        np.asarray(state.c, np.float64),
        mean,
        np.asarray(state.mean, np.float64),
        norms,
        float(state.scale),
        standing.round,
        standing.heard_at,
        share,
    )


def _view(request: Request, standing: Standing, memory: Memory | None) -> View:
    """The clients to look at: all of a small problem, else a sample and those who are oldest or largest."""
    problem, p = request.problem, standing.weights
    n, work = problem.num_clients, int(problem.offsets[-1]) * problem.dim
    x = np.asarray(standing.state.x, np.float64)
    clients, q = np.arange(n), p
    if work > WORK or n > LOOKED_AT * 4:
        some = np.random.default_rng(0).permutation(np.flatnonzero(p))[:LOOKED_AT]
        orders = [standing.heard_at, *([] if memory is None else [-memory.norms])]
        clients = np.unique(np.concatenate([some, *(np.argsort(order)[:EXTREME] for order in orders)]))
        q = np.where(np.isin(clients, some), p[clients], 0.0)
        q = q / q.sum()
    rows = np.zeros((len(clients), problem.dim))
    for members, held in standing.chunks():
        place = np.searchsorted(clients, members).clip(max=len(clients) - 1)
        there = clients[place] == members
        rows[place[there]] = held[there]
    part = problem if len(clients) == n else _part(problem, clients)
    return View(clients, q, rows, client_gradients(part, x), part)


def _part(problem: Problem, clients: NDArray[np.int64]) -> Problem:
    ends = [slice(problem.offsets[i], problem.offsets[i + 1]) for i in clients]
    held = [jax.tree.map(lambda a, some=some: np.asarray(a[some]), problem.records) for some in ends]
    return problem.with_clients(held)


def _slope(request: Request, standing: Standing, view: View, stable: StableStep | None) -> Slope:
    """The gradient now and at the start, and what a round that descends it would bring."""
    now = float(np.linalg.norm(view.q @ view.gradients))
    begun = view.q @ client_gradients(view.part, request.problem.layout.flatten(request.problem.params))
    travel = float(np.max(standing.ready.lr)) * float(standing.ready.drawer.steps.mean())
    reach = travel if stable is None else min(travel, stable.lr / 2)
    return Slope(now, float(np.linalg.norm(begun)), reach * now**2)


def _of_memory(request: Request, standing: Standing, memory: Memory, view: View, slope: Slope) -> list[Finding]:
    """Residual, ages, norms and alignment of the control variates."""
    policy, gradients = standing.ready.spec.policy, standing.ready.spec.sends_direction
    since = symptoms.left_rounding(standing.columns, memory.explained)
    suspects = _suspects(memory, view) if gradients else []
    late = too_long(memory)[view.clients]
    ends = pull(memory.p[view.clients], view.c_i, view.gradients, late) if gradients else None
    tended = None if policy.name == "keep" else policy.name
    known = np.full(len(memory.p), np.nan)
    known[view.clients] = np.linalg.norm(view.gradients, axis=1)
    found = mismatch(memory, since, suspects, zeros_meant=policy.drop_after is not None or policy.rate == 0)
    found += [ages(memory, tended, ends, slope.now), sizes(memory, known if gradients else None)]
    heard = memory.heard_at[view.clients] > 0
    if not gradients or not (view.q[heard] > 0).any():
        return found
    q = np.where(heard, view.q, 0.0) / view.q[heard].sum()
    noise = (
        noise_level(view.part, np.asarray(standing.state.x, np.float64), request.batch_size) if _lossy(request) else 0
    )
    steps = standing.ready.drawer.steps[view.clients]
    one = alignment(q, memory.c, view.c_i, view.gradients, np.broadcast_to(noise / steps, q.shape))
    one = one._replace(cosines=one.cosines[heard], errors=one.errors[heard])
    members, age = view.clients[heard], (memory.round - memory.heard_at)[view.clients[heard]]
    of = f"{len(members)} of {len(memory.p)} clients"
    return [*found, symptoms.aligned(one, cosines(view.c_i, memory.c)[heard], age, lambda i: called(members[i]), of)]


def _lossy(request: Request) -> bool:
    """Whether the noise of batches can be measured: it needs the gradients of single records."""
    return request.problem.functions.has_loss


def _suspects(memory: Memory, view: View) -> list[str]:
    """The client whose row alone would explain the mismatch e: with c_i + e / p_i it would know its gradient again."""
    p, off = memory.p[view.clients], memory.c - memory.mean
    if np.linalg.norm(off) <= memory.explained:
        return []
    mended = view.c_i + off / np.maximum(p, 1e-300)[:, None]
    gain = np.linalg.norm(mended - view.gradients, axis=1) / np.linalg.norm(view.c_i - view.gradients, axis=1).clip(
        1e-300
    )
    best = int(gain.argmin())
    return [called(int(view.clients[best]))] if gain[best] < 0.5 else []


def _stable(config: Config, request: Request, standing: Standing, x: NDArray[Any] | None) -> StableStep | None:
    """The largest stable step of plain SGD; None for optimisers with steps of their own, and oracles without a loss.

    `x` is None where the model is not finite any more, and tells nothing about curvature.
    """
    problem, lr, steps = request.problem, config.local.lr, standing.ready.drawer.steps
    if config.local.optimizer != "sgd" or isinstance(lr, str) or not problem.functions.has_loss:
        return None
    if x is None and problem.smoothness is None:
        return None
    exact = bool((steps == steps[0]).all()) and config.weights == "equal"
    return stable_step(problem, lr=lr, local_steps=int(steps.max()), algorithm=request.algorithm, at=x, exact=exact)


def _step(config: Config, stable: StableStep | None, standing: Standing, ailing: bool) -> Finding | None:
    if stable is None or isinstance(config.local.lr, str):
        return None
    return symptoms.step_size(config.local.lr, int(standing.ready.drawer.steps.max()), stable, ailing)
