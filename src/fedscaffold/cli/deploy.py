"""`deploy`: take a model from one file to a federation over a network."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import exit_code_of, exit_with_line, raise_on_signal
from fedscaffold.cli.verbs import Json, app, print_answer
from fedscaffold.parsing import plain, record
from fedscaffold.privacy.accounting import round_up

if TYPE_CHECKING:
    from fedscaffold.deploy.server import Outcome
    from fedscaffold.deploy.server_loop import Stopped
    from fedscaffold.deploy.settings import Settings
    from fedscaffold.problems import Problem

__all__ = ["deploy_app"]

deploy_app = typer.Typer(
    help="Take a model to a real federation: one file, one TOML, then simulate, local, kit.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(deploy_app, name="deploy")

AppDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder with app.py and federation.toml.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder for state, log, metrics and model.")]
Missing = Annotated[
    bool,
    typer.Option(
        "--allow-missing", help="Exit with 0 even if a site never counted; else the exit code is 1."
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Rounds in all, instead of the TOML's.")]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Progress and logs as JSON, one object a line.")
]


@deploy_app.command(epilog="Example: fedscaffold deploy new hospitals --torch")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    torch: Annotated[bool, typer.Option("--torch", help="A torch app (the default).")] = False,
    jax: Annotated[bool, typer.Option("--jax", help="A JAX app.")] = False,
    as_json: Json = False,
) -> None:
    """Write a working example and its test: heart disease at four hospitals, or digits."""
    from fedscaffold.deploy.templates import write_example

    if torch and jax:
        raise InputError("give either --torch or --jax")
    paths = [str(path) for path in write_example(folder, "jax" if jax else "torch")]
    next_ = f"try it: fedscaffold deploy simulate {folder}, then: fedscaffold deploy local {folder}"
    print_answer({"files": paths}, [*paths, next_], as_json)


@deploy_app.command(epilog="Example: fedscaffold deploy simulate hospitals --out runs/hospitals")
def simulate(
    folder: AppDir,
    out: Out = Path("runs/deploy"),
    rounds: Rounds = None,
    engine: Annotated[
        str,
        typer.Option(
            help="in-process: the deployed code without a network; simulator: our simulator."
        ),
    ] = "in-process",
    allow_missing: Missing = False,
    as_json: Json = False,
) -> int:
    """Run exactly this app on this machine, without processes or network."""
    if checks.choice("engine", engine, ("in-process", "simulator")) == "simulator":
        return _simulator(folder, out, rounds, as_json)
    with _new_folder(out, folder, "in-process"):
        return _in_process(folder, out, rounds, allow_missing, as_json)


@deploy_app.command(epilog="Example: fedscaffold deploy local hospitals --out runs/hospitals")
def local(
    folder: AppDir,
    out: Out = Path("runs/deploy"),
    timeout: Annotated[float, typer.Option(help="Seconds after which to give up.")] = 3600.0,
    allow_missing: Missing = False,
    log_json: LogJson = False,
    as_json: Json = False,
) -> int:
    """Start a real federation on this machine (SuperLink, SuperNodes, TLS, keys) and run it."""
    checks.number("timeout", timeout, above=0)
    with _new_folder(out, folder, "local"):
        return _local(folder, out, timeout, allow_missing, log_json, as_json)


@deploy_app.command(epilog="Example: fedscaffold deploy resume runs/hospitals --rounds 20")
def resume(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The --out folder of `deploy simulate` or `deploy local`."
        ),
    ],
    rounds: Rounds = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which to give up.")] = 3600.0,
    allow_missing: Missing = False,
    log_json: LogJson = False,
    as_json: Json = False,
) -> int:
    """Go on after a crash, or for more rounds: from the last round that was committed."""
    from fedscaffold.state.files import owned

    checks.number("timeout", timeout, above=0)
    path = out / "deployment.json"
    if not path.is_file():
        raise InputError(f"{out} is not the folder of a deployment: it has no deployment.json")
    facts = record(path, app=str, engine=str)
    with owned(out):
        if facts["engine"] == "in-process":
            return _in_process(Path(facts["app"]), out, rounds, allow_missing, as_json)
        if facts["engine"] == "simulator":
            raise InputError(
                f"{out} was run in the simulator, which keeps no state: run `deploy simulate` again"
            )
        if rounds is not None:
            raise InputError("for a federation of processes, set rounds in its federation.toml")
        return _local(Path(facts["app"]), out, timeout, allow_missing, log_json, as_json)


@deploy_app.command(epilog="Example: fedscaffold deploy kit sites.toml --out kits")
def kit(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="SITES.toml", help="Server address, app folder, sites' data folders."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="A new folder, or the kit to change.")] = Path(
        "kits"
    ),
    add: Annotated[
        str | None, typer.Option("--add", metavar="SITE", help="Add a site to the kit.")
    ] = None,
    rotate: Annotated[
        str | None,
        typer.Option("--rotate", metavar="SITE|server", help="Replace a key in the kit."),
    ] = None,
    revoke: Annotated[
        str | None,
        typer.Option("--revoke", metavar="SITE", help="Revoke the key of a site that has left."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make one folder for the server and one for each site, or change them.

    Certificates, keys, start scripts, systemd units, the settings of a proxy.
    """
    from fedscaffold.deploy import provisioning

    asked = {
        name: site
        for name, site in (("add", add), ("rotate", rotate), ("revoke", revoke))
        if site is not None
    }
    if len(asked) > 1:
        raise InputError(f"give one of --{' and --'.join(asked)} at a time")
    if not asked:
        folders = provisioning.make_kit(path, out)
        hint = f"keep {folders[0]} off line; carry the others to their machines"
    else:
        change = {
            "add": provisioning.add_site,
            "rotate": provisioning.rotate,
            "revoke": provisioning.revoke,
        }
        ((name, site),) = asked.items()
        folders = change[name](path, out, site)
        hint = "carry what changed to its machine and run install.sh there" + (
            ", which restarts the link and the proxy"
            if site == "server"
            else "; on the server then register-sites.sh and run.sh"
        )
    lines = [f"{folder}/" for folder in folders]
    print_answer({"folders": [str(folder) for folder in folders]}, [*lines, hint], as_json)


