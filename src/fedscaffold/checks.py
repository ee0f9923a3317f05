"""Argument checks. Error messages state what is wrong, what is allowed, and what was received.

Numbers are ints, floats, and NumPy or JAX scalars; bools and strings are not. Floats such as 1e9
and 5.0 are refused if a whole number is required.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "LARGEST",
    "InputError",
    "choice",
    "fits",
    "is_word",
    "memoised",
    "number",
    "one_number",
    "path",
    "share",
    "shown",
    "text",
    "whole",
    "written",
]

P = ParamSpec("P")
R = TypeVar("R")
LARGEST = 2**63 - 1
"""Largest whole number: 64 bits."""
MOST_SHOWN = 120
# what a function of (params, batch) may take besides
BY_NAME = "weights", "key", "state", "train"
CGROUP = Path("/sys/fs/cgroup/memory.max")


class InputError(ValueError):
    """Invalid input, with a message of one line.

    The command line prints it and exits with code 2.
    """


def shown(value: Any) -> str:
    """Return a value as shown in messages: on one line, truncated if it is long.

    >>> len(shown([1] * 1000)), shown(10**5000)
    (63, 'an int of over 4300 digits')
    """
    try:
        line = " ".join(repr(value).split())
    except (ValueError, RecursionError, MemoryError):
        if isinstance(value, int):
            return "an int of over 4300 digits"
        return f"a {type(value).__name__}"
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]}..."


def choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of `allowed`; otherwise list them and suggest the nearest.

    >>> choice("algorithm", "scafold", ["fedavg", "scaffold"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown algorithm 'scafold' (did you mean 'scaffold'?); known:
        fedavg, scaffold
    """
    known = sorted(allowed)
    if isinstance(value, str) and value in known:
        return value
    near = (
        difflib.get_close_matches(str(value)[:MOST_SHOWN], known, n=1, cutoff=0.6)
        if isinstance(value, str)
        else []
    )
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InputError(f"unknown {name} {shown(value)}{hint}; known: {', '.join(known)}")


def number(
    name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf
) -> float:
    """Return `value` as a finite Python float within its bounds.

    >>> number("lr", -0.1, above=0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr must be a number above 0, got -0.1
    """
    given = _scalar(value)
    try:
        real = math.nan if given is None else float(given)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real) or real <= above or real < at_least:
        bound = f" above {above:g}" if above > -math.inf else ""
        bound = f" of at least {at_least:g}" if at_least > -math.inf else bound
        raise InputError(f"{name} must be a number{bound}, got {shown(value)}")
    return real


def whole(name: str, value: Any, *, at_least: int = 1, at_most: int = LARGEST) -> int:
    """Return `value` as a Python int within its bounds.

    >>> whole("rounds", 2.5)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: rounds must be a whole number of at least 1, got 2.5
    >>> whole("seed", 1e9, at_least=0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: seed must be a whole number of at least 0, got 1000000000.0:
        write 1000000000
    """
    given = _scalar(value)
    is_whole = isinstance(given, numbers.Integral)
    if is_whole and at_least <= given <= at_most:
        return int(given)
    beyond = is_whole and given > at_most
    upper = f" and at most {at_most}" if at_most < LARGEST or beyond else ""
    hint = (
        f": write {int(given)}"
        if isinstance(given, float) and given.is_integer() and abs(given) < 1e15
        else ""
    )
    raise InputError(
        f"{name} must be a whole number of at least {at_least}{upper}, got {shown(value)}{hint}"
    )


def share(name: str, value: Any, of: str, *, at_most: int = LARGEST) -> float | int:
    """Return a share in (0, 1], given as a float, or a number of at least 1, given as an int.

    >>> share("cohort", 0.2, "clients"), share("cohort", 5, "clients")
    (0.2, 5)
    >>> share("cohort", 2.0, "clients")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: cohort must be a share in (0, 1] such as 0.5, or a number of
    clients such as 5, got 2.0
    """
    given = _scalar(value)
    if isinstance(given, numbers.Integral):
        return whole(name, given, at_most=at_most)
    if given is not None and 0 < given <= 1:
        return float(given)
    raise InputError(
        f"{name} must be a share in (0, 1] such as 0.5, or a number of {of} such as 5, got "
        f"{shown(value)}"
    )


def is_word(value: Any, word: str) -> bool:
    """Return whether a value is this word; arrays, which compare entry by entry, are not."""
    return isinstance(value, str) and value == word


