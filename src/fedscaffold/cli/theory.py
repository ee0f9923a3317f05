"""`plan` and `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.cli.options import PROBLEM, config_options
from fedscaffold.cli.verbs import Json, app, prepare_problem, print_answer, refuse_other_options

if TYPE_CHECKING:
    from fedscaffold.experiments.build_problem import Built
    from fedscaffold.experiments.config_file import Config
    from fedscaffold.theory.planning import Plan, Proposal, Verified
    from fedscaffold.theory.private_plan import PrivatePlan

__all__ = ["app", "diagnose", "plan", "private_plan_lines"]

Sets = Annotated[list[str] | None, typer.Option("--set", help="Set a config key: problem.mu=0.1.")]
KEPT = (*PROBLEM, "cohort.size", "local.batch_size")

# Configuration keys that a verb uses, beside those of [problem]; any other is refused.
USES = {
    "plan": ("algorithm", "cohort.size", "local.batch_size", "local.lr", "local.steps", "weights"),
    "diagnose": ("cohort.size", "local.batch_size", "local.lr", "local.steps", "rounds", "weights"),
}


@app.command(
    epilog="Example: fedscaffold plan --dataset quadratic --set problem.noise=0.01 --target 0.1 "
    "--verify"
)
@config_options(*KEPT, defaults={"problem.dataset": "quadratic"})
def plan(
    overrides: list[str],
    target: Annotated[
        float | None, typer.Option(help="Root mean squared distance to the optimum to reach.")
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="Instead of a target: a privacy budget for records; repeatable."),
    ] = None,
    delta: Annotated[float, typer.Option(help="The delta of --epsilon.")] = 1e-5,
    cost_of_round: Annotated[float, typer.Option(help="What a round costs.")] = 1.0,
    cost_of_step: Annotated[float, typer.Option(help="What a local step costs.")] = 0.0,
    max_rounds: Annotated[
        int, typer.Option(help="Rounds at most; with --epsilon their number.")
    ] = 20_000,
    verify: Annotated[
        bool, typer.Option("--verify", help="Simulate the plan: predicted against measured.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Seeds of the simulation.")] = 16,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Plan step size, local steps, rounds and bytes for a target error: SGD, FedAvg and SCAFFOLD.

    With --epsilon: noise, clip, batches and local steps of private runs, and the error they leave.
    What is set of local.steps, local.lr, local.batch_size, cohort.size, weights and [algorithm] is
    kept.
    """
    checks.whole("seeds", seeds)
    config = _parse_options("plan", overrides, sets)
    if (target is None) == (not epsilon):
        raise InputError("give --target, or one or more --epsilon")
    built = prepare_problem(config)
    if target is None:
        _plan_privacy(config, built, epsilon or [], delta, max_rounds, as_json)
        return
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
        **_fixed_settings(config),
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
    print_answer(answer, _plan_lines(built.sentence, made, checked), as_json)


@app.command(
    epilog="Example: fedscaffold diagnose runs/first, or "
    "fedscaffold diagnose --dataset digits --split similarity:0 --model softmax --clients 20"
)
@config_options(*KEPT, "rounds")
def diagnose(
    context: typer.Context,
    overrides: list[str],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="Instead of a problem: the folder of a run or a server."
        ),
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> int:
    """Say what is wrong with a RUN.

    Or, of a problem, how unlike the clients are and which method to use, and how.
    """
    if folder is not None:
        from fedscaffold.cli.diagnose import print_diagnosis

        refuse_other_options(context, "diagnose RUN", ("--data", "--json"))
        data = dict(one.split("=", 1) for one in overrides).get("problem.data")
        return print_diagnosis(folder, data, as_json)
    config = _parse_options("diagnose", overrides, sets)
    built = prepare_problem(config)
    from fedscaffold.theory.advice import advise
    from fedscaffold.theory.heterogeneity import heterogeneity

    kept = _fixed_settings(config)
    drift = kept if None not in kept.values() else {}
    found = heterogeneity(
        built.problem, weights=config.weights, batch_size=config.local.batch_size, **drift
    )
    advice = advise(found, built.problem, rounds=config.rounds, cohort=config.cohort.size, **kept)
    numbers = {
        key: value
        for key, value in found._asdict().items()
        if isinstance(value, (int, float, str, bool))
    }
    answer = {"problem": built.sentence, "heterogeneity": numbers, "errors": found.errors}
    answer["advice"] = advice._asdict() | {"tried": [one._asdict() for one in advice.tried]}
    kind = "exact" if found.exact else "estimated"
    lines = [f"{built.sentence}, at {found.where} ({kind}):"]
    lines += [
        f"  {name} = {value:.4g}" for name, value in numbers.items() if isinstance(value, float)
    ]
    print_answer(answer, [*lines, str(advice)], as_json)
    return 0