@deploy_app.command(epilog="Example: fedscaffold deploy check kits/cleveland")
def check(
    folder: Annotated[
        Path, typer.Argument(metavar="KIT", help="A site's folder, made by `deploy kit`.")
    ],
    as_json: Json = False,
) -> int:
    """Preflight on a site: versions, certificate, server, clock, data, model.

    Exit code 1 if something is wrong.
    """
    from fedscaffold.deploy.provisioning import check as preflight

    if not (folder / "site.json").is_file():
        raise InputError(
            f"{folder} is not a site's folder: it has no site.json; `fedscaffold deploy kit` makes "
            "them"
        )
    findings = preflight(folder)
    lines = [f"{'good' if f.good else 'BAD '}  {f.what}: {f.said}" for f in findings]
    good = all(finding.good for finding in findings)
    print_answer(
        {"good": good, "findings": [finding._asdict() for finding in findings]}, lines, as_json
    )
    return 0 if good else 1


@deploy_app.command(epilog="Example: fedscaffold deploy bundle runs/hospitals --out bundle.zip")
def bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a deployment, or of a kit.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The zip file to write.")] = Path("bundle.zip"),
    as_json: Json = False,
) -> None:
    """Collect what support needs: status, metrics, audit log, settings, versions.

    No data, keys, states, models, code, or texts of errors at sites.
    """
    from fedscaffold.deploy.bundle import write_bundle

    made = write_bundle(folder, out)
    said = f"{made.path}: {len(made.files)} files; {made.left_out} others were left out"
    print_answer(
        {"path": str(made.path), "files": made.files, "left_out": made.left_out},
        [*(f"  {name}" for name in made.files), said],
        as_json,
    )


