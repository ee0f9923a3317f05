"""Options that set configuration keys.

Names, defaults and help come from the table of arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from fedscaffold.run_config import ARGUMENTS, KEYS

__all__ = ["PROBLEM", "config_options", "replace_parameter"]

PROBLEM = ("problem.dataset", "problem.split", "problem.model", "problem.clients", "problem.data")
FLAGS = {stated.key: name for name, stated in ARGUMENTS.items() if stated.key is not None}


def config_options(
    *keys: str, defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a verb that takes `overrides`, KEY=VALUE pairs, to take one option for each key.

    Args:
        *keys: Dotted keys of the configuration.
        defaults: Defaults of this verb, by key, where they differ from the configuration's.
    """
    usual = dict(defaults or {})
    flags = {_flag_of(key): key for key in keys}

    def overrides(**given: str | None) -> list[str]:
        typed = {flags[flag]: value for flag, value in given.items() if value is not None}
        return [f"{key}={_to_toml_value(value)}" for key, value in (usual | typed).items()]

    options = {flag: _make_option(key, usual.get(key)) for flag, key in flags.items()}
    return lambda verb: replace_parameter(verb, "overrides", options, overrides)


def replace_parameter(
    verb: Callable[..., Any],
    name: str,
    options: Mapping[str, inspect.Parameter],
    make: Callable[..., Any],
) -> Callable[..., Any]:
    """Return the verb with options in the place of one of its parameters.

    Args:
        verb: The function of a command.
        name: The parameter to replace.
        options: The options that take its place, by name.
        make: Called with the values of the options; returns the value of the parameter.
    """
    signature = inspect.signature(verb, eval_str=True)
    every = [
        option
        for own in signature.parameters.values()
        for option in (options.values() if own.name == name else (own,))
    ]

    @wraps(verb)
    def with_options(**given: Any) -> Any:
        typed = {option: given.pop(option) for option in options}
        return verb(**given, **{name: make(**typed)})

    with_options.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in every}
    return with_options


def _flag_of(key: str) -> str:
    return FLAGS.get(key, key.rpartition(".")[2])


def _make_option(key: str, default: str | None) -> inspect.Parameter:
    sentence, usual = KEYS[key].sentence, KEYS[key].default
    shown = default or ("" if usual is None else str(usual))
    flag = "--" + _flag_of(key).replace("_", "-")
    shown = f"  [default: {shown}]" if shown else ""
    option = typer.Option(
        flag, help=f"{sentence[:1].upper()}{sentence[1:]}.{shown}", show_default=False
    )
    kind = Annotated[str | None, option]
    return inspect.Parameter(
        _flag_of(key), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind
    )


def _to_toml_value(value: str) -> str:
    """Return a value as TOML, quoted if it contains a quote, a backslash, a space or #."""
    return json.dumps(value) if any(c in value for c in "'\"\\ #") else value