def _plan_privacy(
    config: Config, built: Built, epsilons: list[float], delta: float, rounds: int, as_json: bool
) -> None:
    from fedscaffold.theory.private_plan import plan_privacy

    batch = config.local.batch_size
    if isinstance(batch, int):
        raise InputError(
            f"local.batch_size must be a fraction of the records here, or left out, got {batch}"
        )
    made = plan_privacy(
        built.problem,
        epsilons=epsilons,
        delta=delta,
        rounds=rounds,
        rate=batch,
        cohort=config.cohort.size,
        weights=config.weights,
        **_fixed_settings(config),
    )
    answer = made._asdict() | {
        "problem": built.sentence,
        "weights": made.weights.tolist(),
        "proposals": [one._asdict() for one in made.proposals],
    }
    print_answer(answer, private_plan_lines(built.sentence, made), as_json)


def private_plan_lines(sentence: str, made: PrivatePlan) -> list[str]:
    """Return a private plan in words, one line for each proposal."""
    lines = [
        f"{sentence}: {made.rounds} rounds from {made.distance:.3g} away from the optimum, clip "
        f"{made.clip:.4g}, delta {made.delta:g}"
    ]
    for one in made.proposals:
        batch = "all records" if one.rate == 1 else f"batch_size {one.rate:g}"
        lines.append(
            f"epsilon {one.epsilon:g}: {one.algorithm:9} noise {one.noise:.3f}, {batch}, "
            f"{one.local_steps} local steps, lr {one.lr:.4g}: ends {one.error:.4g} from the "
            f"optimum, {one.without:.3g} without privacy"
        )
    if made.clipped > 0:
        lines.append(
            f"{100 * made.clipped:.2g} % of the records are clipped at the start or the optimum, "
            "which the errors leave out"
        )
    return [*lines, "settings that were chosen by looking at private records tell of them"]


def _parse_options(verb: str, flags: list[str], sets: list[str] | None) -> Config:
    """Parse the configuration from options; refuse keys that the verb does not use."""
    from fedscaffold.experiments.build_problem import unused_keys
    from fedscaffold.experiments.config_file import given_keys, parse

    config = parse("", [*flags, *(sets or [])], source="options")
    for key in given_keys(config):
        section = key.partition(".")[0]
        if section != "problem" and section not in USES[verb] and key not in USES[verb]:
            raise InputError(
                f"{verb} cannot take {key} into account; it takes problem, {', '.join(USES[verb])}"
            )
    unused = unused_keys(config.problem)
    if unused:
        raise InputError(
            f"dataset {config.problem.dataset!r} makes no use of problem.{unused[0]}; leave it out"
        )
    return config


def _fixed_settings(config: Config) -> dict[str, Any]:
    """Return the step size and number of local steps that the user fixed."""
    steps, lr = config.local.steps, config.local.lr
    if isinstance(steps, list):
        raise InputError(
            f"local.steps must be one number of local steps for all clients here, got {steps}"
        )
    if isinstance(lr, str):
        raise InputError(f"local.lr must be a number, or left out to have one chosen, got {lr!r}")
    return {"local_steps": steps, "lr": lr if "lr" in config.local.model_fields_set else None}


def _plan_lines(sentence: str, made: Plan, checked: list[Verified]) -> list[str]:
    n = len(made.weights)
    who = "all clients" if made.cohort == n else f"{made.cohort} of {n} clients"
    weighed = "" if (made.weights == made.weights[0]).all() else ", weighted"
    out = [
        f"{sentence}: from {made.distance:.3g} to {made.target:.3g} away from the optimum, {who} "
        "in every round"
    ]
    out[0] += weighed
    out += [_proposal_line(one) for one in made.proposals]
    out += [
        f"simulated {one.algorithm}: {one.measured:.4g} +- {one.standard_error:.2g} measured, "
        f"{one.predicted:.4g} "
        f"predicted, ratio {one.ratio:.2f}"
        for one in checked
    ]
    return [
        *out,
        f"cheapest: {made.best}" if made.best else "no method reaches the target within the budget",
    ]


def _proposal_line(one: Proposal) -> str:
    if one.rounds is None:
        return f"{one.algorithm:9} {one.why}"
    return (
        f"{one.algorithm:9} lr {one.lr:.4g}, {one.local_steps} local steps, {one.rounds} rounds, "
        f"{one.gradients} gradients a client, {one.bytes_sent:,} bytes; "
        f"{'promised' if one.promised else 'not promised'}: {one.why}"
    )