@deploy_app.command(epilog="Example: fedscaffold deploy export runs/hospitals --out model.onnx")
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a deployment.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The file to write: .safetensors, .onnx or .pt2 (torch.export), or a new folder "
            "for an MLflow model.",
        ),
    ] = Path("model.safetensors"),
    app_folder: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="The app's folder, if it has moved."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export the trained model for use; torch modules also as ONNX, torch.export or MLflow."""
    from fedscaffold.deploy.apps import open_app
    from fedscaffold.deploy.export_model import export_model

    if app_folder is None:
        if not (folder / "deployment.json").is_file():
            raise InputError(f"{folder} does not say which app was trained; give --app DIR")
        app_folder = Path(record(folder / "deployment.json", app=str)["app"])
    home = folder / "server" if (folder / "server" / "state").is_dir() else folder
    settings, learner = open_app(app_folder)
    made = export_model(home, settings, learner, out)
    said = [f"{made.path}: the model of round {made.round}, as {made.format}"]
    if made.difference is not None:
        said.append(f"loaded again, its outputs differ by {made.difference:.2g} at most")
    elif made.format != "safetensors":
        said.append("not loaded again: that needs onnxruntime")
    if not made.any_batch:
        said.append("it takes batches of one size only, as the module asks for it")
    print_answer({**made._asdict(), "path": str(made.path)}, said, as_json)


@deploy_app.command(epilog="Example: fedscaffold deploy metrics runs/hospitals --port 9464")
def metrics(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a deployment.")],
    port: Annotated[
        int | None,
        typer.Option(help="Serve them on this port of this machine, until interrupted."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a deployment's state in Prometheus' format, or serve it for Prometheus to scrape."""
    from prometheus_client import generate_latest, start_http_server

    from fedscaffold.deploy.exporter import make_registry

    registry = make_registry(folder)
    if port is None:
        facts = {
            f"{sample.name}{json.dumps(sample.labels) if sample.labels else ''}": sample.value
            for family in registry.collect()
            for sample in family.samples
        }
        print_answer(facts, generate_latest(registry).decode().splitlines(), as_json)
        return
    try:
        _, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise InputError(f"port {port} cannot be used: {error.strerror}") from None
    typer.echo(f"http://127.0.0.1:{port}/metrics", err=True)
    thread.join()


@deploy_app.command(epilog="Example: fedscaffold deploy status runs/hospitals")
def status(
    out: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a deployment.")],
    as_json: Json = False,
) -> int:
    """Show the sites, whom the round waits for and since when, errors, disk, and the audit log."""
    from fedscaffold.deploy.audit import read_verified
    from fedscaffold.deploy.host import read_host
    from fedscaffold.deploy.server_state import peek_state
    from fedscaffold.deploy.worker import workers_of

    home = next(
        (folder for folder in (out, out / "server") if (folder / "status.json").is_file()), None
    )
    if home is None and (out / "deployment.json").is_file():
        since = time.time() - (out / "deployment.json").stat().st_mtime
        text = (
            f"starting for {since:.0f} s, no round yet; {out / 'logs'} says how far it is, and if "
            f"it was interrupted `fedscaffold deploy resume {out}` goes on"
        )
        print_answer({"phase": "starting", "seconds": since}, [text], as_json)
        return 0
    if home is None:
        raise InputError(f"{out} has no status.json: nothing was started there")
    kinds = {
        "phase": str,
        "round": int,
        "rounds": int,
        "at": float,
        "sites": dict,
        "waiting_for": list,
        "absent": list,
    }
    now = record(home / "status.json", **kinds) | read_host(home)._asdict()
    kept = peek_state(home / "state")
    events = read_verified(home / "audit.jsonl", None if kept is None else kept.audit)
    refused = [event for event in events if event["event"] == "refused"]
    broken = [
        f"broken {event['at']}: {event['note']}" for event in events if event["event"] == "broken"
    ]
    workers = workers_of(out)
    answer = {**now, "audit_events": len(events), "audit_broken": broken, "refused": refused[-10:]}
    lines = [*_status_lines(now, len(events), refused), *(f"  {line}" for line in broken)]
    lines += [
        f"  worker of {site}: {told['requests']} requests, started {told['starts']} times"
        for site, told in workers.items()
    ]
    print_answer({**answer, "workers": workers}, lines, as_json)
    return 0


