"""The configuration of a run: typed, from TOML, with overrides; an unknown key is answered with the nearest one."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedscaffold.checks import InputError

__all__ = ["Algorithm", "Cohort", "Config", "Local", "Output", "ProblemConfig", "Server", "load", "parse", "to_toml"]


class Section(BaseModel):
    """A table of the configuration: known keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProblemConfig(Section):
    """What is minimised: a data set split among clients and a model, or quadratics."""

    dataset: str = "digits"
    split: str = "similarity:0"
    clients: int | None = None
    model: str = "softmax"
    l2: float = 0.0
    dim: int = 20
    mu: float = 0.01
    smoothness: float = 1.0
    noise: float = 0.0
    seed: int = 0
    data: str | None = None


class Algorithm(BaseModel):
    """The algorithm by name; its own parameters follow and are checked by the algorithm."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "scaffold"

    @property
    def parameters(self) -> dict[str, Any]:
        """The algorithm's own parameters: option, server_lr, mu ..."""
        return dict(self.model_extra or {})


class Local(Section):
    """What a client does in a round."""

    steps: int | list[int] | None = None
    epochs: int | None = None
    batch_size: int | float | None = None
    lr: float | Literal["tuned"] = 0.1
    draw: str = "auto"
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: float = 0.9


class Cohort(Section):
    """Who takes part in a round: a share or a number of clients, among those who can be reached."""

    size: int | float = 1.0
    availability: str | None = None
    """A CSV file of zeros and ones: a line for each round, over and over, a column for each client."""


class Server(Section):
    """The optimiser of the server's step: with FedAvg these are FedAvgM, FedAdam, FedYogi and FedAdagrad."""

    optimizer: Literal["none", "momentum", "nesterov", "adam", "yogi", "adagrad"] = "none"
    lr: float = 1.0
    momentum: float = 0.9


class Output(Section):
    """Where the run's folder goes, and how often its state is kept there."""

    dir: str = "runs/latest"
    checkpoint_every: int | None = None
    """Rounds between two checkpoints; by the clock unless given."""


class Config(Section):
    """Everything that makes a run."""

    seed: int = 0
    rounds: int = Field(default=100)
    weights: Literal["equal", "records"] = "equal"
    precision: Literal["float32", "float64"] = "float32"
    stop_at: str | None = None
    metrics: list[str] | None = None
    evaluate_every: int = 1
    block: int | None = None
    stale: str = "keep"
    compression: str = "none"
    client_state: Literal["array", "auto", "file", "sparse"] = "array"
    """Where the c_i are kept: docs/resume.md."""
    problem: ProblemConfig = ProblemConfig()
    algorithm: Algorithm = Algorithm()
    local: Local = Local()
    cohort: Cohort = Cohort()
    server: Server = Server()
    output: Output = Output()


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file, and apply overrides such as `local.lr=0.2`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; give the path of a TOML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; give the path of a TOML configuration, in UTF-8") from None
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Make a configuration from TOML text and overrides.

    >>> parse("rounds = 5", ["local.lr=0.2"]).local.lr
    0.2
    >>> parse("[locl]")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: config: unknown key 'locl' (did you mean 'local'?); known: algorithm, block, ...
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(table, override)
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise InputError(f"{source}: {_sentence(error)}") from None


def to_toml(config: Config) -> str:
    """The resolved configuration, every key with its value.

    >>> parse(to_toml(Config())) == Config()
    True
    """
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _apply(table: dict[str, Any], override: str) -> None:
    path, sign, value = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise InputError(f"--set takes key=value such as local.lr=0.2, got {override!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string: --set algorithm.name=fedavg
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {override}: {key!r} is a value, not a table")
    table[keys[-1]] = parsed


def _sentence(error: ValidationError) -> str:
    """The first fault in words: which key, what is wrong, what is allowed."""
    first = error.errors(include_url=False)[0]
    # unions report one fault for each member type, with the type's name at the end of the location
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = sorted(_known(place[:-1]))
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        hint = f" (did you mean {'.'.join([*place[:-1], near[0]])!r}?)" if near else ""
        return f"unknown key {'.'.join(place)!r}{hint}; known: {', '.join(known)}"
    keys = [part for part in place if part.isidentifier() and part not in ("int", "float", "list")]
    expected = first["msg"].removeprefix("Input should be ")
    return f"{'.'.join(keys)} must be {expected}, got {first['input']!r}"


def _known(place: list[str]) -> list[str]:
    model: Any = Config
    for key in place:
        model = model.model_fields[key].annotation
    return list(model.model_fields)
