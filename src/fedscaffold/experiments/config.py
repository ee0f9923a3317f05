"""The configuration of a run: typed, from TOML, with overrides; an unknown key is answered with the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.parsing import NotToml, toml

__all__ = ["Algorithm", "Cohort", "Config", "Local", "Output", "ProblemConfig", "Server"]
__all__ += ["given", "load", "parse", "to_toml"]


KEY = "{key}"  # in the sentence of a check, stands for the key it is made for


def _checked(check: Callable[..., Any], **bounds: Any) -> PlainValidator:
    return PlainValidator(lambda value: check(KEY, value, **bounds))


def _steps(key: str, value: Any) -> int | list[int]:
    return [checks.whole(key, one) for one in value] if isinstance(value, list) else checks.whole(key, value)


def _lr(key: str, value: Any) -> float | str:
    return value if value == "tuned" and isinstance(value, str) else checks.number(key, value, above=0)


Count = Annotated[int, _checked(checks.whole)]
Seed = Annotated[int, _checked(checks.whole, at_least=0)]
Number = Annotated[float, _checked(checks.number, at_least=0)]
Positive = Annotated[float, _checked(checks.number, above=0)]
Text = Annotated[str, _checked(checks.text)]


class Section(BaseModel):
    """A table of the configuration: known keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProblemConfig(Section):
    """What is minimised: a data set split among clients and a model, or quadratics."""

    dataset: Text = "digits"
    split: Text = "similarity:0"
    clients: Count | None = None
    model: Text = "softmax"
    l2: Number = 0.0
    dim: Count = 20
    mu: Positive = 0.01
    smoothness: Positive = 1.0
    noise: Number = 0.0
    seed: Seed = 0
    data: Text | None = None


class Algorithm(BaseModel):
    """The algorithm by name; its own parameters follow and are checked by the algorithm."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Text = "scaffold"

    @property
    def parameters(self) -> dict[str, Any]:
        """The algorithm's own parameters: option, server_lr, mu ..."""
        return dict(self.model_extra or {})


class Local(Section):
    """What a client does in a round."""

    steps: Annotated[int | list[int], _checked(_steps)] | None = None
    epochs: Count | None = None
    batch_size: Annotated[int | float, _checked(checks.share, of="records")] | None = None
    lr: Annotated[float | Literal["tuned"], _checked(_lr)] = 0.1
    draw: Literal["auto", "replacement", "shuffle"] = "auto"
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: Number = 0.9


class Cohort(Section):
    """Who takes part in a round: a share or a number of clients, among those who can be reached."""

    size: Annotated[int | float, _checked(checks.share, of="clients")] = 1.0
    availability: Text | None = None
    """A CSV file of zeros and ones: a line for each round, over and over, a column for each client."""


class Server(Section):
    """The optimiser of the server's step: with FedAvg these are FedAvgM, FedAdam, FedYogi and FedAdagrad."""

    optimizer: Literal["none", "momentum", "nesterov", "adam", "yogi", "adagrad"] = "none"
    lr: Positive = 1.0
    momentum: Number = 0.9


class Output(Section):
    """Where the run's folder goes, and how often its state is kept there."""

    dir: Text = "runs/latest"
    checkpoint_every: Count | None = None
    """Rounds between two checkpoints; by the clock unless given."""


class Config(Section):
    """Everything that makes a run."""

    seed: Seed = 0
    rounds: Count = 100
    weights: Literal["equal", "records"] = "equal"
    precision: Literal["float32", "float64"] = "float32"
    stop_at: Text | None = None
    metrics: list[Text] | None = None
    evaluate_every: Count = 1
    block: Count | None = None
    stale: Text = "keep"
    compression: Text = "none"
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
    >>> parse("seed = 1e9")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: config: seed must be a whole number of at least 0, got 1000000000.0: write 1000000000
    """
    table = toml(text, source)
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


def given(config: Config) -> list[str]:
    """The keys that were given, dotted, as opposed to those that have their default.

    >>> given(parse("rounds = 5", ["local.lr=0.2", "algorithm.option=1"]))
    ['algorithm.option', 'local.lr', 'rounds']
    """
    keys = []
    for key in config.model_fields_set:
        value = getattr(config, key)
        keys += [f"{key}.{one}" for one in value.model_fields_set] if isinstance(value, BaseModel) else [key]
    return sorted(keys)


def _apply(table: dict[str, Any], override: str) -> None:
    path, sign, value = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise InputError(f"--set takes key=value such as local.lr=0.2, got {checks.shown(override)}")
    if len(value.splitlines()) > 1:
        raise InputError(f"--set takes one line of text, got {checks.shown(override)}")
    try:
        parsed = toml(f"value = {value}", f"--set {path.strip()}")["value"]
    except NotToml:
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
    key = ".".join(_keys(place))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]).replace(KEY, key)
    expected = "a table" if first["type"] == "model_type" else first["msg"].removeprefix("Input should be ")
    return f"{key} must be {expected}, got {checks.shown(first['input'])}"


def _keys(place: list[str]) -> list[str]:
    """Of the place of a fault the keys: behind them comes which type of several did not fit."""
    model: Any = Config
    for depth, part in enumerate(place):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return place[:depth]
        model = fields[part].annotation
    return place


def _known(place: list[str]) -> list[str]:
    model: Any = Config
    for key in place:
        model = model.model_fields[key].annotation
    return list(model.model_fields)