def _status_lines(now: dict[str, Any], events: int, refused: list[dict[str, Any]]) -> list[str]:
    """Return the lines of `deploy status`."""
    age = time.time() - now["at"]
    gauge = "kept by the clients" if now["residual"] is None else f"residual {now['residual']:.2g}"
    phase = f"{now['phase']} ({now['exchange']})" if now.get("exchange") else now["phase"]
    lines = [f"{phase}, round {now['round']} of {now['rounds']}, {gauge}, {age:.0f} s ago"]
    for site, facts in sorted(now["sites"].items()):
        seen = (
            "not yet heard"
            if facts["last_seen"] is None
            else f"heard {time.time() - facts['last_seen']:.0f} s ago"
        )
        waits = f", {_waiting_line(now)} it" if site in now["waiting_for"] else ""
        spent = ""
        if facts.get("epsilon") is not None:
            spent = f", epsilon {round_up(facts['epsilon'])} at delta {facts['delta']:g}"
        lines.append(
            f"  {site}: {facts['records']} records, counted in round {facts['counted_in_round']}, "
            f"{seen}{waits}{spent}"
        )
    missed = now.get("missed", {})
    lines += [f"  {site}: not in this round: {why}" for site, why in now.get("failed", {}).items()]
    lines += [f"  {site}: absent" for site in now["absent"] if site not in missed]
    lines += [f"  {one['sentence']}" for one in missed.values()]
    lines += [
        f"  {_unmeasured_line(name, sites)}" for name, sites in now.get("unmeasured", {}).items()
    ]
    lines += [
        f"  refused {event['at']} {event['site']}: {event['reason']}" for event in refused[-5:]
    ]
    lines += [f"  warning: {said}" for said in now.get("warnings", [])]
    host = f"disk: {now['disk_free'] / 2**30:.1f} GiB free"
    if (days := now["certificate_days"]) is not None:
        host += f"; the server's certificate lasts {days:.0f} more days"
    return [*lines, host, f"audit log: {events} events, chain whole"]


def _waiting_line(now: dict[str, Any]) -> str:
    """Return since when the round waits, without a site's name."""
    opened = now.get("opened_at")
    return (
        "the round waits for"
        if opened is None
        else (f"the round has waited {time.time() - opened:.0f} s for")
    )


def _rounds(settings: Settings, given: int | None) -> int:
    return settings.rounds if given is None else checks.whole("--rounds", given)


@contextmanager
def _new_folder(out: Path, folder: Path, engine: str) -> Iterator[None]:
    """Take ownership of a folder not in use yet, and note what runs there, for `resume`."""
    from fedscaffold.state.files import make_folder, owned, write_private

    if not (folder / "federation.toml").is_file():
        raise FileNotFoundError(
            f"{folder / 'federation.toml'} not found; `fedscaffold deploy new DIR` writes one"
        )
    make_folder(out.absolute().parent)
    make_folder(out, private=True)
    with owned(out):
        if (out / "deployment.json").exists():
            go_on = f"`fedscaffold deploy resume {out}` goes on, or give another --out"
            raise InputError(f"{out} holds a deployment; {go_on}")
        write_private(
            out / "deployment.json",
            json.dumps({"app": str(folder.resolve()), "engine": engine}) + "\n",
        )
        yield


