"""What a claim of a paper is here.

Measured once, judged by its stated criterion, drawn, and put in words.

    measure    (settings, memo) -> data      the part that costs time; what it returns is cached
    judge      (data, settings) -> checks    expected and measured, each with its criterion
    tables     (data) -> tables
    draw       (data) -> drawings            vector figures in one style

Checks are of three kinds. A "criterion" is what we ask of a reproduction. A "paper" check takes the
paper's own words literally, also where we believe them to be wrong. A "report" is shown and decides
nothing. A check that the size of the run cannot decide has passed = None and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from papers.cache import Data, Memo, Part

__all__ = [
    "SIZES",
    "Check",
    "Claim",
    "Data",
    "Drawing",
    "Memo",
    "Number",
    "Outcome",
    "Part",
    "Settings",
    "Table",
    "verdict",
]

Settings: TypeAlias = Mapping[str, Any]
Number: TypeAlias = float | int | str

SIZES = ("quick", "full")
MARKS = {True: "pass", False: "fail", None: "not decided"}


class Check(NamedTuple):
    """One statement with the expected and the measured number."""

    statement: str
    expected: Number
    """What the paper prints or, where it prints no number, what its statement or theory gives."""
    measured: Number
    criterion: str
    passed: bool | None
    """None where this size of the run cannot decide."""
    kind: str = "criterion"
    """"criterion", "paper" or "report"."""
    note: str = ""
    source: str = "expected"
    """"published" where the expected number is printed in the paper."""

    @property
    def ratio(self) -> float | None:
        """Measured over expected, where both are numbers."""
        if isinstance(self.expected, str) or isinstance(self.measured, str) or self.expected == 0:
            return None
        return self.measured / self.expected

    @property
    def mark(self) -> str:
        """What became of it, in a word."""
        return "shown" if self.kind == "report" else MARKS[self.passed]


class Table(NamedTuple):
    """A printed table."""

    title: str
    head: list[str]
    rows: list[list[Any]]
    note: str = ""


class Drawing(NamedTuple):
    """A figure with its file name and caption."""

    name: str
    caption: str
    figure: Any


class Claim(NamedTuple):
    """A figure, a table or a statement of a paper."""

    name: str
    title: str
    source: str
    says: str
    """What the paper says, in a sentence or two."""
    sizes: Mapping[str, Settings]
    """The settings of the quick and of the full size."""
    measure: Callable[[Settings, Memo], Data]
    judge: Callable[[Data, Settings], list[Check]]
    tables: Callable[[Data], list[Table]]
    draw: Callable[[Data], list[Drawing]]
    errata: Callable[[Data], list[str]] = lambda data: []
    """Where the paper is wrong, with the evidence in the data."""
    film: Callable[[Data], str] | None = None
    """A moving picture, as HTML."""
    depends: Callable[[Settings], str] = lambda settings: ""
    """A fingerprint of what else the result depends on: the user's data."""
    adapt: Callable[[Settings], Settings] = lambda settings: settings
    """The settings with the data that are there."""

    def settings(self, size: str) -> Settings:
        """What is measured in this size."""
        return self.adapt(self.sizes[size])


class Outcome(NamedTuple):
    """What became of a claim."""

    name: str
    title: str
    source: str
    says: str
    size: str
    verdict: str
    """"reproduced", "partly" or "not"."""
    words: str
    checks: list[Check]
    tables: list[Table]
    errata: list[str]
    figures: list[tuple[str, str]]
    """(name, caption) of every figure."""
    film: str
    settings: dict[str, Any]
    about: list[str]
    """What else to say: which data, what was left out."""
    seconds: float
    cached: bool

    @property
    def failed(self) -> int:
        """How many criteria failed; the paper's own words may fail without ours doing so."""
        return sum(check.passed is False and check.kind == "criterion" for check in self.checks)


def verdict(checks: Sequence[Check]) -> tuple[str, str]:
    """The verdict and a sentence: all decided checks pass, some do, or fewer than half of them.

    If more checks are open than decided, the claim is reproduced partly at most.

    >>> from papers.criteria import at_least
    >>> ok, bad = at_least("a", 1.0, 1.0, 1.0), at_least("b", 1.0, 0.0, 1.0)
    >>> verdict([ok, ok])[0], verdict([ok, ok, bad])[0], verdict([ok, bad, bad])[0]
    ('reproduced', 'partly', 'not')
    >>> verdict([ok, *[ok._replace(passed=None)] * 2])
    ('partly', '1 of 1 checks pass; 2 not decided at this size')
    """
    decided = [check for check in checks if check.kind != "report" and check.passed is not None]
    good = [check for check in decided if check.passed]
    open_ = sum(check.kind != "report" and check.passed is None for check in checks)
    word = (
        "reproduced"
        if len(good) == len(decided) >= max(1, open_)
        else "partly"
        if 2 * len(good) >= len(decided)
        else "not"
    )
    if not decided:
        return "not", "nothing could be decided at this size"
    words = f"{len(good)} of {len(decided)} checks pass"
    failed = [check for check in decided if not check.passed]
    for kind, label in (("criterion", "fails"), ("paper", "the paper's words do not hold")):
        named = [f'"{check.statement}"' for check in failed if check.kind == kind]
        words += f"; {label}: {', '.join(named)}" if named else ""
    return word, words + (f"; {open_} not decided at this size" if open_ else "")
