"""Typed configuration of a run, read from TOML with overrides, and the run's arguments.

Unknown keys are refused with a suggestion.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, create_model

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.parsing import NotToml, format_of, toml
from fedscaffold.privacy import Clients, Records, clients, records
from fedscaffold.run_config import ARGUMENTS, KEYS, Argument

__all__ = ["Algorithm", "Cohort", "Config", "Local", "Output", "ProblemConfig", "Section", "Server"]
__all__ += ["given_keys", "load", "parse", "parse_over", "run_arguments", "to_toml", "with_keys"]


FORMAT = 1
KEY = "{key}"  # placeholder for the key in the message of a check
ADAPTIVITY = 1e-3  # tau of Reddi et al. 2021, added to the root of the second moment


class Section(BaseModel):
    """A table of the configuration, with known keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Algorithm(BaseModel):
    """The algorithm's name; further keys are its parameters, checked by the algorithm itself."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, PlainValidator(lambda value: checks.text(KEY, value))] = "scaffold"

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the algorithm, such as option, server_lr or mu."""
        return dict(self.model_extra or {})


def _fields(section: str) -> dict[str, Any]:
    """Return the pydantic fields of a table of the file, from the arguments of a run.

    "" is the top level.
    """

    def field(stated: Argument) -> Any:
        reads = Annotated[Any, PlainValidator(lambda value: stated.read(KEY, value))]
        return reads, Field(stated.default, description=stated.sentence)

    keys = {
        key.rpartition(".")[2]: stated
        for key, stated in KEYS.items()
        if key.rpartition(".")[0] == section
    }
    return {name: field(stated) for name, stated in keys.items()}


if TYPE_CHECKING:  # created at run time from the table of arguments
    ProblemConfig: TypeAlias = Any
    Local: TypeAlias = Any
    Cohort: TypeAlias = Any
    Server: TypeAlias = Any
    Output: TypeAlias = Any
    Privacy: TypeAlias = Any
    Config: TypeAlias = Any
else:
    ProblemConfig = create_model("ProblemConfig", __base__=Section, **_fields("problem"))
    Local = create_model("Local", __base__=Section, **_fields("local"))
    Cohort = create_model("Cohort", __base__=Section, **_fields("cohort"))
    Server = create_model("Server", __base__=Section, **_fields("server"))
    Output = create_model("Output", __base__=Section, **_fields("output"))
    Privacy = create_model("Privacy", __base__=Section, **_fields("privacy"))
    Config = create_model(
        "Config",
        __base__=Section,
        **_fields(""),
        problem=(ProblemConfig, ProblemConfig()),
        algorithm=(Algorithm, Algorithm()),
        local=(Local, Local()),
        cohort=(Cohort, Cohort()),
        server=(Server, Server()),
        output=(Output, Output()),
        privacy=(Privacy, Privacy()),
    )


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and apply overrides such as `local.lr=0.2`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} not found; give the path of a TOML configuration"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}; give the path of a TOML configuration, in UTF-8"
        ) from None
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Parse a configuration from TOML text and overrides.

    >>> parse("rounds = 5", ["local.lr=0.2"]).local.lr
    0.2
    >>> parse("[locl]")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: config: unknown key 'locl' (did you mean 'local'?); known:
        algorithm, block, ...
    >>> parse("seed = 1e9")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: config: seed must be a whole number of at least 0, got
        1000000000.0: write 1000000000
    """
    table = toml(text, source)
    for override in overrides:
        _apply_override(table, override)
    format_of(table.pop("format", None), FORMAT, source)
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise InputError(f"{source}: {_describe_error(error)}") from None


def with_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some dotted keys.

    >>> with_keys(Config(), {"local.steps": 3}).local.steps
    3
    """
    if not values:
        return config
    table = config.model_dump(exclude_none=True, exclude_unset=True)
    for key, value in values.items():
        *sections, last = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise InputError(_describe_error(error)) from None


