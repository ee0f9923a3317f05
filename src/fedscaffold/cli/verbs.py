"""The main verbs of the command line, and helpers shared by all verbs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.multi_process import SINGLE_PROCESS, Team, process_options, run_supervised
from fedscaffold.cli.options import PROBLEM, config_options
from fedscaffold.parsing import plain

if TYPE_CHECKING:
    from fedscaffold.experiments.build_problem import Built
    from fedscaffold.experiments.config_file import Config

__all__ = [
    "DataDir",
    "Fresh",
    "Json",
    "Log",
    "Watch",
    "Workers",
    "app",
    "prepare_problem",
    "print_answer",
    "refuse_other_options",
    "typed_command",
]

app = typer.Typer(
    name="fedscaffold",
    help="Federated optimisation that does not drift: SCAFFOLD and its family.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="The data sets and who holds what.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DataDir = Annotated[
    str | None, typer.Option("--data", help="Folder with the data files (or FEDSCAFFOLD_DATA).")
]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that run side by side.  [default: one a core]")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start anew even where something unfinished is.")
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Serve a live page of the run on this machine.")
]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", help="Also tell tensorboard, wandb or trackio; repeatable."),
]


@app.command(epilog="Example: fedscaffold demo --out runs/demo")
def demo(
    out: Out = Path("runs/demo"),
    workers: Workers = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> int:
    """Compare SGD, FedAvg, FedProx and SCAFFOLD on digits split by label among 20 clients."""
    from fedscaffold.cli.comparison_folder import How, ask_comparison, run_comparison
    from fedscaffold.experiments.config_file import parse

    config = parse(
        "rounds = 60\n[problem]\ndataset = 'digits'\nsplit = 'similarity:0'\nclients = 20\nmodel = "
        "'softmax'\n"
        "[local]\nepochs = 5\nbatch_size = 0.2\nlr = 'tuned'\n[cohort]\nsize = 0.2"
    )
    asked = ask_comparison(config, "sgd,fedavg,fedprox,scaffold", 3, "accuracy:0.9", {})
    return run_comparison(config, *asked, out, fresh, How(as_json, workers))


@app.command(
    epilog="Example: fedscaffold run config.toml --set local.lr=0.2 --set algorithm.name=fedavg"
)
@process_options
def run(
    path: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration.")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override a key: a.b=c.")] = None,
    fresh: Fresh = False,
    watch: Watch = False,
    log: Log = None,
    team: Team = SINGLE_PROCESS,
    data: DataDir = None,
    as_json: Json = False,
) -> int:
    """Run one configuration; its folder holds the config, checkpoints, metrics and a report."""
    from fedscaffold.cli.resume import run_in_folder
    from fedscaffold.cli.watch import check_viewers
    from fedscaffold.experiments.build_problem import refuse_unused_keys
    from fedscaffold.experiments.config_file import load

    seen_by = check_viewers(watch, log)
    config = load(path, [*(sets or []), *_data_override(data)])
    refuse_unused_keys(config, sets or [])
    folder = Path(config.output.dir)
    return run_supervised(
        team, folder, lambda: run_in_folder(config, folder, as_json, fresh, team, seen_by)
    )


@app.command(
    epilog="Example: fedscaffold compare --dataset digits --split similarity:0 --model softmax "
    "--clients 20 "
    "--cohort 0.2 --algorithms scaffold,fedavg --rounds 200 --local-epochs 5 --batch-size 0.2 --lr "
    "tuned "
    "--target accuracy:0.9 --seeds 3 --over problem.split=similarity:0,iid"
)
@config_options(
    *PROBLEM,
    "cohort.size",
    "rounds",
    "local.epochs",
    "local.steps",
    "local.batch_size",
    "local.lr",
    "weights",
    "precision",
)
def compare(
    overrides: list[str],
    algorithms: Annotated[
        str, typer.Option(help="Names, with commas between, or 'all' that go with the rest.")
    ] = "scaffold,fedavg",
    target: Annotated[str | None, typer.Option(help="Metric and value: accuracy:0.9.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    over: Annotated[
        list[str] | None,
        typer.Option(help="Compare values of any config key too: a.b=1,2; repeatable."),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Override any config key: a.b=c.")
    ] = None,
    out: Out = Path("runs/compare"),
    workers: Workers = None,
    slurm: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run nothing: write a SLURM job array that does."),
    ] = None,
    tasks: Annotated[int, typer.Option(help="Tasks of the job array.")] = 8,
    fresh: Fresh = False,
    as_json: Json = False,
) -> int:
    """Compare algorithms, and values of any other key, over seeds, on all cores.

    Rounds and bytes to a target, with spread: table, CSV, LaTeX and a page.

    Runs are kept as they end: after Ctrl-C or a crash the same command goes on with those that are
    missing. A run that fails does not end the others; the exit code is then 1.
    """
    from fedscaffold.cli.comparison_folder import (
        How,
        ask_comparison,
        run_comparison,
        write_slurm,
    )
    from fedscaffold.experiments.build_problem import refuse_unused_keys
    from fedscaffold.experiments.config_file import parse, parse_over

    config = parse("", [*overrides, *(sets or [])], source="compare")
    varied = parse_over(over or [])
    work = [config.local.epochs is not None or "local.epochs" in varied]
    work += [config.local.steps is not None or "local.steps" in varied]
    if sum(work) != 1:
        raise InputError("give either --local-epochs or --local-steps")
    refuse_unused_keys(config, sets or [])
    asked = ask_comparison(config, algorithms, seeds, target, varied)
    if slurm is not None:
        print_answer(*write_slurm(config, *asked, out, fresh, slurm, tasks), as_json)
        return 0
    return run_comparison(config, *asked, out, fresh, How(as_json, workers))


@data_app.command("list", epilog="Example: fedscaffold data list")
def data_list(as_json: Json = False) -> None:
    """Name the data sets and the ways to split them."""
    from fedscaffold import data

    answer = {"datasets": sorted(data.DATASETS), "splits": dict(data.SPLITS)}
    lines = [
        "data sets: " + ", ".join(answer["datasets"]),
        "splits: " + ", ".join(data.SPLITS.values()),
    ]
    print_answer(answer, lines, as_json)


@data_app.command(
    "show",
    epilog="Example: fedscaffold data show --dataset digits --split dirichlet:0.1 --clients 10",
)
def data_show(
    dataset: Annotated[str, typer.Option(help="Data set.")] = "digits",
    split: Annotated[
        str, typer.Option(help="similarity:S, dirichlet:A, shards:K, iid or natural.")
    ] = "similarity:0",
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    data: DataDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also draw it: a .html, .png, .svg or .pdf file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print and draw who holds what."""
    from fedscaffold.cli.data import show

    answer, lines = show(dataset, split, clients, seed, None if data is None else Path(data), out)
    print_answer(answer, lines, as_json)


