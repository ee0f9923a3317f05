"""The verbs that know before they run: `plan`, and `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import DataDir, Json, app, prepared, say

if TYPE_CHECKING:
    from fedscaffold.experiments.federation import Built
    from fedscaffold.theory.planning import Plan, Proposal, Verified

__all__ = ["app", "diagnose", "plan"]

Sets = Annotated[list[str] | None, typer.Option("--set", help="Override any config key: problem.mu=0.1.")]
Dataset = Annotated[str, typer.Option(help="Data set, or quadratic, synthetic-linear, synthetic-logistic.")]
Split = Annotated[str, typer.Option(help="similarity:S, dirichlet:A, shards:K, iid or natural.")]
Model = Annotated[str, typer.Option(help="softmax, mlp:WIDTH, logistic or linear.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
BatchSize = Annotated[str | None, typer.Option(help="Share (0.2) or number (32) of records; all by default.")]


@app.command(epilog="Example: fedscaffold plan --dataset quadratic --set problem.noise=0.01 --target 0.1 --verify")
def plan(
    target: Annotated[float, typer.Option(help="Root mean squared distance to the optimum to reach.")],
    dataset: Dataset = "quadratic",
    split: Split = "similarity:0",
    model: Model = "logistic",
    clients: Clients = None,
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
    """Plan step size, local steps, rounds and bytes for a target error, for SGD, FedAvg and SCAFFOLD side by side."""
    built, batch = _problem(dataset, split, model, clients, batch_size, data, sets)
    from fedscaffold.theory import planning as room

    made = room.plan(
        built.problem,
        target=target,
        batch_size=batch,
        cost_of_round=cost_of_round,
        cost_of_step=cost_of_step,
        max_rounds=max_rounds,
    )
    checked = room.verify(built.problem, made, seeds=seeds) if verify else []
    answer = made._asdict() | {
        "problem": built.sentence,
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
    split: Split = "similarity:0",
    model: Model = "softmax",
    clients: Clients = None,
    batch_size: BatchSize = None,
    rounds: Annotated[int, typer.Option(help="Rounds that can be afforded.")] = 100,
    sets: Sets = None,
    data: DataDir = None,
    as_json: Json = False,
) -> int:
    """Say what is wrong with a RUN; or, of a problem, how unlike the clients are and which method to use, and how."""
    if folder is not None:
        from fedscaffold.cli.diagnose import look

        _only(context, ("folder", "data", "as_json"))
        return look(folder, data, as_json)
    built, batch = _problem(dataset, split, model, clients, batch_size, data, sets)
    from fedscaffold.theory.advice import advise
    from fedscaffold.theory.heterogeneity import heterogeneity

    found = heterogeneity(built.problem, batch_size=batch)
    advice = advise(found, built.problem, rounds=rounds)
    numbers = {key: value for key, value in found._asdict().items() if isinstance(value, (int, float, str, bool))}
    answer = {"problem": built.sentence, "heterogeneity": numbers, "errors": found.errors, "advice": advice._asdict()}
    kind = "exact" if found.exact else "estimated"
    lines = [f"{built.sentence}, at {found.where} ({kind}):"]
    lines += [f"  {name} = {value:.4g}" for name, value in numbers.items() if isinstance(value, float)]
    say(answer, [*lines, str(advice)], as_json)
    return 0


def _only(context: typer.Context, allowed: tuple[str, ...]) -> None:
    """Refuse options that say nothing about a run's folder, which knows its own problem."""
    typed = [
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    wrong = [name for name in typed if name not in allowed]
    if wrong:
        raise InputError(f"diagnose RUN takes --data and --json only, got --{wrong[0].replace('_', '-')}")


def _problem(
    dataset: str, split: str, model: str, clients: int | None, batch_size: str | None, data: str | None, sets: Any
) -> tuple[Built, int | float | None]:
    """The problem that the options name, and the batch size."""
    from fedscaffold.experiments.config import parse

    given = [("dataset", dataset), ("split", split), ("model", model), ("clients", clients)]
    overrides = [f"problem.{key}={value}" for key, value in given if value is not None]
    overrides += [] if batch_size is None else [f"local.batch_size={batch_size}"]
    overrides += [] if data is None else [f"problem.data='{Path(data)}'"]
    config = parse("", [*overrides, *(sets or [])], source="options")
    return prepared(config), config.local.batch_size


def _lines(sentence: str, made: Plan, checked: list[Verified]) -> list[str]:
    out = [
        f"{sentence}: from {made.distance:.3g} to {made.target:.3g} away from the optimum, all clients in every round"
    ]
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
