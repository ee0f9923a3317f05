"""`privacy statement`, `privacy plan` and `privacy audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.verbs import Json, app, prepare_problem, print_answer

if TYPE_CHECKING:
    from fedscaffold.theory.private_plan import PrivatePlan

__all__ = ["audit", "plan", "statement"]

AUDIT = "audit.txt"  # in a run's folder: the audit of its mechanism, in words

privacy_app = typer.Typer(
    help="Privacy of records: statement, plan and audit.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(privacy_app, name="privacy")

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override a key: a.b=c.")]


@privacy_app.command(epilog="Example: fedscaffold privacy statement runs/latest --html page.html")
def statement(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|SITE", help="The folder of a run, of a deployment or of a site."
        ),
    ],
    html: Annotated[Path | None, typer.Option(help="Write the page to this file too.")] = None,
    as_json: Json = False,
) -> None:
    """State a run's privacy: of whom, against whom, by what means, and what it leaves out.

    At a site of a deployment: of all that has left it, by its own ledger.
    """
    from fedscaffold.runs.privacy_statement import SIMULATED, to_html, to_text
    from fedscaffold.state.files import write_whole

    facts, title, note = _state_deployed(folder) or (*_state_run(folder), SIMULATED)
    if html is not None:
        write_whole(html, to_html(facts, title, note))
    lines = [to_text(facts, title, note).rstrip()]
    print_answer({"statement": facts, "title": title, "note": note}, lines, as_json)


def _state_run(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the statement of a simulated run, and its title."""
    from fedscaffold.runs.privacy_statement import statement as state
    from fedscaffold.runs.run_folder import read

    study = read(folder)
    if len(study.runs) != 1:
        raise InputError(f"{folder} is a comparison: give the folder of one of its runs")
    facts = state(study.runs[0])
    if (folder / AUDIT).exists():
        facts["Audit"] = (folder / AUDIT).read_text(encoding="utf-8").strip()
    return facts, f"{study.runs[0].algorithm} on {study.problem}"


def _state_deployed(folder: Path) -> tuple[dict[str, Any], str, str] | None:
    """Return the statement of a deployed run or site, its title and note; None for others."""
    from fedscaffold.deploy.site_statement import (
        DEPLOYED,
        REHEARSED,
        find_private_sites,
        state_federation,
        state_site,
    )
    from fedscaffold.parsing import record

    above = (folder.resolve(), *folder.resolve().parents[:4])
    note = REHEARSED if any((up / "deployment.json").is_file() for up in above) else DEPLOYED
    for home in (folder, folder / "server"):
        if (home / "status.json").is_file():
            status = record(home / "status.json", round=int, sites=dict)
            return state_federation(status), "a deployed run", note
    sites = find_private_sites(folder)
    if len(sites) > 1:
        raise InputError(f"{folder} holds {len(sites)} sites: give one of them, such as {sites[0]}")
    if not sites:
        return None
    return state_site(sites[0]), f"the site {sites[0].resolve().name}", note


