"""Refuse arguments that do not go together, with the reason and an alternative."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.base import Walk
from fedscaffold.algorithms.round import exchange, needs, reply_of, shift_of, start_of
from fedscaffold.checks import InputError, is_word
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.methods import refuse_algorithm
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import stale
from fedscaffold.simulation.local import Leaves

__all__ = ["refuse"]


def refuse(config: RunConfig, steps: NDArray[np.int64], size: int, scheduled: bool) -> None:
    """Raise an InputError if arguments of the config are incompatible."""
    algorithm, problem = config.algorithm, config.problem
    name = algorithm.name
    _refuse_functions(algorithm)
    absent = size < problem.num_clients or config.availability is not None
    absent |= config.cohorts is not None and any(
        len(cohort) < problem.num_clients for cohort in config.cohorts
    )
    absent |= callable(config.sampling)
    compressed = not (config.compression is None or str(config.compression) == "none")
    altered = config.local_optimizer is not None or config.clip_norm is not None
    unmet = {
        "everyone": absent,
        "sgd": altered,
        "plain sgd": altered or scheduled,
        "equal steps": bool((steps != steps[0]).any()),
        "exact messages": compressed,
        "plain server step": config.server_optimizer is not None,
    }
    for condition, reason in algorithm.needs:
        if condition not in unmet:
            known = ", ".join(sorted(unmet))
            raise InputError(f"{name} needs {condition!r}, which no engine knows; known: {known}")
        if unmet[condition]:
            raise InputError(f"{name} {reason}")
    if config.local_optimizer is not None and "travel" in exchange(algorithm).reads:
        raise InputError(
            f"{name} reads the sum of step sizes, which an optimizer does not have; give lr "
            "instead of local_optimizer"
        )
    if config.accumulate > 1 and problem.kinds.gradient != "mean":
        raise InputError(
            "accumulate computes the batches of a step as one, and this loss is no mean over "
            "records: take accumulate=1 and a larger batch_size"
        )
    if config.stop_at is not None and config.evaluate_every > config.rounds:
        raise InputError(
            f"stop_at is looked at every {config.evaluate_every} rounds (evaluate_every), and the "
            f"run has {config.rounds}: measure more often, or leave stop_at out"
        )
    if problem.state is not None:
        _refuse_two_models(config)
    elif config.buffers != "average":
        raise InputError(
            "buffers says what becomes of the state that a loss updates, and this problem has none"
        )
    if not is_word(config.stale, "keep"):
        _refuse_policy(config, stale.of(config.stale))
    if config.privacy is not None:
        if config.devices not in (None, 1):
            raise InputError("privacy keeps one ledger: run on one device, without devices")
        if config.stop_at is not None:
            raise InputError(
                "stop_at ends a run by a metric that nothing noises: with privacy give rounds, and "
                "stop_at_epsilon"
            )
        _refuse_delta(config)
        if isinstance(config.privacy, Clients):
            _refuse_client_privacy(config, steps)
        else:
            _refuse_privacy(config)


def _refuse_delta(config: RunConfig) -> None:
    """Raise an InputError for a delta with which a record, or a client, may be told outright."""
    assert config.privacy is not None
    of_clients = isinstance(config.privacy, Clients)
    many = config.problem.num_clients if of_clients else int(config.problem.counts.max())
    if many > 1 and config.privacy.delta * many >= 1:
        held = "that many clients" if of_clients else "a client with that many records"
        raise InputError(
            f"delta must be below 1 / {many}, got {config.privacy.delta:g}: to publish one of them "
            f"at random would be private, for {held}"
        )


def _refuse_client_privacy(config: RunConfig, steps: NDArray[np.int64]) -> None:
    """Raise an InputError for what clipped messages and a noised sum do not cover."""
    algorithm = config.algorithm
    reasons = {
        f"{algorithm.name} exchanges more than one message a round": algorithm.prepare is not None,
        f"{algorithm.name} sends numbers, which nothing clips": bool(exchange(algorithm).numbers),
        "weights that differ tell of clients": not is_word(config.weights, "equal"),
        "numbers of local_steps that differ tell of clients": bool((steps != steps[0]).any()),
        "compression changes what was clipped": not (
            config.compression is None or str(config.compression) == "none"
        ),
        "a policy for stale control variates reads them": not is_word(config.stale, "keep"),
        "the state that a loss updates is averaged without noise": config.problem.state is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"{reason}: this cannot be private for whole clients")


def _refuse_privacy(config: RunConfig) -> None:
    """Raise an InputError for what the private gradient does not cover."""
    problem = config.problem
    refuse_algorithm(config.algorithm)
    if config.local_epochs is not None or config.draw != "auto":
        given = "local_epochs" if config.local_epochs is not None else "draw"
        raise InputError(
            f"{given} passes over records in batches that are no Poisson samples, and their "
            "epsilon is another: with privacy give local_steps and batch_size"
        )
    if config.accumulate > 1:
        raise InputError(
            "accumulate makes no Poisson samples of several batches: with privacy give a larger "
            "batch_size"
        )
    if problem.state is not None:
        raise InputError(
            "the loss updates a state from whole batches, such as running statistics, which "
            "nothing clips or noises: with privacy take group or layer normalisation"
        )
    kinds, functions = problem.kinds, problem.functions
    # what a loss draws with a key depends on the batch's shape: its mean is seen without one
    by_records = functions.random and functions.gradient is None and kinds.loss == "mean"
    if kinds.gradient != "mean" and not by_records:
        raise InputError(
            "the loss of a batch is not the mean of its records' losses (batch normalisation, "
            "contrastive and ranking losses, `weights`): a record's gradient cannot be clipped; "
            "with privacy take a loss that is a mean over records"
        )
    if not is_word(config.stale, "keep") and stale.of(config.stale).refresh_after is not None:
        raise InputError(
            "stale='refresh' takes gradients over all records at x, which nothing clips or noises: "
            "with privacy take keep, decay or drop"
        )


def _refuse_two_models(config: RunConfig) -> None:
    algorithm = config.algorithm
    own = None if algorithm.own is None else algorithm.own(0.0)
    if algorithm.start is not None and isinstance(algorithm.start(0.0, own), tuple):
        raise InputError(
            f"{algorithm.name} trains two models at once, and the loss updates one state: take a "
            "model without "
            "running statistics (group or layer normalisation needs none)"
        )


def _refuse_policy(config: RunConfig, policy: stale.Policy) -> None:
    algorithm = config.algorithm
    if policy.name == "keep":
        return
    if algorithm.memory is None:
        raise InputError(
            f"{algorithm.name} keeps no control variates, so none grow stale: leave stale='keep'"
        )
    more = sorted({*algorithm.memory(0.0)._fields} - {of for _, of in algorithm.means})
    if more:
        raise InputError(
            f"{algorithm.name}'s clients remember {', '.join(more)} beside control variates, and "
            f"{policy.name} would "
            "spoil it: leave stale='keep'"
        )
    if needs(algorithm, "everyone") is not None:
        raise InputError(
            f"{algorithm.name} hears all clients in every round, so no control variate grows stale"
        )
    if policy.refresh_after is not None and algorithm.renew is None:
        raise InputError(
            f"{algorithm.name} does not remember gradients, so a gradient cannot renew its memory; "
            "use decay or drop"
        )


@cache
def _refuse_functions(algorithm: Algorithm) -> None:
    """Raise an InputError for functions that are not as `fedscaffold.algorithms.base` says.

    One round is run on short vectors: records must keep their fields.
    """
    algorithm = algorithm if algorithm.fit is None else algorithm.fit(None)
    if (algorithm.memory is None) != (algorithm.remember is None):
        raise InputError(f"{algorithm.name} must have both memory and remember, or neither")
    layers, x = Leaves([np.ones(1)]), jnp.ones(2)
    makers = {"init": algorithm.init, "memory": algorithm.memory, "own": algorithm.own}
    try:
        exchange(algorithm)
        server, memory, own = (None if make is None else make(layers) for make in makers.values())
        for field, of in algorithm.means:
            getattr(server, field), getattr(memory, of)
        start = layers if algorithm.start is None else algorithm.start(layers, own)
        shift = layers if algorithm.shift is None else algorithm.shift(server, memory)
        algorithm.direction(lambda z: z, start, layers, shift)
        server, memory, own = (None if make is None else make(x) for make in makers.values())
        for function, record in zip(makers, (server, memory, own), strict=True):
            _refuse_fields(algorithm, function, record, record)
        shift, end = shift_of(algorithm, server, memory), start_of(algorithm, x, own)
        ends = dict.fromkeys(("y", "move", "d"), lambda: end)
        walk = Walk(x=lambda: x, travel=lambda: 1.0, gradient=lambda: x, own=lambda: own, **ends)
        message, kept = reply_of(algorithm, walk, shift, own)
        _refuse_fields(algorithm, "message", message, message)
        _refuse_fields(algorithm, "keep", own, kept)
        _refuse_fields(algorithm, "update", server, algorithm.update(server, server, message, 1.0))
        if algorithm.remember is not None:
            new = algorithm.remember(memory, shift, message)
            _refuse_fields(algorithm, "remember", memory, new)
    except (AttributeError, TypeError) as error:
        does = (
            "use + - * / on vectors, and NamedTuples for records, "
            "as fedscaffold.algorithms.base says"
        )
        raise InputError(
            f"a function of {algorithm.name} cannot be run: {error}; {does}"
        ) from error


def _refuse_fields(algorithm: Algorithm, function: str, before: Any, after: Any) -> None:
    """Raise an InputError unless a function returns a record with the fields of `before`."""
    if before is None:
        return
    fields, got = before._fields, getattr(after, "_fields", None)
    must = f"{function} of {algorithm.name} must return a record"
    if got != fields:
        what = type(after).__name__ if got is None else f"the fields {', '.join(got)}"
        raise InputError(f"{must} with the fields {', '.join(fields)}, got {what}")
    for name, value in zip(fields, after, strict=True):
        if np.shape(value) not in ((), (2,)):
            raise InputError(
                f"{must} of numbers and vectors like x; where x has 2 entries, {name} has shape "
                f"{np.shape(value)}"
            )