def _in_process(
    folder: Path, out: Path, rounds: int | None, allow_missing: bool, as_json: bool
) -> int:
    """Run or resume an app in this process; return the exit code."""
    from fedscaffold.deploy import InProcess, Server, Stopped, drive
    from fedscaffold.deploy.apps import open_app

    try:
        with exit_with_line(_resume_hint(out)):
            settings, learner = open_app(folder)
            server = Server(settings, learner.schema, learner.start, out, buffers=learner.buffers)
            done = drive(
                server,
                InProcess(learner, settings, out),
                _rounds(settings, rounds),
                tell=lambda outcome: _print_round(outcome, as_json),
                sleep=lambda seconds: None,  # all sites are in this process
            )
    except Stopped as stopped:
        return _print_stopped(stopped, out, as_json)
    except KeyboardInterrupt as stop:  # raised by the app itself
        return _print_interrupted(out, stop)
    return _print_summary({**done._asdict(), "model": str(done.model)}, out, allow_missing, as_json)


def _local(
    folder: Path, out: Path, timeout: float, allow_missing: bool, log_json: bool, as_json: bool
) -> int:
    """Run or resume a federation of local processes; return the exit code."""
    from fedscaffold.deploy import Stopped
    from fedscaffold.deploy.event_log import FORMAT, stderr_log
    from fedscaffold.deploy.local_cluster import Federation

    told = [""]
    if log_json:
        os.environ[FORMAT] = "json"  # and of all processes that are started

    def tell(text: str) -> None:
        if text != told[0] and (log_json or not as_json):
            told[0] = text
            stderr_log("deploy")(text) if log_json else typer.echo(text, err=True)

    def tell_status(now: dict[str, Any]) -> None:
        waits = f", waiting for {', '.join(now['waiting_for'])}" if now["waiting_for"] else ""
        tell(f"{now['phase']}: {now['round']} of {now['rounds']} rounds done{waits}")

    try:
        with raise_on_signal(), Federation(folder, out) as federation:
            federation.up(tell)
            tell("starting the server")
            federation.submit()
            answer = federation.outcome(timeout, tell_status)
    except Stopped as stopped:
        return _print_stopped(stopped, out, as_json)
    except KeyboardInterrupt as stop:
        return _print_interrupted(out, stop)
    return _print_summary(answer, out, allow_missing, as_json)


