"""The verbs that know before they run: `plan`, and `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import DataDir, Json, app, only, prepared, say

if TYPE_CHECKING:
    from fedscaffold.experiments.config import Config
    from fedscaffold.theory.planning import Plan, Proposal, Verified

__all__ = ["app", "diagnose", "plan"]

Sets = Annotated[list[str] | None, typer.Option("--set", help="Set a config key: problem.mu=0.1.")]
Dataset = Annotated[str, typer.Option(help="Data set, or quadratic, synthetic-linear, synthetic-logistic.")]
Split = Annotated[str | None, typer.Option(help="similarity:S, dirichlet:A, shards:K, iid or natural.")]
Model = Annotated[str | None, typer.Option(help="softmax, mlp:WIDTH, logistic or linear.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
CohortSize = Annotated[
    str | None, typer.Option("--cohort", help="Share (0.2) or number (5) of clients in a round; all by default.")
]
BatchSize = Annotated[str | None, typer.Option(help="Share (0.2) or number (32) of records; all by default.")]

# Keys of the configuration that a verb makes use of, beside those of [problem]; any other that is set is refused.
USES = {
    "plan": ("algorithm", "cohort.size", "local.batch_size", "local.lr", "local.steps", "weights"),
    "diagnose": ("cohort.size", "local.batch_size", "local.lr", "local.steps", "rounds", "weights"),
}


@app.command(epilog="Example: fedscaffold plan --dataset quadratic --set problem.noise=0.01 --target 0.1 --verify")
def plan(
    target: Annotated[float, typer.Option(help="Root mean squared distance to the optimum to reach.")],
    dataset: Dataset = "quadratic",
    split: Split = None,
    model: Model = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    batch_size: BatchSize = None,
    cost_of_round: Annotated[float, typer.Option(help="What a round costs.")] = 1.0,
    cost_of_step: Annotated[float, typer.Option(help="What a local step costs.")] = 0.0,
    max_rounds: Annotated[int, typer.Option(help="Rounds at most.")] = 20_000,
    verify: Annotated[bool, typer.Option("--verify", help="Simulate the plan: predicted against measured.")] = False,
    seeds: Annotated[int, typer.Option(help="Seeds of the simulation.")] = 16,
    sets: Sets = None,
    data: DataDir = None,
    as_json: Json = False,
) -> None:
    """Plan step size, local steps, rounds and bytes for a target error, for SGD, FedAvg and SCAFFOLD side by side.

    What is set of local.steps, local.lr, local.batch_size, cohort.size, weights and [algorithm] is kept.
    """
    flags = _flags(dataset, split, model, clients, cohort, batch_size, data)
    config = _configured("plan", flags, sets)
    built = prepared(config)
    from fedscaffold.algorithms import make
    from fedscaffold.theory import planning as room

    chosen: dict[str, Any] = {}
    if "algorithm" in config.model_fields_set:
        chosen = {"algorithms": [make(config.algorithm.name, **config.algorithm.parameters)]}
    made = room.plan(
        built.problem,
        target=target,
        cost_of_round=cost_of_round,
        cost_of_step=cost_of_step,
        max_rounds=max_rounds,
        batch_size=config.local.batch_size,
        cohort=config.cohort.size,
        weights=config.weights,
        **_kept(config),
        **chosen,
    )
    checked = room.verify(built.problem, made, seeds=seeds) if verify else []
    answer = made._asdict() | {
        "problem": built.sentence,
        "weights": made.weights.tolist(),
        "algorithms": [one.name for one in made.algorithms],
        "proposals": [one._asdict() | {"curve": one.curve.tolist()} for one in made.proposals],
        "verified": [one._asdict() | {"ratio": one.ratio} for one in checked],
    }
    say(answer, _lines(built.sentence, made, checked), as_json)


@app.command(
    epilog="Example: fedscaffold diagnose runs/first, or "
    "fedscaffold diagnose --dataset digits --split similarity:0 --model softmax --clients 20"
)
def diagnose(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Instead of a problem: the folder of a run or a server.")
    ] = None,
    dataset: Dataset = "digits",
    split: Split = None,
    model: Model = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    batch_size: BatchSize = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds that can be afforded; 100 by default.")] = None,
    sets: Sets = None,
    data: DataDir = None,
    as_json: Json = False,
) -> int:
    """Say what is wrong with a RUN; or, of a problem, how unlike the clients are and which method to use, and how."""
    if folder is not None:
        from fedscaffold.cli.diagnose import look

        only(context, "diagnose RUN", ("--data", "--json"))
        return look(folder, data, as_json)
    flags = _flags(dataset, split, model, clients, cohort, batch_size, data)
    flags += [] if rounds is None else [f"rounds={rounds}"]
    config = _configured("diagnose", flags, sets)
    built = prepared(config)
    from fedscaffold.theory.advice import advise
    from fedscaffold.theory.heterogeneity import heterogeneity

    kept = _kept(config)
    drift = kept if None not in kept.values() else {}
    found = heterogeneity(built.problem, weights=config.weights, batch_size=config.local.batch_size, **drift)
    advice = advise(found, built.problem, rounds=config.rounds, cohort=config.cohort.size, **kept)
    numbers = {key: value for key, value in found._asdict().items() if isinstance(value, (int, float, str, bool))}
    answer = {"problem": built.sentence, "heterogeneity": numbers, "errors": found.errors}
    answer["advice"] = advice._asdict() | {"tried": [one._asdict() for one in advice.tried]}
    kind = "exact" if found.exact else "estimated"
    lines = [f"{built.sentence}, at {found.where} ({kind}):"]
    lines += [f"  {name} = {value:.4g}" for name, value in numbers.items() if isinstance(value, float)]
    say(answer, [*lines, str(advice)], as_json)
    return 0


def _flags(
    dataset: str,
    split: str | None,
    model: str | None,
    clients: int | None,
    cohort: str | None,
    batch_size: str | None,
    data: str | None,
) -> list[str]:
    """Overrides of the configuration for the options that were typed."""
    typed = [
        ("problem.dataset", dataset), ("problem.split", split), ("problem.model", model), ("problem.clients", clients),
        ("cohort.size", cohort), ("local.batch_size", batch_size),
    ]  # fmt: skip
    overrides = [f"{key}={value}" for key, value in typed if value is not None]
    return overrides + ([] if data is None else [f"problem.data='{Path(data)}'"])


def _configured(verb: str, flags: list[str], sets: list[str] | None) -> Config:
    """The configuration that was asked for; a key that would make no difference is refused."""
    from fedscaffold.experiments.config import given, parse
    from fedscaffold.experiments.federation import idle

    config = parse("", [*flags, *(sets or [])], source="options")
    for key in given(config):
        section = key.partition(".")[0]
        if section != "problem" and section not in USES[verb] and key not in USES[verb]:
            raise InputError(f"{verb} cannot take {key} into account; it takes problem, {', '.join(USES[verb])}")
    unused = idle(config.problem)
    if unused:
        raise InputError(f"dataset {config.problem.dataset!r} makes no use of problem.{unused[0]}; leave it out")
    return config


def _kept(config: Config) -> dict[str, Any]:
    """The step size and number of local steps that are not to be chosen."""
    steps, lr = config.local.steps, config.local.lr
    if isinstance(steps, list):
        raise InputError(f"local.steps must be one number of local steps for all clients here, got {steps}")
    if isinstance(lr, str):
        raise InputError(f"local.lr must be a number, or left out to have one chosen, got {lr!r}")
    return {"local_steps": steps, "lr": lr if "lr" in config.local.model_fields_set else None}


def _lines(sentence: str, made: Plan, checked: list[Verified]) -> list[str]:
    n = len(made.weights)
    who = "all clients" if made.cohort == n else f"{made.cohort} of {n} clients"
    weighed = "" if (made.weights == made.weights[0]).all() else ", weighted"
    out = [f"{sentence}: from {made.distance:.3g} to {made.target:.3g} away from the optimum, {who} in every round"]
    out[0] += weighed
    out += [_proposal(one) for one in made.proposals]
    out += [
        f"simulated {one.algorithm}: {one.measured:.4g} +- {one.standard_error:.2g} measured, {one.predicted:.4g} "
        f"predicted, ratio {one.ratio:.2f}"
        for one in checked
    ]
    return [*out, f"cheapest: {made.best}" if made.best else "no method reaches the target within the budget"]


def _proposal(one: Proposal) -> str:
    if one.rounds is None:
        return f"{one.algorithm:9} {one.why}"
    return (
        f"{one.algorithm:9} lr {one.lr:.4g}, {one.local_steps} local steps, {one.rounds} rounds, "
        f"{one.gradients} gradients a client, {one.bytes_sent:,} bytes; "
        f"{'promised' if one.promised else 'not promised'}: {one.why}"
    )
