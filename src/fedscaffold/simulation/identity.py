"""What makes a run this run: everything its bits depend on, as plain facts that can be compared and shown.

Numbers and words stand for themselves, arrays for their SHA-256. A function stands for its name, a fingerprint of its
code and the values it closes over, by their names: two optimisers or algorithms that differ in a parameter differ in a
line that says which. Nothing is executed and nothing is loaded from these facts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from fedscaffold.checks import shown
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.setup import Ready, Request

__all__ = ["differences", "facts", "flat", "problem_facts"]

LONG = 16  # entries of a list that are shown one by one
DEEP = 12  # functions inside functions
SAMPLED = 4096  # rows of a memory-mapped array that are looked at
SHOWN = 6  # differences named in a refusal
STREAMS = "SFC64 by seed, round and purpose"  # how draws.py makes random choices: another way is another run
NOT_ITS_BITS = {"algorithm", "problem", "rounds", "seeds", "lr", "block", "devices"}


def facts(request: Request, ready: Ready, evaluate_every: int) -> dict[str, Any]:
    """Everything a run's bits depend on, flat: {"lr": 0.1, "algorithm.server.server_lr": 1.0, ...}.

    The number of rounds is no part of it, so that a run can be prolonged, unless local steps are drawn by a coin, whose
    largest draw shapes the program.
    """
    known: dict[str, Any] = {
        "algorithm": plain(request.algorithm),
        "problem": problem_facts(request.problem),
        "seed": request.seeds[0],
        "streams": STREAMS,
        "evaluate_every": evaluate_every,
        "block": ready.spec.block if ready.shards is None else ready.shards.alone,
        "lr": plain(ready.lr if callable(request.lr) else request.lr),
    }
    known |= {name: plain(value) for name, value in request._asdict().items() if name not in NOT_ITS_BITS}
    known |= {"rounds": request.rounds} if request.algorithm.coin else {}
    return flat(known)


def differences(was: Any, now: Mapping[str, Any]) -> str | None:
    """What is not the same, in words; None where all is.

    >>> differences({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
    'lr: was 0.1, is 0.2'
    """
    if not isinstance(was, Mapping):
        return f"was {shown(was)}"
    nothing = "not there"
    changed = [key for key in sorted({*was, *now}) if was.get(key, nothing) != now.get(key, nothing)]
    said = [f"{key}: was {was.get(key, nothing)}, is {now.get(key, nothing)}" for key in changed[:SHOWN]]
    return "; ".join([*said, f"and {len(changed) - SHOWN} more"][: len(said) + (len(changed) > SHOWN)]) or None


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested facts under dotted names.

    >>> flat({"server": {"lr": 1.0}, "steps": [3, 4]})
    {'server.lr': 1.0, 'steps.0': 3, 'steps.1': 4}
    """
    if not isinstance(value, (dict, list)):
        return {name: value}
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        key: item for part, inner in pairs for key, item in flat(inner, f"{name}.{part}" if name else str(part)).items()
    }


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON: numbers and words as they are, arrays by their digest, functions by what they close over.

    >>> plain((1, "a", None))
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
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict(), depth + 1)
    if isinstance(value, (list, tuple)):
        listed = [plain(item, depth + 1) for item in value]
        return listed if len(listed) <= LONG else f"{len(listed)} entries, {_digest(json.dumps(listed).encode())}"
    return _function(value, depth)


def _function(value: Any, depth: int) -> Any:
    """A function, or a partial one; of other objects the type."""
    if isinstance(value, partial):
        return plain({"partial": value.func, "given": value.args, "by_name": value.keywords}, depth + 1)
    code = getattr(value, "__code__", None)
    if code is None:
        return getattr(value, "__qualname__", type(value).__qualname__)
    known = {"function": f"{value.__module__}.{value.__qualname__}, {_digest(_code(code).encode())}"}
    inside = zip(code.co_freevars, value.__closure__ or (), strict=True)
    closed: dict[Any, Any] = {
        name: cell.cell_contents for name, cell in inside if _filled(cell) and cell.cell_contents is not value
    }
    closed |= dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
    return known | {str(name): plain(item, depth + 1) for name, item in closed.items()}


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _code(code: CodeType) -> str:
    """Instructions, constants and names; not where in which file they stand."""
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts if type(c) is not frozenset]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames))


def problem_facts(problem: Problem) -> dict[str, Any]:
    """What is minimised: functions, model, and all records by their digest."""
    import jax

    return {
        "functions": plain(problem.functions),
        "kinds": plain(problem.inspected.kinds),
        "evaluation_batch": problem.evaluation_batch,
        "layout": problem.layout.digest,
        "num_clients": problem.num_clients,
        "counts": _array(problem.counts),
        "params": [_array(leaf) for leaf in jax.tree.leaves(problem.params)],
        "records": [_array(leaf) for leaf in jax.tree.leaves(problem.records)],
        "test": [_array(leaf) for leaf in jax.tree.leaves(problem.test)],
        "noise": None if problem.noise is None else plain(problem.noise),
    }


def _array(array: Any) -> Any:
    if array.dtype == object:
        return plain(array.tolist())
    if isinstance(array, np.memmap):  # larger than memory, maybe: a few thousand rows stand for all
        some = np.linspace(0, len(array) - 1, min(len(array), SAMPLED)).astype(np.int64)
        return f"{array.dtype} {array.shape}, {len(some)} rows {_digest(np.ascontiguousarray(array[some]))}"
    if array.size <= 1:
        return plain(array.item() if array.size else None)
    return f"{array.dtype} {array.shape}, {_digest(np.ascontiguousarray(array))}"


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
