"""The verbs, their options and examples; what they do is in the rooms they call."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.team import ALONE, Coordinator, Deadline, Devices, Processes, ProcessId, Team, team_of, watched

if TYPE_CHECKING:
    from fedscaffold.experiments.config import Config
    from fedscaffold.experiments.federation import Built

__all__ = [
    "DataDir",
    "Fresh",
    "Json",
    "Log",
    "Watch",
    "app",
    "command_typed",
    "only",
    "plain",
    "prepared",
    "progress",
    "say",
]

app = typer.Typer(
    name="fedscaffold",
    help="Federated optimisation that does not drift: SCAFFOLD and its family.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The data sets and who holds what.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DataDir = Annotated[str | None, typer.Option("--data", help="Folder with the data files (or FEDSCAFFOLD_DATA).")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew even where something unfinished is.")]
Watch = Annotated[bool, typer.Option("--watch", help="Serve a live page of the run on this machine.")]
Log = Annotated[list[str] | None, typer.Option("--log", help="Also tell tensorboard, wandb or trackio; repeatable.")]


@app.command(epilog="Example: fedscaffold demo --out runs/demo")
def demo(out: Out = Path("runs/demo"), fresh: Fresh = False, as_json: Json = False) -> None:
    """Compare SGD, FedAvg, FedProx and SCAFFOLD on digits split by label among 20 clients."""
    from fedscaffold.cli.compare import carry_out
    from fedscaffold.experiments.config import parse

    config = parse(
        "rounds = 60\n[problem]\ndataset = 'digits'\nsplit = 'similarity:0'\nclients = 20\nmodel = 'softmax'\n"
        "[local]\nepochs = 5\nbatch_size = 0.2\nlr = 'tuned'\n[cohort]\nsize = 0.2"
    )
    carry_out(config, "sgd,fedavg,fedprox,scaffold", 3, "accuracy:0.9", out, fresh, as_json)


@app.command(epilog="Example: fedscaffold run config.toml --set local.lr=0.2 --set algorithm.name=fedavg")
def run(
    path: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration.")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override a key: a.b=c.")] = None,
    fresh: Fresh = False,
    watch: Watch = False,
    log: Log = None,
    devices: Devices = 1,
    coordinator: Coordinator = None,
    processes: Processes = 1,
    process_id: ProcessId = None,
    deadline: Deadline = 60,
    data: DataDir = None,
    as_json: Json = False,
) -> int:
    """Run one configuration; its folder gets the resolved config, checkpoints, metrics and a report."""
    from fedscaffold.cli.resume import carry_out
    from fedscaffold.cli.watch import shown
    from fedscaffold.experiments.config import load

    seen_by = shown(watch, log)
    config = load(path, [*(sets or []), *_data_override(data)])
    team, folder = team_of(devices, coordinator, processes, process_id, deadline), Path(config.output.dir)
    return watched(team, folder, lambda: carry_out(config, folder, as_json, fresh, team, seen_by))


@app.command(
    epilog="Example: fedscaffold compare --dataset digits --split similarity:0 --model softmax --clients 20 "
    "--cohort 0.2 --algorithms scaffold,fedavg --rounds 200 --local-epochs 5 --batch-size 0.2 --lr tuned "
    "--target accuracy:0.9 --seeds 3"
)
def compare(
    dataset: Annotated[
        str, typer.Option(help="Data set, or quadratic, synthetic-linear, synthetic-logistic.")
    ] = "digits",
    split: Annotated[str, typer.Option(help="similarity:S, dirichlet:A, shards:K, iid or natural.")] = "similarity:0",
    model: Annotated[str, typer.Option(help="softmax, mlp:WIDTH, logistic or linear.")] = "softmax",
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[str, typer.Option(help="Share (0.2, 1.0) or number (5) of clients in a round.")] = "1.0",
    algorithms: Annotated[
        str, typer.Option(help="Names, with commas between, or 'all' that go with the rest.")
    ] = "scaffold,fedavg",
    rounds: Annotated[int, typer.Option(help="Rounds at most.")] = 100,
    local_epochs: Annotated[int | None, typer.Option(help="Passes over the client's records in a round.")] = None,
    local_steps: Annotated[int | None, typer.Option(help="Instead: steps in a round.")] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Share (0.2) or number (32) of records; all by default.")
    ] = None,
    lr: Annotated[str, typer.Option(help="Local step size, or 'tuned'.")] = "0.1",
    target: Annotated[str | None, typer.Option(help="Metric and value: accuracy:0.9.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    weights: Annotated[str, typer.Option(help="equal or records.")] = "equal",
    precision: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override any config key: a.b=c.")] = None,
    data: DataDir = None,
    out: Out = Path("runs/compare"),
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Compare algorithms over seeds: rounds and bytes to a target, with spread; table, CSV, LaTeX and a page.

    Runs are kept as they end: after Ctrl-C or a crash the same command goes on with those that are missing.
    """
    from fedscaffold.cli.compare import carry_out
    from fedscaffold.experiments.config import parse

    if (local_epochs is None) == (local_steps is None):
        raise InputError("give either --local-epochs or --local-steps")
    given: list[tuple[str, Any]] = [
        ("problem.dataset", dataset), ("problem.split", split), ("problem.model", model), ("problem.clients", clients),
        ("cohort.size", cohort), ("rounds", rounds), ("local.epochs", local_epochs), ("local.steps", local_steps),
        ("local.batch_size", batch_size), ("local.lr", lr), ("weights", weights), ("precision", precision),
    ]  # fmt: skip
    overrides = [f"{key}={value}" for key, value in given if value is not None]
    config = parse("", [*overrides, *_data_override(data), *(sets or [])], source="compare")
    carry_out(config, algorithms, seeds, target, out, fresh, as_json)


