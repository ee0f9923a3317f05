"""The reliability wall: one tile for each fault.

Names and what is tried are those of the scenarios of deployment.

A tile is covered because `tests.faults` has a scenario of its number, not because a file says so.
Only the faults that no scenario has are told in full, in wall.toml.
"""

import re
import sys
import tomllib
from collections import Counter
from html import escape
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[2]))  # tests.faults is a package of the checkout

from tests.faults import SCENARIOS

MUSEUM = "museum.html"


class Words(NamedTuple):
    """What a tile says beside its scenario's own words."""

    without: str
    ours: str
    curve: str = ""
    """The exhibit of the museum that shows what happens without protection."""


class Open(NamedTuple):
    """A fault that no scenario covers: what is there, and what is not."""

    name: str
    state: str
    without: str
    ours: str
    tests: list[str]


TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORDS = {int(number): Words(**words) for number, words in TOLD["scenario"].items()}
OPEN = {int(number): Open(**words) for number, words in TOLD["open"].items()}
TILES = max(*SCENARIOS, *OPEN)
STATES = {"scenario": "covered by a scenario", "part": "in part, by tests", "none": "not covered"}


def state(number):
    """Of one tile: a scenario counts before anything that is said here."""
    return "scenario" if number in SCENARIOS else OPEN[number].state


def tile(number):
    """One fault."""
    if number in SCENARIOS:
        name, scenario = SCENARIOS[number]
        without, ours, curve = WORDS.get(number, Words("", ""))
        tried = re.sub(r"\s+", " ", (scenario.__doc__ or "").split("\n\n")[0]).strip()
        where = f"Tried: {escape(tried)}"
    else:
        name, _, without, ours, tests = OPEN[number]
        names = [escape(test.partition("::")[2]).replace("_", "_<wbr>") for test in tests]
        curve, where = "", "Tests: " + ", ".join(f"<code>{one}</code>" for one in names)
    see = f' <a href="{MUSEUM}#{curve}">See the curve.</a>' if curve else ""
    kind = state(number)
    return (
        f'<section class="tile {kind}" id="fault-{number}">\n'
        f'<p class="state">{number} · {STATES[kind]}</p>\n<p class="fault">{escape(name)}</p>\n'
        f"<p><b>Without protection.</b> {escape(without)}{see}</p>\n<p><b>Here.</b> "
        f"{escape(ours)}</p>\n"
        f'<p class="where">{where}</p>\n</section>'
    )


def tiles():
    """The wall."""
    return (
        '<div class="wall">\n'
        + "\n".join(tile(number) for number in range(1, TILES + 1))
        + "\n</div>"
    )


def count():
    """How many tiles are in which state, in a sentence."""
    counts = Counter(state(number) for number in range(1, TILES + 1))
    return ", ".join(f"**{counts[kind]}** {words}" for kind, words in STATES.items()) + "."
