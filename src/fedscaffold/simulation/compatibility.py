"""Refuse arguments that do not go together, with the reason and an alternative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms.base import Algorithm
from fedscaffold.algorithms.round import exchange, needs, refuse_asynchronous
from fedscaffold.checks import InputError, is_word
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.methods import refuse_algorithm
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import stale
from fedscaffold.simulation.resolve import schedule_of

__all__ = ["refuse"]


def refuse(config: RunConfig, steps: NDArray[np.int64], size: int, scheduled: bool) -> None:
    """Raise an InputError if arguments of the config are incompatible."""
    algorithm, problem = config.algorithm, config.problem
    name = algorithm.name
    reads = exchange(algorithm).reads  # refuses functions that cannot be run
    absent = size < problem.num_clients or config.availability is not None
    absent |= config.cohorts is not None and any(
        len(cohort) < problem.num_clients for cohort in config.cohorts
    )
    absent |= callable(config.sampling)
    compressed = not (config.compression is None or str(config.compression) == "none")
    altered = config.local_optimizer is not None or config.clip_norm is not None
    if config.buffer is not None:
        _refuse_asynchronous(config)
    elif config.staleness != "none":
        raise InputError(
            "staleness damps replies to old models, which synchronous rounds do not have: give "
            "buffer, or leave it out"
        )
    unmet = {
        "everyone": absent,
        "sgd": altered,
        "plain sgd": altered or scheduled,
        "equal steps": bool((steps != steps[0]).any()),
        "exact messages": compressed,
        "plain server step": config.server_optimizer is not None,
        "synchronous rounds": config.buffer is not None,
    }
    _refuse_unmet(algorithm, unmet)
    if compressed:
        _refuse_compressed_memory(algorithm)
    if config.local_optimizer is not None and "travel" in reads:
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
    if config.robust is not None or config.attack is not None:
        _refuse_comparison(config, scheduled, compressed)
    if config.privacy is not None:
        _refuse_mechanism(config, steps)


def _refuse_unmet(algorithm: Algorithm, unmet: dict[str, bool]) -> None:
    """Raise an InputError if a condition that the algorithm needs is not met."""
    for condition, reason in algorithm.needs:
        if condition not in unmet:
            known = ", ".join(sorted(unmet))
            raise InputError(
                f"{algorithm.name} needs {condition!r}, which no engine knows; known: {known}"
            )
        if unmet[condition]:
            raise InputError(f"{algorithm.name} {reason}")


def _refuse_compressed_memory(algorithm: Algorithm) -> None:
    """Raise an InputError if error feedback would count again what the next message has."""
    for name in exchange(algorithm).remembered:
        if name not in dict(algorithm.references):
            raise InputError(
                f"{algorithm.name}'s clients remember {name}, so what compression leaves out of it "
                "would count twice, in their memory and in the error feedback: give the algorithm "
                f"references=(({name!r}, lambda server: ...),), which both sides know, or leave "
                "compression out"
            )


def _refuse_asynchronous(config: RunConfig) -> None:
    """Raise an InputError for what rounds with a buffer do not do."""
    refuse_asynchronous(config.algorithm, damped=config.staleness != "none")
    reasons = {
        "cohorts names the clients of each round": config.cohorts is not None,
        "availability says who can be drawn in a round": config.availability is not None,
        "sampling draws a cohort for each round": not is_word(config.sampling, "uniform"),
        "lr changes from round to round": callable(config.lr) and schedule_of(config.lr).by_round,
        "stale changes control variates of clients at work": not is_word(config.stale, "keep"),
        "privacy is accounted for rounds that wait for all": config.privacy is not None,
        "client_state loads the cohort of a round": config.client_state != "array",
        "devices share out the cohort of a round": config.devices not in (None, 1),
        "robust compares the messages of a round": config.robust is not None,
        "attack reads the messages of a round": config.attack is not None,
        "the state that the loss updates is averaged over a round (take buffers='local')": (
            config.problem.state is not None and config.buffers == "average"
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"{reason}, and with a buffer there is no such round: leave one out")


def _refuse_mechanism(config: RunConfig, steps: NDArray[np.int64]) -> None:
    """Raise an InputError for what a private run does not cover."""
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


def _refuse_comparison(config: RunConfig, scheduled: bool, compressed: bool) -> None:
    """Raise an InputError for what filters and attacks on whole messages do not cover."""
    algorithm, known = config.algorithm, exchange(config.algorithm)
    what = "robust" if config.robust is not None else "attack"
    policy = stale.of(config.stale)
    reasons = {
        "devices: it compares all messages of a round": config.devices not in (None, 1),
        f"client_state={config.client_state!r}: it keeps norms of all clients": (
            config.client_state != "array"
        ),
        "compression, which makes honest messages unlike": compressed,
        "stale='refresh', whose gradients it does not see": policy.refresh_after is not None,
        "privacy of clients, whose noise is for a sum of all messages": isinstance(
            config.privacy, Clients
        ),
        "a state that the loss updates, which it does not see: take buffers='local'": (
            config.problem.state is not None and config.buffers == "average"
        ),
        f"{algorithm.name}, which needs every client in every round": (
            needs(algorithm, "everyone") is not None
        ),
        f"{algorithm.name}, whose first exchange of a round it does not see": (
            algorithm.prepare is not None
        ),
        f"{algorithm.name}, which sends numbers beside vectors": bool(known.numbers),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"{what} does not go together with {reason}")
    if (attack := config.attack) is None:
        return
    if max(attack.clients) >= config.problem.num_clients:
        raise InputError(
            f"attack names client {max(attack.clients)}, and there are "
            f"{config.problem.num_clients}, counted from 0"
        )
    plain = config.local_optimizer is None and config.clip_norm is None and not scheduled
    if attack.controls_only and len(known.sent(plain)) < 2:
        raise InputError(
            f"{attack.name} needs a run whose clients send a direction beside the move: here they "
            "send one vector; take fs.scaffold(option=1) or a local_optimizer"
        )


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
    if isinstance(algorithm.start(0.0, algorithm.own(0.0)), tuple):
        raise InputError(
            f"{algorithm.name} trains two models at once, and the loss updates one state: take a "
            "model without "
            "running statistics (group or layer normalisation needs none)"
        )


def _refuse_policy(config: RunConfig, policy: stale.Policy) -> None:
    algorithm = config.algorithm
    if policy.name == "keep":
        return
    if not algorithm.has_memory:
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
