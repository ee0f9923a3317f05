"""A site's own privacy rules: what it has agreed to, in a file that only the site changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import make
from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import digest_inputs
from fedscaffold.deploy.settings import Settings
from fedscaffold.parsing import format_of, text_of, toml
from fedscaffold.privacy.mechanism import expected_batch, sampling_rate
from fedscaffold.privacy.records import Records
from fedscaffold.state.files import make_folder, write_private

__all__ = ["RULES", "Rules", "read_rules", "refuse_other_rules", "rules_of", "write_rules"]

FORMAT = 1
RULES = "privacy.toml"
WRITTEN = """\
# The privacy of this site's records, by its own word: settings that ask for other work, and other
# apps, are refused, and nothing is trained beyond stop_at_epsilon. It was written before the first
# round, and only the site changes it. Without a line `app`, any app is taken.
"""


class Rules(NamedTuple):
    """What a site has agreed to."""

    clip: float
    noise: float
    sampling: str
    rate: float
    """Probability with which a local step draws a record."""
    steps: int
    """Local steps of a round."""
    delta: float
    stop_at_epsilon: float | None = None
    app: str | None = None
    """Digest of the app's files; None for any app."""


OWN = ("delta", "stop_at_epsilon")  # rules in which a site need not agree with the federation


def rules_of(settings: Settings, site: str) -> tuple[Rules, float] | None:
    """Return the rules that settings ask of a site, and its expected batch; None without privacy.

    Both follow from the settings alone, the number of records included.
    """
    asked = settings.privacy
    if asked is None:
        return None
    records = np.float64(settings.deploy.records[site])
    work = work_of(make(**settings.algorithm), settings.local.steps, settings.local.batch_size)
    rules = Rules(
        clip=asked.clip,
        noise=asked.noise,
        sampling=asked.sampling,
        rate=float(sampling_rate(work.batch_size, records)),
        steps=int(work.steps),
        delta=asked.delta,
        stop_at_epsilon=asked.stop_at_epsilon,
        app=digest_inputs(settings.app, {}),
    )
    return rules, float(expected_batch(work.batch_size, records))


def refuse_other_rules(own: Rules, asked: Rules, site: str) -> None:
    """Raise `Refused` if settings ask for other work, or another app, than a site has agreed to."""
    for name, agreed in own._asdict().items():
        there = getattr(asked, name)
        if name in OWN or agreed == there or (name == "app" and agreed is None):
            continue
        raise Refused(
            "privacy",
            f"{name} = {str(there)[:12]} is asked of {site}, which has agreed to "
            f"{str(agreed)[:12]}; if that is meant, change it in its own {RULES}",
        )


def read_rules(path: Path) -> Rules:
    """Read a site's own rules.

    Raises:
        InputError: The file is damaged, or a value is out of range.
    """
    table = toml(text_of(path), str(path))
    format_of(table.pop("format", None), FORMAT, str(path))
    for key in table:
        checks.choice("key", key, Rules._fields)
    free = Rules._field_defaults
    if missing := [name for name in Rules._fields if name not in table and name not in free]:
        raise InputError(f"{path} lacks {missing[0]}")
    rate, steps, app = table.pop("rate"), table.pop("steps"), table.pop("app", None)
    if checks.number("rate", rate, above=0) > 1:
        raise InputError(f"{path}: rate must be at most 1, got {rate}")
    held = Records(**table)
    return Rules(
        clip=float(held.clip),
        noise=float(held.noise),
        sampling=held.sampling,
        rate=float(rate),
        steps=checks.whole("steps", steps),
        delta=float(held.delta),
        stop_at_epsilon=held.stop_at_epsilon,
        app=app,
    )


def write_rules(path: Path, rules: Rules) -> None:
    """Write the rules of a site that first takes part."""
    make_folder(path.parent, private=True)
    given = {name: value for name, value in rules._asdict().items() if value is not None}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
    write_private(path, f"{WRITTEN}format = {FORMAT}\n{''.join(lines)}")