@data_app.command("list", epilog="Example: fedscaffold data list")
def data_list(as_json: Json = False) -> None:
    """Name the data sets and the ways to split them."""
    from fedscaffold import data

    answer = {"datasets": sorted(data.DATASETS), "splits": dict(data.SPLITS)}
    lines = ["data sets: " + ", ".join(answer["datasets"]), "splits: " + ", ".join(data.SPLITS.values())]
    say(answer, lines, as_json)


@data_app.command("show", epilog="Example: fedscaffold data show --dataset digits --split dirichlet:0.1 --clients 10")
def data_show(
    dataset: Annotated[str, typer.Option(help="Data set.")] = "digits",
    split: Annotated[str, typer.Option(help="similarity:S, dirichlet:A, shards:K, iid or natural.")] = "similarity:0",
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    data: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also draw it: a .html, .png, .svg or .pdf file.")] = None,
    as_json: Json = False,
) -> None:
    """Print and draw who holds what."""
    from fedscaffold.cli.show import show

    answer, lines = show(dataset, split, clients, seed, None if data is None else Path(data), out)
    say(answer, lines, as_json)


@app.command(epilog="Example: fedscaffold conform --target mypackage.adapter:run")
def conform(
    target: Annotated[
        str | None,
        typer.Option(help="module:name of an adapter, or of an algorithm; our own SCAFFOLD by default."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="A row, or a family of rows; may be repeated.")
    ] = None,
    precision: Annotated[str, typer.Option(help="The target's arithmetic: float64 or float32.")] = "float64",
    faults: Annotated[
        bool, typer.Option("--faults", help="Instead: the fault scorecard of the deployed code.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Run the identities every SCAFFOLD must satisfy, on ours or on anybody's; or the faults of deployment."""
    from fedscaffold.cli.conform import judged, survived

    if faults and (target is not None or only or precision != "float64"):
        raise InputError("--faults judges our own deployment: leave --target, --only and --precision out")
    answer, lines, code = survived() if faults else judged(target, only or (), precision)
    say(answer, lines, as_json)
    return code


@app.command(epilog="Example: fedscaffold bench --only W1 --json")
def bench(
    only: Annotated[str | None, typer.Option(help="Work loads, with commas between: W1,W2,W3,W4.")] = None,
    growth: Annotated[bool, typer.Option(help="Also measure how cost grows with N, cohort and K.")] = True,
    as_json: Json = False,
) -> None:
    """Measure the simulator beside three PyTorch loops, in one run."""
    from fedscaffold.bench import measure

    answer = measure.everything(only, growth, lambda line: None if as_json else typer.echo(line, err=True))
    say(answer, measure.lines(answer), as_json)


@app.command(epilog="Example: fedscaffold report runs/first, or fedscaffold report runs --out comparison.html")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs, comparisons, or folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="The page to write.")] = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Make the page of a run anew, or one page that compares any number of runs; --log tells a tracker of them."""
    from fedscaffold.report import page
    from fedscaffold.report.adapters import replay
    from fedscaffold.report.comparison import comparison, sources

    for folder in folders if log else ():
        replay(folder, log or ())
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out must be a page such as comparison.html, got {out}")
    given = sources(folders)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    runs = sum(len(source.study.curves) for source in given)
    text = page(given[0].study) if runs == 1 else comparison(given)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say({"report": str(path), "runs": runs}, [f"report: {path} ({runs} run{'s' * (runs > 1)})"], as_json)


def only(context: typer.Context, what: str, allowed: tuple[str, ...]) -> None:
    """Refuse options that say nothing about a folder, which knows its own problem."""
    for option in context.command.params:
        typed = getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
        if typed and option.param_type_name == "option" and option.opts[0] not in allowed:
            raise InputError(f"{what} takes {' and '.join(allowed)} only, got {option.opts[0]}")


def prepared(config: Config, team: Team = ALONE) -> Built:
    """Build a configuration's problem, and set JAX up for the size of its local steps before it starts."""
    from fedscaffold.experiments.federation import build, step_flops
    from fedscaffold.experiments.machine import settle

    built = build(config.problem)
    settle(step_flops(built.problem, config.local.batch_size))
    team.begin()
    return built


def _data_override(data: str | None) -> list[str]:
    return [] if data is None else [f"problem.data={json.dumps(data)}"]


def command_typed() -> str:
    """The command as it was typed."""
    return shlex.join(["fedscaffold", *sys.argv[1:]])


def progress(line: str, as_json: bool) -> None:
    """Say how far something is, to somebody at a terminal."""
    if not as_json and sys.stderr.isatty():
        typer.echo(line, err=True)


def plain(value: Any) -> Any:
    """JSON has no NaN, no infinity and no NumPy numbers: the first two become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def say(answer: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """Print the answer: for programs as one JSON object, for people as lines."""
    typer.echo(json.dumps(plain(answer), allow_nan=False) if as_json else "\n".join(lines))