@app.command(epilog="Example: fedscaffold conform --target mypackage.adapter:run")
def conform(
    target: Annotated[
        str | None,
        typer.Option(
            help="module:name of an adapter, or of an algorithm; our own SCAFFOLD by default."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW", help="A row, or a family of rows; may be repeated."),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="The target's arithmetic: float64 or float32.")
    ] = "float64",
    as_json: Json = False,
) -> int:
    """Run the identities every SCAFFOLD must satisfy, on ours or on anybody's."""
    from fedscaffold.conformance.__main__ import judged

    answer, lines, code = judged(target, only or (), precision)
    print_answer(answer, lines, as_json)
    return code


@app.command(
    epilog="Example: fedscaffold report runs/first; fedscaffold report runs --out comparison.html"
)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs, comparisons, or folders of them.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="The page to write.")
    ] = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Make the page of a run anew, or one page that compares any number of runs.

    --log tells a tracker of them.
    """
    from fedscaffold.runs import page, sources
    from fedscaffold.runs.trackers import replay

    for folder in folders if log else ():
        replay(folder, log or ())
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out must be a page such as comparison.html, got {out}")
    given = sources(folders)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    runs = sum(len(source.study.runs) for source in given)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(given), encoding="utf-8")
    print_answer(
        {"report": str(path), "runs": runs},
        [f"report: {path} ({runs} run{'s' * (runs > 1)})"],
        as_json,
    )


def refuse_other_options(context: typer.Context, what: str, allowed: tuple[str, ...]) -> None:
    """Refuse options that do not apply to an existing folder, which has its own configuration."""
    for option in context.command.params:
        typed = (
            getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
        )
        if typed and option.param_type_name == "option" and option.opts[0] not in allowed:
            raise InputError(f"{what} takes {' and '.join(allowed)} only, got {option.opts[0]}")


def prepare_problem(
    config: Config, team: Team = SINGLE_PROCESS, side_by_side: bool = False
) -> Built:
    """Build a configuration's problem, and let JAX cache its programs and join its processes.

    Args:
        config: The configuration.
        team: The processes of the run.
        side_by_side: Whether many runs share the cores, with one thread each.
    """
    from fedscaffold.experiments.build_problem import build, cache_programs

    built = build(config.problem)
    cache_programs()
    if side_by_side or config.local.lr == "tuned":
        os.environ.setdefault("PJRT_NPROC", "1")
    team.begin()
    return built


def _data_override(data: str | None) -> list[str]:
    return [] if data is None else [f"problem.data={json.dumps(data)}"]


def typed_command() -> str:
    """Return the command line as typed."""
    return shlex.join(["fedscaffold", *sys.argv[1:]])


def print_answer(answer: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """Print the answer as one JSON object, or as lines."""
    typer.echo(json.dumps(plain(answer), allow_nan=False) if as_json else "\n".join(lines))
