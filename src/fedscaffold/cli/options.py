"""Options that set configuration keys; names, defaults and help come from the table of arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from fedscaffold.run_config import ARGUMENTS, KEYS

__all__ = ["LOCAL", "PROBLEM", "config_options"]

PROBLEM = ("problem.dataset", "problem.split", "problem.model", "problem.clients", "problem.data")
LOCAL = ("local.epochs", "local.steps", "local.batch_size", "local.lr")
FLAGS = {stated.key: name for name, stated in ARGUMENTS.items() if stated.key is not None}


def config_options(
    *keys: str, defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a verb that takes `overrides`, a list of KEY=VALUE, to take one option for each key instead.

    Args:
        *keys: Dotted keys of the configuration.
        defaults: Defaults of this verb, by key, where they differ from the configuration's.
    """
    usual = dict(defaults or {})

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(verb, eval_str=True)
        flags = {_flag_of(key): key for key in keys}
        options = [_make_option(key, usual.get(key)) for key in keys]
        own = [one for one in signature.parameters.values() if one.name != "overrides"]
        first = [one for one in own if one.default is one.empty]
        rest = [one for one in own if one.default is not one.empty]

        @wraps(verb)
        def with_options(**given: Any) -> Any:
            typed = {key: given.pop(flag) for flag, key in flags.items()}
            asked = [f"{key}={_to_toml_value(value)}" for key, value in (usual | _drop_none(typed)).items()]
            return verb(overrides=asked, **given)

        with_options.__signature__ = signature.replace(parameters=[*first, *options, *rest])  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in (*first, *options, *rest)}
        return with_options

    return decorate


def _drop_none(typed: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in typed.items() if value is not None}


def _flag_of(key: str) -> str:
    return FLAGS.get(key, key.rpartition(".")[2])


def _make_option(key: str, default: str | None) -> inspect.Parameter:
    sentence, usual = KEYS[key].sentence, KEYS[key].default
    shown = default or ("" if usual is None else str(usual))
    flag = "--" + _flag_of(key).replace("_", "-")
    shown = f"  [default: {shown}]" if shown else ""
    option = typer.Option(flag, help=f"{sentence[:1].upper()}{sentence[1:]}.{shown}", show_default=False)
    kind = Annotated[str | None, option]
    return inspect.Parameter(_flag_of(key), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)


def _to_toml_value(value: str) -> str:
    """Return a value as TOML, quoted if it contains a quote, a backslash, a space or #."""
    return json.dumps(value) if any(c in value for c in "'\"\\ #") else value
