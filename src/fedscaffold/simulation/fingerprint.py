"""Fingerprint of a run: everything its results depend on, as facts in JSON.

Numbers and strings are stored as they are, arrays by their SHA-256. A function is represented by
its name, a hash of its code, the values it closes over and the global constants it uses; a callable
object, or the owner of a bound method, by its fields as well. Optimizers, losses or algorithms that
differ in a parameter thus differ in a fact with the
parameter's name. Facts are only compared: nothing is executed or loaded from them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import shown
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import ARGUMENTS, RunConfig
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.resolve import schedule_of

__all__ = ["differences", "facts", "flat", "problem_facts"]

# arguments that earlier checkpoints do not have: left out at their defaults
ADDED = (
    "accumulate",
    "attack",
    "buffer",
    "clip_norm",
    "delays",
    "drop_last",
    "privacy",
    "robust",
    "staleness",
)
LONG = 16  # longest list that is stored entry by entry
DEEP = 12  # deepest nesting of functions and containers
SAMPLED = 4096  # rows of a memory-mapped array that are hashed
SHOWN = 6  # differences named in a refusal
STREAMS = "SFC64 by seed, round and purpose"  # sampling scheme: a change makes another run


def facts(config: RunConfig, ready: PreparedRun) -> dict[str, Any]:
    """Return everything a run's results depend on, by dotted name.

    The number of rounds is not included, so that a run can be extended, except for geometric
    numbers of local steps, whose largest draw determines shapes.
    """
    known: dict[str, Any] = {
        "algorithm": to_json(config.algorithm),
        "problem": problem_facts(config.problem),
        "streams": STREAMS,
        "block": ready.spec.block if ready.shards is None else ready.shards.alone,
        "lr": _step_sizes(config, ready),
    }
    known |= {
        name: to_json(getattr(config, name)) for name, stated in ARGUMENTS.items() if stated.bits
    }
    known |= {"rounds": config.rounds} if work_of(config.algorithm, 1).geometric else {}
    for name in ADDED:
        if known[name] == ARGUMENTS[name].default:
            del known[name]
    if "privacy" in known:
        del known["privacy"]["stop_at_epsilon"]  # like the number of rounds, it may be raised
    return flat(known)


def _step_sizes(config: RunConfig, ready: PreparedRun) -> Any:
    """Return the facts of lr: of a schedule over rounds, its code and the first values."""
    if not callable(config.lr):
        return to_json(config.lr)
    first = to_json(ready.drawer.lr(1))
    by_round = schedule_of(config.lr).by_round
    return {"schedule": to_json(config.lr), "first": first} if by_round else first


def differences(was: Any, now: Mapping[str, Any]) -> str | None:
    """Describe the differences between two fingerprints; None if there are none.

    >>> differences({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
    'lr: was 0.1, is 0.2'
    """
    if not isinstance(was, Mapping):
        return f"was {shown(was)}"
    nothing = "not there"
    changed = [
        key for key in sorted({*was, *now}) if was.get(key, nothing) != now.get(key, nothing)
    ]
    said = [
        f"{key}: was {was.get(key, nothing)}, is {now.get(key, nothing)}" for key in changed[:SHOWN]
    ]
    return (
        "; ".join([*said, f"and {len(changed) - SHOWN} more"][: len(said) + (len(changed) > SHOWN)])
        or None
    )


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested facts to dotted names.

    >>> flat({"server": {"lr": 1.0}, "steps": [3, 4]})
    {'server.lr': 1.0, 'steps.0': 3, 'steps.1': 4}
    """
    if not isinstance(value, (dict, list)):
        return {name: value}
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        key: item
        for part, inner in pairs
        for key, item in flat(inner, f"{name}.{part}" if name else str(part)).items()
    }


def to_json(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON: arrays to their digest, functions to their code hash and closure.

    >>> to_json((1, "a", None))
    [1, 'a', None]
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.generic)):
        number = value.item() if isinstance(value, np.generic) else value
        return number if not isinstance(number, float) or math.isfinite(number) else str(number)
    if hasattr(value, "__array__") and not isinstance(value, type):
        return _array(np.asarray(value))
    if depth == DEEP:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(key): to_json(item, depth + 1) for key, item in value.items()}
    if hasattr(value, "_asdict") and not isinstance(value, type):
        return to_json(value._asdict(), depth + 1)
    if isinstance(value, (Set, Sequence)):
        listed = [to_json(item, depth + 1) for item in value]
        listed = sorted(listed, key=json.dumps) if isinstance(value, Set) else listed
        return (
            listed
            if len(listed) <= LONG
            else f"{len(listed)} entries, {_digest(json.dumps(listed).encode())}"
        )
    return _function(value, depth)