def parse_over(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse options such as `local.steps=1,5`: the values of a key, with commas between.

    >>> parse_over(["local.steps=1,5", "problem.split=iid,similarity:0"])
    {'local.steps': [1, 5], 'problem.split': ['iid', 'similarity:0']}
    >>> parse_over(["local.steps=1,1"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: --over local.steps names 1 twice
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, sign, values = (part.strip() for part in text.partition("="))
        if not sign or not values or not all(key.split(".")):
            raise InputError(
                f"--over takes key=value,value such as local.steps=1,5, got {checks.shown(text)}"
            )
        if key in found:
            raise InputError(f"--over {key} is given twice: give all its values at once")
        try:
            listed = toml(f"value = [{values}]", f"--over {key}")["value"]
        except NotToml:
            listed = [_parse_value(value, f"--over {key}") for value in values.split(",")]
        twice = [value for i, value in enumerate(listed) if value in listed[:i]]
        if twice:
            raise InputError(f"--over {key} names {twice[0]} twice")
        found[key] = listed
    return found


def to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML: every key with its value, and the format version.

    The table `privacy` is left out where none is asked for.

    >>> parse(to_toml(Config())) == Config()
    True
    """
    unused = {"privacy"} if config.privacy == Config().privacy else None
    table = config.model_dump(exclude_none=True, exclude=unused)
    return tomli_w.dumps({"format": FORMAT} | table)


def given_keys(config: Config) -> list[str]:
    """Return the dotted keys that were given explicitly.

    >>> given_keys(parse("rounds = 5", ["local.lr=0.2", "algorithm.option=1"]))
    ['algorithm.option', 'local.lr', 'rounds']
    """
    keys = []
    for key in config.model_fields_set:
        value = getattr(config, key)
        keys += (
            [f"{key}.{one}" for one in value.model_fields_set]
            if isinstance(value, BaseModel)
            else [key]
        )
    return sorted(keys)


def run_arguments(config: Config, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the arguments of `simulate` that a configuration gives.

    Args:
        config: The configuration.
        without: Names of arguments to leave out.

    >>> run_arguments(Config(local={"lr": 0.2, "steps": 3}))["lr"]
    0.2
    """
    given: dict[str, Any] = {}
    for name, stated in ARGUMENTS.items():
        if stated.key is not None:
            section, _, field = stated.key.rpartition(".")
            given[name] = getattr(getattr(config, section) if section else config, field)
    given |= {
        "availability": _load_availability(config.cohort.availability),
        "delays": _load_delays(config.cohort.delays),
        "local_optimizer": _local_optimizer(config.local),
        "server_optimizer": _server_optimizer(config.server),
        "privacy": _privacy(config.privacy),
    }
    if given["local_optimizer"] is not None or config.local.lr == "tuned":
        given["lr"] = None
    return {name: value for name, value in given.items() if name not in set(without)}


def _local_optimizer(section: Local) -> Any:
    """Return the local optimizer with its step size.

    None for SGD, or while the step size is being tuned.
    """
    if section.optimizer == "sgd" or section.lr == "tuned":
        return None
    import optax

    if section.optimizer == "adam":
        return optax.adam(section.lr)
    return optax.sgd(section.lr, momentum=section.momentum)


def _server_optimizer(section: Server) -> Any:
    """Return the server's optimizer, with the second-moment decay and floor of Reddi et al.

    2021.
    """
    if section.optimizer == "none":
        return None
    import optax

    lr, momentum = section.lr, section.momentum
    if section.optimizer in ("momentum", "nesterov"):
        return optax.sgd(lr, momentum=momentum, nesterov=section.optimizer == "nesterov")
    if section.optimizer == "adagrad":
        return optax.adagrad(lr, initial_accumulator_value=ADAPTIVITY**2, eps=ADAPTIVITY)
    adaptive = optax.adam if section.optimizer == "adam" else optax.yogi
    return adaptive(lr, b1=momentum, b2=0.99, eps=ADAPTIVITY)


def _privacy(section: Privacy) -> Records | Clients | None:
    """Return the privacy of records or clients; None if the table is empty."""
    needed = ("clip", "noise", "delta")
    missing = [key for key in needed if getattr(section, key) is None]
    if len(missing) == len(needed) and section.stop_at_epsilon is None:
        return None
    if missing:
        raise InputError(f"privacy.{missing[0]} must be given: [privacy] takes clip, noise, delta")
    given = section.model_dump(exclude={"unit"})
    if section.unit == "records":
        return records(**given)
    del given["sampling"]
    return clients(**given)


def _load_availability(path: str | None) -> NDArray[Any] | None:
    if path is None:
        return None
    try:
        return np.loadtxt(Path(path), delimiter=",", ndmin=2)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} not found; cohort.availability is a CSV file of zeros and ones"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a CSV file of zeros and ones: {error}") from None


def _load_delays(given: str | None) -> str | NDArray[Any] | None:
    """Return a law of delays as it is written, or the trace in a CSV file."""
    if given is None or not given.endswith(".csv"):
        return given
    try:
        return np.loadtxt(Path(given), delimiter=",", ndmin=2)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{given} not found; cohort.delays is a law, or a CSV file of seconds"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{given} is not a CSV file of seconds: {error}") from None


def _apply_override(table: dict[str, Any], override: str) -> None:
    path, sign, value = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise InputError(
            f"--set takes key=value such as local.lr=0.2, got {checks.shown(override)}"
        )
    if len(value.splitlines()) > 1:
        raise InputError(f"--set takes one line of text, got {checks.shown(override)}")
    parsed = _parse_value(value, f"--set {path.strip()}")
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {override}: {key!r} is a value, not a table")
    table[keys[-1]] = parsed


def _parse_value(text: str, source: str) -> Any:
    """Parse a value of the command line as TOML; a bare word is a string."""
    try:
        return toml(f"value = {text}", source)["value"]
    except NotToml:
        return text.strip()


def _describe_error(error: ValidationError) -> str:
    """Describe the first validation error: the key, what is wrong, what is allowed."""
    first = error.errors(include_url=False)[0]
    # unions report one error for each member type, with the type's name at the end of the location
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys(place[:-1]))
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        hint = f" (did you mean {'.'.join([*place[:-1], near[0]])!r}?)" if near else ""
        return f"unknown key {'.'.join(place)!r}{hint}; known: {', '.join(known)}"
    key = ".".join(_config_keys(place))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]).replace(KEY, key)
    expected = (
        "a table"
        if first["type"] == "model_type"
        else first["msg"].removeprefix("Input should be ")
    )
    return f"{key} must be {expected}, got {checks.shown(first['input'])}"


def _config_keys(place: list[str]) -> list[str]:
    """Return the leading parts of an error's location that are keys.

    A union adds the member type after them.
    """
    model: Any = Config
    for depth, part in enumerate(place):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return place[:depth]
        model = fields[part].annotation
    return place


def _known_keys(place: list[str]) -> list[str]:
    model: Any = Config
    for key in place:
        model = model.model_fields[key].annotation
    return list(model.model_fields)
