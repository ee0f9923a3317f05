"""Read TOML and JSON; invalid input raises an InputError of one line."""

from __future__ import annotations

import json as standard_json
import math
import tomllib
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError, shown, whole

__all__ = ["NotToml", "format_of", "json", "plain", "record", "text_of", "toml"]


class NotToml(InputError):
    """Text that is not valid TOML."""


def toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; `source` names the text in error messages.

    >>> toml(chr(0xFEFF) + "rounds = 3", "config.toml")
    {'rounds': 3}
    >>> toml("rounds = = 3", "config.toml")
    Traceback (most recent call last):
    fedscaffold.parsing.NotToml: config.toml is not valid TOML: Invalid value (at line 1, column 10)
    >>> toml("x = " + "[" * 9999, "config.toml")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: config.toml cannot be read: it is nested too deep
    """
    try:
        # the mark that some editors put before UTF-8
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise NotToml(f"{source} is not valid TOML: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} cannot be read: {_reason(error)}") from None


def json(text: str | bytes, source: str) -> Any:
    """Parse JSON; `source` names the text in error messages.

    >>> json('{"round": 1', "status.json")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: status.json is not valid JSON: Expecting ',' delimiter: line 1
        column 12 (char 11)
    """
    try:
        return standard_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not valid JSON: {_reason(error)}") from None


def format_of(value: Any, newest: int, source: str) -> int:
    """Return the format version of a file; a file of version 0.1.0 states none and has format 1.

    Args:
        value: The format that the file states, or None.
        newest: The newest format that this version reads.
        source: Name of the file in error messages.

    Raises:
        InputError: The format is not a whole number, or newer than this version supports.

    >>> format_of(None, 2, "config.toml")
    1
    >>> format_of(3, 2, "config.toml")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: config.toml has format 3, and this version reads formats up to 2:
        update fedscaffold
    """
    if value is None:
        return 1
    found = whole(f"the format of {source}", value, at_least=1)
    if found > newest:
        raise InputError(
            f"{source} has format {found}, and this version reads formats up to {newest}: update "
            "fedscaffold"
        )
    return found


def plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy numbers to Python numbers, NaN and infinities to null.

    >>> plain({"loss": float("nan"), "rounds": (1, 2)})
    {'loss': None, 'rounds': [1, 2]}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def text_of(path: Path) -> str:
    """Return the text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read: {error}; it must be text in UTF-8") from None


def record(path: Path, **kinds: type) -> dict[str, Any]:
    """Read a JSON object from a file, and check the types of the given keys.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "site.json"
    >>> _ = path.write_text('{"site": 3}')
    >>> record(path, site=str)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: .../site.json is damaged: 'site' must be of type str, got 3
    """
    held = json(text_of(path), str(path))
    if not isinstance(held, dict):
        raise InputError(f"{path} is damaged: it must be a JSON object, got {shown(held)}")
    for key, kind in kinds.items():
        if not isinstance(held.get(key), kind):
            got = shown(held[key]) if key in held else "nothing"
            raise InputError(
                f"{path} is damaged: {key!r} must be of type {kind.__name__}, got {got}"
            )
    return held


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return "it holds a number of over 4300 digits" if "4300 digits" in str(error) else str(error)
