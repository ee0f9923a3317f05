"""Read and write the folder of a run or a comparison.

A run:

    run.json        format, algorithm, seed, outcome, problem, command, versions, seconds, label
                    counts by client
    config.toml     resolved configuration: running it again gives the same bits
    rounds.jsonl    one line for each round, appended during the run (`fedscaffold.runs.round_log`)
    checkpoint/     checkpoints for `fedscaffold resume`
    report.html     the page

A comparison is a folder of run folders and a small index:

    index.json      format, names of the runs, and what they share: problem, command, table, label
                    counts by client
    runs/NAME/      a run, as above
    table.csv, table.tex, report.html

Folders of fedscaffold 0.1.0 (`study.json`, no format) are refused in one line.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold import parsing
from fedscaffold.checks import InputError, shown
from fedscaffold.runs.round_log import (
    FORMAT,
    NAME,
    OtherFormatError,
    RoundLog,
    count_agreeing_rounds,
    is_count,
    is_number,
    is_spent,
    is_text,
    write_log,
)

__all__ = [
    "INDEX",
    "RUN",
    "RunRecord",
    "Study",
    "find_studies",
    "read",
    "remove_study",
    "replace_study",
    "versions",
    "write",
]

RUN, INDEX, CONFIG, MEMBERS = "run.json", "index.json", "config.toml", "runs"
PACKAGES = (
    "fedscaffold",
    "numpy",
    "jax",
    "jaxlib",
    "optax",
    "scikit-learn",
    "scipy",
    "dp-accounting",
)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: its configuration, its metrics by round, and its outcome.

    Attributes:
        algorithm: Its name.
        seed: The seed of its draws.
        lr: The local step size, or None where it is not one number.
        columns: By round: `round`, the metrics, `residual`, `bytes_up`, `bytes_down`.
        diverged_at: The round at which it diverged, or None.
        reached_at: The first round that meets the study's target, or None.
        advice: Recommended action after a divergence.
        residual: |c - sum p_i c_i| at the end.
        explained: The residual that rounding explains.
        digest: Fingerprint of the model's bits.
        config: Its resolved configuration, as TOML.
        seconds: Time of its rounds, compiling left out.
        clock: (K, 2) rounds, and seconds until the end of each, from the log.
        privacy: What a private run spent, and how; None for others.
    """

    algorithm: str
    seed: int
    columns: Mapping[str, NDArray[Any]]
    lr: float | None = None
    diverged_at: int | None = None
    reached_at: int | None = None
    advice: str | None = None
    residual: float = math.nan
    explained: float = math.nan
    digest: str = ""
    config: str = ""
    seconds: float | None = None
    clock: NDArray[Any] | None = None
    privacy: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"RunRecord({self.algorithm}, seed {self.seed}, {len(self.columns['round'])} rounds)"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs on one problem: a single run, or a comparison.

    Attributes:
        problem: One sentence: data, split, model.
        runs: The runs.
        target: Metric and value to reach, or None.
        rows: The table of a comparison, one row for each algorithm.
        label_counts: (N, classes) records of each label by client, or None.
        precision: float32 or float64.
        command: The command that was typed.
        versions: Versions of the packages that results depend on.
        seconds: Time by phase.
    """

    problem: str
    runs: list[RunRecord]
    target: tuple[str, float] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    label_counts: NDArray[np.int64] | None = None
    precision: str = "float32"
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Study({self.problem!r}, {len(self.runs)} run{'s' * (len(self.runs) != 1)})"


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on.

    >>> "fedscaffold" in versions()
    True
    """
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def write(study: Study, folder: Path, log: Path | None = None) -> None:
    """Write a study: a run's folder, or a comparison's with one folder for each run.

    Args:
        study: What to write.
        folder: Destination; created if missing.
        log: A `rounds.jsonl` written by the run itself. It is kept if it agrees with the run's
            metrics; otherwise the log is rewritten from these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if len(study.runs) == 1:
        _write_run(study, study.runs[0], folder, log)
        return
    names = _run_names(study.runs)
    for name, run in zip(names, study.runs, strict=True):
        (folder / MEMBERS / name).mkdir(parents=True, exist_ok=True)
        took = {} if run.seconds is None else {"wall": run.seconds}
        _write_run(replace(study, label_counts=None, seconds=took), run, folder / MEMBERS / name)
    _write_json(
        folder / INDEX,
        {"runs": names} | _shared_fields(study) | {"rows": parsing.plain(study.rows)},
    )


def replace_study(study: Study, folder: Path, texts: Mapping[str, str] | None = None) -> None:
    """Write a study and further files in place of the one that a folder holds.

    Everything is written to a temporary folder and then moved, `run.json` or `index.json` last, so
    that an interruption leaves a complete study or one that is recognised as unfinished.

    Args:
        study: What to write.
        folder: Destination. A `rounds.jsonl` there is the run's own.
        texts: Further files, by name.
    """
    new, old = folder / ".new", folder / ".old"
    for path in (new, old):
        if path.is_symlink():
            path.unlink()  # do not write to its target
        shutil.rmtree(path, ignore_errors=True)
    write(study, new, folder / NAME)
    for name, text in (texts or {}).items():
        (new / name).write_text(text, encoding="utf-8")
    remove_study(folder)
    for path in sorted(new.iterdir(), key=lambda path: path.name in (RUN, INDEX)):
        path.replace(folder / path.name)
    new.rmdir()


def remove_study(folder: Path) -> None:
    """Remove the study that a folder holds, if any; its log and checkpoints stay."""
    for name in (RUN, INDEX, "study.json", "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    members, old = folder / MEMBERS, folder / ".old"
    if members.is_symlink():
        members.unlink()
    elif members.is_dir():
        members.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _run_names(runs: list[RunRecord]) -> list[str]:
    """Return a distinct folder name for each run."""
    words = [
        f"{re.sub(r'[^a-z0-9]+', '-', run.algorithm.lower())[:40].strip('-')}-seed-{run.seed}"
        for run in runs
    ]
    return [word if words.count(word) == 1 else f"{word}-{k}" for k, word in enumerate(words)]


def _write_run(study: Study, run: RunRecord, folder: Path, log: Path | None = None) -> None:
    (folder / CONFIG).write_text(run.config, encoding="utf-8", newline="")
    how = "finished"
    if run.diverged_at is not None:
        how = "diverged"
    elif run.reached_at is not None:
        how = "target"
    done = len(run.columns["round"])
    if log is None or not _is_log_of(log, run):
        facts = {
            "rounds": done,
            "algorithm": run.algorithm,
            "seed": run.seed,
            "problem": study.problem,
        }
        facts |= {"precision": study.precision, "target": study.target}
        write_log(folder, facts, run.columns, how)
    about = {name: getattr(run, name) for name in RUN_KINDS if name not in ("columns", "rounds")}
    about |= {
        "columns": {name: column.dtype.name for name, column in run.columns.items()},
        "rounds": done,
    }
    about |= {} if run.privacy is None else {"privacy": run.privacy}
    _write_json(folder / RUN, parsing.plain(about) | _shared_fields(study))


def _is_log_of(path: Path, run: RunRecord) -> bool:
    log = RoundLog(path.parent)
    return log.update() and log.round == len(run.columns["round"]) == count_agreeing_rounds(
        log.columns, run.columns
    )


def _shared_fields(study: Study) -> dict[str, Any]:
    about = {name: getattr(study, name) for name in SHARED}
    return about | {
        "label_counts": None if study.label_counts is None else study.label_counts.tolist()
    }


def _write_json(path: Path, about: dict[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, **about}, indent=1, default=parsing.plain, allow_nan=False)
    path.write_text(text, encoding="utf-8")


def find_studies(paths: list[Path]) -> list[Path]:
    """Find all runs, ended or not, and comparisons in or below the given paths, each once.

    >>> find_studies([Path("nowhere")])
    Traceback (most recent call last):
    FileNotFoundError: nowhere holds no run: run.json is missing, there and in all folders below
    """
    found: dict[Path, Path] = {}
    for path in paths:
        _refuse_old(path)
        here = [path] if _is_study(path) else _find_below(path)
        if not here:
            raise FileNotFoundError(
                f"{path} holds no run: {RUN} is missing, there and in all folders below"
            )
        found |= {one.resolve(): one for one in here}
    return list(found.values())


def _is_study(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (INDEX, RUN, NAME))


def _find_below(path: Path) -> list[Path]:
    """Return the comparisons and runs below a folder, without the runs of comparisons."""
    compared = {one.parent for one in path.rglob(INDEX)}
    alone = {one.parent for name in (RUN, NAME) for one in path.rglob(name)}
    return sorted(compared | {one for one in alone if not compared & set(one.parents)})


def read(folder: Path) -> Study:
    """Read a run's folder, or a comparison's.

    Raises:
        FileNotFoundError: The folder holds neither.
        InputError: It is damaged, or of another format.
    """
    try:
        if (folder / INDEX).is_file():
            return _read_index(folder)
        _refuse_old(folder)
        return _read_run(folder)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        if missing == RUN and (folder / NAME).is_file():
            raise InputError(
                f"{folder} holds a run that has not ended: `fedscaffold watch {folder}` shows it, "
                f"`fedscaffold resume {folder}` goes on"
            ) from None
        raise FileNotFoundError(f"{folder} holds no run: {missing} is missing") from None
    except OtherFormatError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise InputError(
            f"{folder} holds a damaged run: {what}; run it again, or restore the folder"
        ) from None


def _refuse_old(folder: Path) -> None:
    if (folder / "study.json").is_file() and not (folder / RUN).is_file():
        raise OtherFormatError(
            f"{folder} was written by fedscaffold 0.1.0, whose format is no longer read: run its "
            "config.toml again (the results are the same), or open the report.html in it"
        )


def _read_json(path: Path, kinds: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    about = parsing.json(parsing.text_of(path), path.name)
    _check_fields(path.name, about, {"format": is_count})
    if about["format"] != FORMAT:
        raise OtherFormatError(
            f"{path} has format {about['format']}, and this fedscaffold reads format {FORMAT}: "
            "read it with the version that wrote it"
        )
    _check_fields(path.name, about, kinds)
    return dict(about)


def _read_index(folder: Path) -> Study:
    about = _read_json(folder / INDEX, KINDS | {"runs": _are_names, "rows": _are_rows})
    runs = []
    for name in about["runs"]:
        try:
            runs += _read_run(folder / MEMBERS / name).runs
        except FileNotFoundError as error:
            raise InputError(
                f"{MEMBERS}/{name}/{Path(str(error.filename)).name} is missing"
            ) from None
    return _make_study(about, runs, about["rows"])


def _read_run(folder: Path) -> Study:
    about = _read_json(folder / RUN, KINDS | RUN_KINDS)
    if "privacy" in about:
        _check_fields(RUN, about, {"privacy": is_spent})
    with (folder / CONFIG).open(encoding="utf-8", newline="") as file:
        config = file.read()
    if not (folder / NAME).is_file():
        raise FileNotFoundError(2, "missing", str(folder / NAME))
    log = RoundLog(folder)
    log.update()
    missing = [name for name in about["columns"] if name not in log.columns and about["rounds"]]
    if log.round != about["rounds"] or missing:
        said = f"no {missing[0]}" if missing else f"{log.round} of its {about['rounds']} rounds"
        raise InputError(f"{NAME} has {said}")
    columns = {
        name: np.asarray(log.columns.get(name, ()), np.float64).astype(kind)
        for name, kind in about["columns"].items()
    }
    known = {name: about[name] for name in RUN_KINDS if name not in ("columns", "rounds")}
    known |= {name: math.nan for name in ("residual", "explained") if about[name] is None}
    clock = np.array(log.clock) if len(log.clock) > 1 else None
    known |= {
        "columns": columns,
        "config": config,
        "seconds": about["seconds"].get("wall"),
        "clock": clock,
        "privacy": about.get("privacy"),
    }
    return _make_study(about, [RunRecord(**known)], [])


def _make_study(about: dict[str, Any], runs: list[RunRecord], rows: list[dict[str, Any]]) -> Study:
    counts, target = about["label_counts"], about["target"]
    known = {name: about[name] for name in SHARED}
    known["target"] = None if target is None else (target[0], target[1])
    return Study(
        **known,
        runs=runs,
        rows=rows,
        label_counts=None if counts is None else np.array(counts, np.int64),
    )


def _check_fields(what: str, held: Any, kinds: Mapping[str, Callable[[Any], bool]]) -> None:
    if not isinstance(held, dict):
        raise InputError(f"{what} must be an object, got {shown(held)}")
    for key, is_right in kinds.items():
        if key not in held:
            raise InputError(f"{key!r} of {what} is missing")
        if not is_right(held[key]):
            raise InputError(f"{key!r} of {what} is {shown(held[key])}")


def _is_plain(value: Any) -> bool:
    """Return whether a value is null, a string, a boolean or a number."""
    return value is None or isinstance(value, (str, bool)) or is_number(value)


def _optional(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is_target(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_text(value[0]) and is_number(value[1])


def _is_table(value: Any) -> bool:
    """Return whether a value is a list of rows of counts, all of the same length."""
    rows = isinstance(value, list) and all(
        isinstance(row, list) and all(map(is_count, row)) for row in value
    )
    return rows and len(set(map(len, value))) <= 1


def _are_columns(value: Any) -> bool:
    kinds = ("float32", "float64", "int32", "int64")
    return (
        isinstance(value, dict)
        and "round" in value
        and all(kind in kinds for kind in value.values())
    )


def _are_names(value: Any) -> bool:
    """Return whether a value is a list of plain folder names, without paths."""
    return isinstance(value, list) and all(
        is_text(name) and re.fullmatch(r"[a-z0-9-]+", name) for name in value
    )


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and is_text(row.get("algorithm"))
        and all(map(_is_plain, row.values()))
        for row in value
    )


SHARED = ("problem", "target", "precision", "command", "versions", "seconds")
KINDS: dict[str, Callable[[Any], bool]] = {
    "problem": is_text,
    "target": _optional(_is_target),
    "precision": lambda value: value in ("float32", "float64"),
    "command": is_text,
    "versions": lambda value: isinstance(value, dict) and all(map(is_text, value.values())),
    "seconds": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
    "label_counts": _optional(_is_table),
}
RUN_KINDS: dict[str, Callable[[Any], bool]] = {
    "algorithm": is_text,
    "seed": is_count,
    "lr": _optional(is_number),
    "columns": _are_columns,
    "rounds": is_count,
    "diverged_at": _optional(is_count),
    "reached_at": _optional(is_count),
    "advice": _optional(is_text),
    "residual": _optional(is_number),
    "explained": _optional(is_number),
    "digest": is_text,
}
