"""Check a run's last checkpoint: control variates, drift, step size and progress.

With many clients, gradients are computed for a random sample, for those not heard for longest, and
for those with the largest c_i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.diagnose import progress_checks
from fedscaffold.diagnose.alignment import alignment, cosines, pull
from fedscaffold.diagnose.control_checks import (
    Finding,
    Memory,
    check_ages,
    check_finite,
    check_norms,
    check_residual,
    mean_and_norms,
    overdue,
)
from fedscaffold.diagnose.progress_checks import Slope
from fedscaffold.diagnose.read_checkpoint import CheckpointedRun, local_moves
from fedscaffold.diagnose.regime import (
    check_noise_of_controls,
    check_visits,
    has_linear_steps,
    noise_of_means,
    noise_over_difference,
)
from fedscaffold.privacy.records import Records
from fedscaffold.problems import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.theory.derivatives import client_gradients
from fedscaffold.theory.privacy import noise_deviation
from fedscaffold.theory.stable_step import StableStep, stable_step

__all__ = ["examine_run"]

LOOKED_AT, EXTREME = 256, 16  # size of the sample, and of the oldest and the largest added to it
WORK = 300_000_000  # records times d up to which all clients are examined


class View(NamedTuple):
    """The clients examined, with their control variates and gradients at the present x."""

    clients: NDArray[np.int64]
    q: NDArray[Any]
    """Weights in means over clients; 0 for those added because they are extreme."""
    c_i: NDArray[Any]
    gradients: NDArray[Any]
    part: Problem


def client_name(client: int) -> str:
    """Return the display name of a simulated client.

    >>> client_name(3)
    'client 3'
    """
    return f"client {client}"


def examine_run(request: RunConfig, run: CheckpointedRun) -> list[Finding]:
    """Return all findings about a run at its last checkpoint."""
    state, spec = run.state, run.ready.spec
    with np.errstate(over="ignore", invalid="ignore"):  # a diverging run
        memory = _load_memory(run) if spec.algorithm.means else None
        spoilt = check_finite(memory, np.asarray(state.x), None if memory is None else memory.c)
        found = [*_checkpoint_findings(run), *spoilt]
        if spoilt or run.diverged_at is not None:
            ended = progress_checks.check_progress(
                run.columns, run.diverged_at, None, state.x.dtype, False, spec.keeps
            )
            rest = [ended, _step_size_finding(_largest_stable_step(request, run, None), run, True)]
        else:
            view = _select_clients(request, run, memory)
            stable = _largest_stable_step(request, run, np.asarray(state.x, np.float64))
            slope = _slope(request, run, view, stable)
            found += [] if memory is None else _examine_memory(request, run, memory, view, slope)
            rest = _examine_progress(request, run, view, slope, stable)
    return [*found, *(one for one in rest if one is not None)]


def _examine_progress(
    request: RunConfig, run: CheckpointedRun, view: View, slope: Slope, stable: StableStep | None
) -> list[Finding | None]:
    """Check drift, step size and progress."""
    state, spec = run.state, run.ready.spec
    recorded = run.columns.get("drift", np.zeros(0))
    lengths = local_moves(request, run, view.clients, view.c_i)
    seen = float(recorded[-1]) if len(recorded) else None
    noisy = spec.compressor is not None or not spec.full_batch or request.problem.noise is not None
    noisy |= request.privacy is not None
    gets_on = progress_checks.check_progress(
        run.columns, run.diverged_at, slope, state.x.dtype, noisy, spec.keeps
    )
    ailing = gets_on is not None and gets_on.severity == "wrong"
    return [
        progress_checks.check_drift(lengths, seen, client_name, view.clients, _reach(run, view)),
        _step_size_finding(stable, run, ailing),
        gets_on,
    ]


def _reach(run: CheckpointedRun, view: View) -> NDArray[Any]:
    """Return K lr |g_i|, the distance of K plain steps along the gradient at x.

    It is 0 if the optimizer has its own step size.
    """
    steps = run.ready.drawer.steps[view.clients]
    reach: NDArray[Any] = float(np.max(run.lr)) * steps * np.linalg.norm(view.gradients, axis=1)
    return reach


def _checkpoint_findings(run: CheckpointedRun) -> list[Finding]:
    found = [
        Finding(
            "checkpoint",
            "watch",
            f"{one[0].upper()}{one[1:]}.",
            "look at the disk; the run goes on from the older",
        )
        for one in run.warnings
    ]
    if run.changed is not None:
        said = f"config.toml is not the configuration that ran: {run.changed}."
        found.append(
            Finding("config", "wrong", said, "put it back: resume refuses to go on with another")
        )
    return found


def _load_memory(run: CheckpointedRun) -> Memory:
    state, p = run.state, run.weights
    mean, norms = mean_and_norms(run.chunks(), p, len(state.x))
    drawer = run.ready.drawer
    trace = drawer.available
    here = float(drawer.num_clients)
    if isinstance(trace, np.ndarray):  # a function is not known for all rounds
        here = float(np.minimum(trace.sum(axis=1), drawer.size).mean())
    share = min(drawer.size, here) / drawer.num_clients
    return Memory(
        name=client_name,
        p=p,
        c=np.asarray(getattr(state.server, run.ready.spec.algorithm.means[0][0]), np.float64),
        mean=mean,
        kept=np.asarray(state.mean[0], np.float64),
        norms=norms,
        scale=float(state.scale),
        round=run.round,
        heard_at=run.heard_at,
        share=share,
    )


def _select_clients(request: RunConfig, run: CheckpointedRun, memory: Memory | None) -> View:
    """Select the clients to examine: all, or a sample with the oldest and the largest."""
    problem, p = request.problem, run.weights
    n, work = problem.num_clients, int(problem.offsets[-1]) * problem.dim
    x = np.asarray(run.state.x, np.float64)
    clients, q = np.arange(n), p
    if work > WORK or n > LOOKED_AT * 4:
        some = np.random.default_rng(0).permutation(np.flatnonzero(p))[:LOOKED_AT]
        orders = [run.heard_at, *([] if memory is None else [-memory.norms])]
        clients = np.unique(
            np.concatenate([some, *(np.argsort(order)[:EXTREME] for order in orders)])
        )
        q = np.where(np.isin(clients, some), p[clients], 0.0)
        q = q / q.sum()
    rows = np.zeros((len(clients), problem.dim))
    for members, held in run.chunks():
        place = np.searchsorted(clients, members).clip(max=len(clients) - 1)
        there = clients[place] == members
        rows[place[there]] = held[there]
    part = problem if len(clients) == n else _subproblem(problem, clients)
    return View(clients, q, rows, client_gradients(part, x), part)


def _subproblem(problem: Problem, clients: NDArray[np.int64]) -> Problem:
    ends = [slice(problem.offsets[i], problem.offsets[i + 1]) for i in clients]
    held = [
        jax.tree.map(lambda a, some=some: np.asarray(a[some]), problem.records) for some in ends
    ]
    return problem.with_clients(held)


def _slope(
    request: RunConfig, run: CheckpointedRun, view: View, stable: StableStep | None
) -> Slope:
    """Return the gradient norm now and at the start, and the decrease by a round of descent."""
    now = float(np.linalg.norm(view.q @ view.gradients))
    begun = view.q @ client_gradients(
        view.part, request.problem.layout.flatten(request.problem.params)
    )
    travel = float(np.max(run.lr)) * float(run.ready.drawer.steps.mean())
    reach = travel if stable is None else min(travel, stable.lr / 2)
    return Slope(now, float(np.linalg.norm(begun)), reach * now**2)


def _examine_memory(
    request: RunConfig, run: CheckpointedRun, memory: Memory, view: View, slope: Slope
) -> list[Finding]:
    """Check residual, ages, norms and alignment of the control variates."""
    policy, noised = run.ready.spec.policy, run.ready.spec.message_privacy is not None
    # a c_i that is renewed by a gradient estimates one
    gradients = request.algorithm.renew is not None
    since = progress_checks.first_excess_round(run.columns, memory.explained)
    suspects = _find_suspects(memory, view) if gradients and not noised else []
    late = overdue(memory)[view.clients]
    ends = pull(memory.p[view.clients], view.c_i, view.gradients, late) if gradients else None
    tended = None if policy.name == "keep" else policy.name
    known = np.full(len(memory.p), np.nan)
    known[view.clients] = np.linalg.norm(view.gradients, axis=1)
    zeros_meant = policy.drop_after is not None or policy.rate == 0
    found = check_residual(memory, since, suspects, zeros_meant, noised)
    found += [
        check_ages(memory, tended, ends, slope.now),
        check_norms(memory, known if gradients else None),
    ]
    if gradients and (visits := check_visits(request.rounds, memory.share)) is not None:
        found.append(visits)
    heard = memory.heard_at[view.clients] > 0
    if not gradients or not (view.q[heard] > 0).any():
        return found
    q = np.where(heard, view.q, 0.0) / view.q[heard].sum()
    noise, x = np.zeros(len(q)), np.asarray(run.state.x, np.float64)
    if request.problem.functions.has_loss:  # noise needs gradients of single records
        noise = noise_of_means(request, view.part, view.clients, x)
    if isinstance(request.privacy, Records):
        steps = run.ready.drawer.steps[view.clients]
        noise = noise + request.problem.dim * noise_deviation(request)[view.clients] ** 2 / steps
    c = memory.mean if noised else memory.c
    one = alignment(q, c, view.c_i, view.gradients, noise)
    one = one._replace(cosines=one.cosines[heard], errors=one.errors[heard])
    members, age = view.clients[heard], (memory.round - memory.heard_at)[view.clients[heard]]
    of = f"{len(members)} of {len(memory.p)} clients"
    ratio = noise_over_difference(q, noise, view.gradients)
    noisy = check_noise_of_controls(ratio, memory.share, has_linear_steps(request))
    found += [] if noisy is None else [noisy]
    return [
        *found,
        progress_checks.check_alignment(
            one, cosines(view.c_i, c)[heard], age, lambda i: client_name(members[i]), of
        ),
    ]


def _find_suspects(memory: Memory, view: View) -> list[str]:
    """Return the client whose row alone explains the mismatch e, if there is one.

    Its c_i + e / p_i is close to its gradient.
    """
    p, off = memory.p[view.clients], memory.c - memory.mean
    if np.linalg.norm(off) <= memory.explained:
        return []
    mended = view.c_i + off / np.maximum(p, 1e-300)[:, None]
    gain = np.linalg.norm(mended - view.gradients, axis=1) / np.linalg.norm(
        view.c_i - view.gradients, axis=1
    ).clip(1e-300)
    best = int(gain.argmin())
    return [client_name(int(view.clients[best]))] if gain[best] < 0.5 else []


def _largest_stable_step(
    request: RunConfig, run: CheckpointedRun, x: NDArray[Any] | None
) -> StableStep | None:
    """Return the largest stable step of plain SGD.

    None for a local optimizer with its own step size, for clipped steps, and for oracles without a
    loss. `x` is None
    where the model is not finite, so that its curvature is unknown.
    """
    problem, steps = request.problem, run.ready.drawer.steps
    altered = request.local_optimizer is not None or request.clip_norm is not None
    if altered or not problem.functions.has_loss:
        return None
    if x is None and problem.smoothness is None:
        return None
    return stable_step(
        problem,
        lr=_largest_lr(run),
        local_steps=int(steps.max()),
        algorithm=request.algorithm,
        at=x,
        exact=bool((steps == steps[0]).all())
        and isinstance(request.weights, str)
        and request.weights == "equal",
    )


def _step_size_finding(
    stable: StableStep | None, run: CheckpointedRun, ailing: bool
) -> Finding | None:
    if stable is None:
        return None
    return progress_checks.check_step_size(
        _largest_lr(run), int(run.ready.drawer.steps.max()), stable, ailing
    )


def _largest_lr(run: CheckpointedRun) -> float:
    """Return the largest step size of the present round, in the decimals the user wrote."""
    return float(str(np.max(run.lr)))