@privacy_app.command(epilog="Example: fedscaffold privacy plan config.toml --epsilon 1 --epsilon 8")
def plan(
    path: Config,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="A budget; repeatable.  [default: 1, 3, 8]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Also draw error against epsilon: a .png, .svg or .pdf file."),
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Find the noise for a budget, and on quadratics the error that it leaves.

    SCAFFOLD against FedAvg: as configured, and with the batches, local steps and step sizes that
    leave the least error.
    """
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--out takes a .png, .svg or .pdf file, got {str(out)!r}")
    config = _private_config(path, sets)
    from fedscaffold.theory.privacy import privacy_cost

    wanted = sorted(epsilon or [1.0, 3.0, 8.0])
    costs = privacy_cost(config, wanted)
    lines = []
    for cost in costs:
        line = f"epsilon {cost.epsilon:g}: noise {cost.noise:.3f}"
        for name, error in (cost.errors or {}).items():
            line += f", {name} {error:.4g} from the optimum in the long run"
        lines.append(line)
    if costs and costs[0].errors is None:
        lines.append("the error is known on quadratics with a stable step size only: run it to see")
    elif costs and costs[0].clipped > 0:
        lines.append(
            f"{costs[0].clipped:.0%} of the records are clipped at the optimum, which the errors "
            "leave out: a larger clip has less bias and more noise"
        )
    plans, more = _plan_settings(config, wanted)
    if out is not None:
        _draw(plans, out)
    answer: dict[str, Any] = {"plan": [cost._asdict() for cost in costs]}
    for name, made in plans.items():
        answer[name] = [one._asdict() for one in made.proposals]
    print_answer(answer, [*lines, *more], as_json)


def _plan_settings(config: Any, epsilons: list[float]) -> tuple[dict[str, PrivatePlan], list[str]]:
    """Return the errors after the last round, as configured and at best, and lines that tell them.

    Nothing is returned where theory does not know them.
    """
    from fedscaffold.cli.theory import private_plan_lines
    from fedscaffold.theory.private_plan import plan_privacy

    if config.privacy.unit == "client":
        return {}, ["the noise of whole clients adds up in c, so SCAFFOLD has no such error"]
    shared = {
        "delta": config.privacy.delta,
        "rounds": config.rounds,
        "clip": config.privacy.clip,
        "cohort": config.cohort,
        "weights": config.weights,
    }
    ways: dict[str, dict[str, Any]] = {"best": {}}
    if isinstance(config.lr, float) and isinstance(config.local_steps, int):
        rate = 1.0 if config.batch_size is None else config.batch_size
        if isinstance(rate, float):
            fixed = {"rate": rate, "local_steps": config.local_steps, "lr": config.lr}
            ways = {"configured": fixed} | ways
    try:
        made = {
            name: plan_privacy(config.problem, epsilons=epsilons, **shared, **given)
            for name, given in ways.items()
        }
    except InputError as error:
        return {}, [f"no error after {config.rounds} rounds is known: {error}"]
    titles = {"configured": "as configured", "best": "with the least error"}
    told = [line for name, one in made.items() for line in private_plan_lines(titles[name], one)]
    return made, list(dict.fromkeys(told))


def _draw(plans: dict[str, PrivatePlan], out: Path) -> None:
    """Draw the errors after the last round against epsilon, in the format of the file's suffix."""
    if not plans:
        raise InputError("nothing to draw: errors are known on smooth problems that are not large")
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    epsilons = sorted({one.epsilon for one in plans["best"].proposals})
    for name, made in plans.items():
        for algorithm, marker, color in (("scaffold", "o", "C0"), ("fedavg", "s", "C1")):
            errors = [one.error for one in made.proposals if one.algorithm == algorithm]
            axes.loglog(
                epsilons,
                errors,
                marker=marker,
                markersize=9 if marker == "o" else 5,
                fillstyle="none",
                color=color,
                linestyle="-" if name == "best" else "--",
                label=f"{algorithm}, {name}",
            )
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.xaxis.minorticks_off()
    rounds = plans["best"].rounds
    axes.set(xlabel="epsilon", ylabel=f"predicted distance to the optimum, round {rounds}")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


@privacy_app.command(epilog="Example: fedscaffold privacy audit runs/latest --canaries 2000")
def audit(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|CONFIG.toml", help="A run's folder, or a configuration.")
    ],
    canaries: Annotated[int, typer.Option(help="Number of canaries.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound.")] = 0.95,
    sets: Sets = None,
    as_json: Json = False,
) -> int:
    """Attack the mechanism with the settings of a run: a lower bound on epsilon beside the claim.

    The audit of a run is kept in its folder, for the statement. Exit code 1 if refuted.
    """
    folder = path if path.is_dir() else None
    config: Any = _private_config(path if folder is None else folder / "config.toml", sets)
    import numpy as np

    from fedscaffold.simulation import audit_privacy
    from fedscaffold.simulation.resolve import local_work, poisson_rates

    found = audit_privacy(
        config.privacy,
        rate=1.0 if config.privacy.unit == "client" else float(poisson_rates(config).max()),
        local_steps=int(np.max(local_work(config).steps)),
        rounds=config.rounds,
        canaries=canaries,
        confidence=confidence,
        seed=config.seed,
    )
    says = "REFUTED: the mechanism is broken" if found.refuted else "not refuted"
    lines = [
        f"claimed: epsilon {found.claimed:.4g} for a client that attends all rounds",
        f"attack: {found.correct} of {found.guesses} guesses right, {found.canaries} canaries",
        f"epsilon is at least {found.found:.4g} with confidence {found.confidence:g}: {says}",
    ]
    lines += [f"an identity fails: {fault}" for fault in found.faults]
    if folder is not None:
        from fedscaffold.state.files import write_whole

        write_whole(folder / AUDIT, "; ".join(lines) + "\n")
    print_answer({**found._asdict(), "refuted": found.refuted}, lines, as_json)
    return int(found.refuted)


def _private_config(path: Path, sets: list[str] | None) -> Any:
    """Return the arguments of a configuration's run, which must be private."""
    from fedscaffold.experiments.config_file import load, run_arguments

    config = load(path, sets or [])
    given = run_arguments(config)
    if given["privacy"] is None:
        raise InputError(f"{path} has no table [privacy]: give clip, noise and delta")
    built = prepare_problem(config)
    from fedscaffold.algorithms import make
    from fedscaffold.run_config import RunConfig

    algorithm = make(config.algorithm.name, **config.algorithm.parameters)
    given |= {"progress": False, "every": None}
    return RunConfig(algorithm, built.problem, **given)