def written(word: str) -> int | float | str:
    """Return the number that a word such as "20" represents, or the word if it is none.

    >>> written("20"), written("0.5"), written("many")
    (20, 0.5, 'many')
    """
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def text(name: str, value: Any) -> str:
    """Return `value` if it is text for a file: not empty, no zero bytes, valid in UTF-8.

    >>> text("output.dir", "")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: output.dir must be text that is not empty, got ''
    """
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be text that is not empty, got {shown(value)}")
    if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
        raise InputError(f"{name} must be text without zero bytes, in UTF-8, got {shown(value)}")
    return value


def path(name: str, value: Any) -> Path:
    """Return `value` as a path, if it can be one.

    >>> path("checkpoint", "runs/first").name
    'first'
    """
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(f"{name} must be a path, got {shown(value)}")
    return Path(text(name, os.fspath(value)))


def fits(what: str, needed: int) -> None:
    """Raise an InputError if something needs more memory than this machine has.

    >>> fits("dim 99999999999", 99999999999**2 * 8)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: dim 99999999999 would take 7.45e+13 GB of memory, and this
        machine has ...
    """
    if needed > (most := memory()):
        size = f"{needed / 2**30:.3g} GB of memory, and this machine has {most / 2**30:.3g}"
        raise InputError(f"{what} would take {size}")


def memory() -> float:
    """Return the memory of this machine or container, in bytes.

    >>> memory() > 2**20
    True
    """
    try:
        most = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return math.inf
    try:
        return min(most, float(CGROUP.read_text()))
    except (ValueError, OSError):  # no limit, or no such thing
        return most


def one_number(name: str, value: Any, *, floating: bool = True) -> None:
    """Raise an InputError if the value of a function such as a loss is not one number.

    Args:
        name: The function, as in "loss(params, batch)".
        value: A number, or an array or tensor of any library.
        floating: Whether it must be of floating point.

    >>> import numpy as np
    >>> one_number("loss(params, batch)", np.ones(4))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: loss(params, batch) must be one number, the mean over the batch's
    records, got shape (4,); end it with .mean()
    >>> one_number("loss(params, batch)", (0.5, 3))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: loss(params, batch) must be one number, the mean over the batch's
    records, got a tuple
    """
    wanted = f"{name} must be one number, the mean over the batch's records"
    shape = tuple(getattr(value, "shape", ()))
    if shape:
        raise InputError(f"{wanted}, got shape {shape}; end it with .mean()")
    if not hasattr(value, "dtype") and not isinstance(value, (bool, int, float)):
        raise InputError(f"{wanted}, got a {type(value).__name__}")
    kind = str(getattr(value, "dtype", type(value).__name__))
    if floating and "float" not in kind:
        raise InputError(f"{wanted}, of floating point, got {kind}")


def memoised(make: Callable[P, R]) -> Callable[P, R]:
    """Return a cached version of a function that checks its arguments.

    Unlike `functools.cache`, it tells True from 1, and passes a list on to the check.

    >>> memoised(lambda k: whole("k", k))([3])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: k must be a whole number of at least 1, got [3]
    """
    known = lru_cache(maxsize=None, typed=True)(make)

    @wraps(make)
    def made(*given: P.args, **named: P.kwargs) -> R:
        try:
            hash((given, tuple(named.values())))
        except TypeError:
            return make(*given, **named)
        return known(*given, **named)  # type: ignore[arg-type]

    return made


def _scalar(value: Any) -> Any:
    """Return a Python number, or that of a NumPy or JAX scalar; None for bools and other things."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return value


def taken_by_name(function: Callable[..., Any], name: str = "the function") -> set[str]:
    """Return which of `weights`, `key`, `state` and `train` a function takes by name.

    Args:
        function: A function of (params, batch) and some of these.
        name: What to call it in an error.

    Raises:
        InputError: It does not take two arguments, or needs others.

    >>> sorted(taken_by_name(lambda params, batch, state, train: (0.0, state)))
    ['state', 'train']
    >>> taken_by_name(lambda params, x, y: 0.0, "loss")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: loss must take (params, batch), and may take weights, key, state
    and train by name, got (params, x, y); unpack the batch inside it: x, y = batch
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in callables have none
        return set()
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = [
        p
        for p in parameters
        if p not in positional[:2] and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    several = len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not several or any(p.default is p.empty and p.name not in BY_NAME for p in more):
        raise InputError(
            f"{name} must take (params, batch), and may take {', '.join(BY_NAME[:-1])} and "
            f"{BY_NAME[-1]} by name, got {signature}; unpack the batch inside it: x, y = batch"
        )
    return {p.name for p in more if p.name in BY_NAME and p.kind is not p.POSITIONAL_ONLY}