def _simulator(folder: Path, out: Path, rounds: int | None, as_json: bool) -> int:
    """Run an app in the simulator, with the same loss, start, data, algorithm and settings."""
    from fedscaffold.algorithms import make
    from fedscaffold.deploy.apps import open_app
    from fedscaffold.deploy.server_loop import write_model
    from fedscaffold.state.files import write_private

    settings, learner = open_app(folder)
    problem, local = _simulated_problem(settings, learner), settings.local
    from fedscaffold.simulation import simulate as run

    with _new_folder(out, folder, "simulator"):
        done = run(
            make(**settings.algorithm),
            problem,
            rounds=_rounds(settings, rounds),
            local_steps=local.steps,
            local_epochs=local.epochs,
            lr=(lambda round: local.at(round).lr) if local.schedule else local.lr,
            cohort=settings.cohort,
            batch_size=local.batch_size,
            draw=local.draw,
            drop_last=local.drop_last,
            accumulate=getattr(learner, "accumulate", 1),
            clip_norm=local.clip_norm,
            weights=settings.weights,
            seed=settings.seed,
            precision=settings.precision,
            buffers=local.buffers,
            privacy=settings.privacy,
        )
        values = zip(*(column.tolist() for column in done.history.values()), strict=True)
        rows = [plain(dict(zip(done.history, row, strict=True))) for row in values]
        write_private(
            out / "metrics.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        )
        model, facts = out / "model.safetensors", {"round": str(len(rows)), "run": done.digest}
        kept = {**learner.buffers, **(done.state or {})}
        write_model(model, learner.schema.filed(done.vector, kept), facts)
    last = {name: column[-1].item() for name, column in done.history.items()}
    answer = {"rounds": done.rounds, "residual": done.residual, "last": last, "digest": done.digest}
    said = [
        f"{done.rounds} rounds in the simulator",
        *(f"  {name} = {value:.6g}" for name, value in last.items()),
    ]
    print_answer(
        answer | {"folder": str(out), "model": str(model)}, [*said, f"model: {model}"], as_json
    )
    return 0


def _simulated_problem(settings: Settings, learner: Any) -> Problem:
    """Return the problem of a torch or JAX app; raise if the simulator has not what it asks for."""
    if settings.local.optimizer != "sgd":
        raise InputError(
            f"--engine simulator takes no local.optimizer = {settings.local.optimizer!r}; "
            "use --engine in-process"
        )
    if not hasattr(learner, "params") and not hasattr(learner, "module"):
        raise InputError("the simulator runs torch and JAX apps; use --engine in-process")
    from fedscaffold import problems

    clients = [learner.data(site) for site in settings.deploy.sites]
    if hasattr(learner, "module"):
        return problems.torch(learner.module, learner.loss, clients)
    return problems.Problem(learner.loss, learner.params, clients)


def _print_round(outcome: Outcome, as_json: bool) -> None:
    """Print one line for a round, on terminals only."""
    if not as_json and sys.stderr.isatty():
        word = "committed" if outcome.committed else "abandoned"
        means = ", ".join(f"{name} {value:.4g}" for name, value in outcome.metrics.items())
        typer.echo(
            f"round {outcome.round} {word}: heard "
            f"{len(outcome.heard)}{', ' + means if means else ''}",
            err=True,
        )


def _print_summary(answer: dict[str, Any], out: Path, allow_missing: bool, as_json: bool) -> int:
    """Print the outcome and the sites that did not count.

    Return 1 if a site never did, unless allowed.
    """
    gauge = answer["residual"]
    words = "kept by the clients" if gauge is None else f"residual {gauge:.2g}"
    lines = [f"{answer['rounds']} rounds, {words}, {answer['seconds']:.1f} s"]
    lines += [f"  {name} = {value:.6g}" for name, value in answer["metrics"].items()]
    lines += [f"  {_unmeasured_line(name, sites)}" for name, sites in answer["unmeasured"].items()]
    lines += [
        f"  {site} has spent epsilon {round_up(value)}, by its own word"
        for site, value in answer["epsilon"].items()
    ]
    never = [site for site, one in answer["missed"].items() if one["never_counted"]]
    said = [*lines, *_missed_lines(answer["missed"], out), f"model: {answer['model']}"]
    print_answer({**answer, "folder": str(out), "never_counted": never}, said, as_json)
    if not never or allow_missing:
        return 0
    typer.echo(
        f"fedscaffold: never counted: {', '.join(never)} (--allow-missing lets it pass)", err=True
    )
    return 1


def _missed_lines(missed: dict[str, Any], out: Path) -> list[str]:
    """Return which sites did not count and why, and where at the sites to find the error texts."""
    lines = [f"  {one['sentence']}" for one in missed.values()]
    if any("(reference " in one["cause"] for one in missed.values()):
        lines.append(
            f"  what an error says is in the site's own folder, errors/REFERENCE.log; here below "
            f"{out / 'sites'}"
        )
    return lines


def _unmeasured_line(name: str, sites: list[str]) -> str:
    return f"{name} is without {', '.join(sites)}: no finite number there"


def _print_stopped(stopped: Stopped, out: Path, as_json: bool) -> int:
    """Print why a run stopped, and which sites did not count; return the exit code."""
    typer.echo(f"fedscaffold: {stopped}", err=True)
    if as_json:
        print_answer(
            {"stopped": str(stopped), "missed": stopped.missed, "folder": str(out)}, [], as_json
        )
    else:
        for line in _missed_lines(stopped.missed, out):
            typer.echo(line, err=True)
    return 1


def _print_interrupted(out: Path, stop: KeyboardInterrupt) -> int:
    typer.echo(f"fedscaffold: {_resume_hint(out)}", err=True)
    return exit_code_of(stop)


def _resume_hint(out: Path) -> str:
    """Return the line to print after an interruption; committed rounds are kept."""
    return f"stopped; go on with: fedscaffold deploy resume {out}"