def _function(value: Any, depth: int) -> Any:
    """Return the facts of a function, a partial, or another object."""
    if isinstance(value, partial):
        return to_json(
            {"partial": value.func, "given": value.args, "by_name": value.keywords}, depth + 1
        )
    code = getattr(value, "__code__", None)
    if code is None:
        return _object(value, depth)
    known = {
        "function": f"{value.__module__}.{value.__qualname__}, {_digest(_code(code).encode())}"
    }
    inside = zip(code.co_freevars, value.__closure__ or (), strict=True)
    closed: dict[Any, Any] = {
        name: cell.cell_contents
        for name, cell in inside
        if _filled(cell) and cell.cell_contents is not value
    }
    closed |= dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
    used = {name: value.__globals__.get(name) for name in _names(code)}
    closed |= {
        name: item
        for name, item in used.items()
        if item is not value and _is_users(item, value.__module__)
    }
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        closed["self"] = owner
    return known | {str(name): to_json(item, depth + 1) for name, item in closed.items()}


def _names(code: CodeType) -> set[str]:
    """Return the global names that a function uses, inner functions included."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*inner)


def _is_users(item: Any, module: str) -> bool:
    """Return whether a global is a constant or a function of the user's own.

    One of the same package.
    """
    if isinstance(item, (int, float, str, np.ndarray, list, tuple, dict, Set)):
        return True
    own = getattr(item, "__module__", None)
    return (
        hasattr(item, "__code__")
        and own is not None
        and own.partition(".")[0] == module.partition(".")[0]
    )


def _object(value: Any, depth: int) -> Any:
    """Return an object's type, fields and code of `__call__`.

    Only a name if it is a type or has no fields.
    """
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", type(value).__qualname__)
    names = [field.name for field in fields(value)] if is_dataclass(value) else sorted(vars(value))
    known: dict[str, Any] = {"type": type(value).__qualname__}
    if (call := getattr(type(value).__call__, "__code__", None)) is not None:
        known["call"] = _digest(_code(call).encode())
    held = {name: getattr(value, name, None) for name in names if not name.startswith("__")}
    return known | {
        name: to_json(item, depth + 1) for name, item in held.items() if item is not value
    }


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _code(code: CodeType) -> str:
    """Return instructions, constants and names of a code object, without file and line numbers."""
    constants = [
        _code(c) if isinstance(c, CodeType) else repr(c)
        for c in code.co_consts
        if type(c) is not frozenset
    ]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames))


def problem_facts(problem: Problem) -> dict[str, Any]:
    """Return the facts of a problem: functions, model, and digests of all records."""
    import jax

    return {
        "functions": to_json(problem.functions),
        "kinds": to_json(problem.kinds),
        "evaluation_batch": problem.evaluation_batch,
        "layout": problem.layout.digest,
        "num_clients": problem.num_clients,
        "counts": _array(problem.counts),
        "params": [_array(leaf) for leaf in jax.tree.leaves(problem.params)],
        "records": [_array(leaf) for leaf in jax.tree.leaves(problem.records)],
        "test": [_array(leaf) for leaf in jax.tree.leaves(problem.test)],
        "noise": None if problem.noise is None else to_json(problem.noise),
        "state": [_array(leaf) for leaf in jax.tree.leaves(problem.state)],
    }


def _array(array: Any) -> Any:
    if array.dtype == object:
        return to_json(array.tolist())
    if isinstance(array, np.memmap):  # may be larger than memory: hash a sample of rows
        some = np.linspace(0, len(array) - 1, min(len(array), SAMPLED)).astype(np.int64)
        digest = _digest(np.ascontiguousarray(array[some]))
        return f"{array.dtype} {array.shape}, {len(some)} rows {digest}"
    if array.size <= 1:
        return to_json(array.item() if array.size else None)
    return f"{array.dtype} {array.shape}, {_digest(np.ascontiguousarray(array))}"


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
