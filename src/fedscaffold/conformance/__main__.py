"""`python -m fedscaffold.conformance module:adapter`: run the suite with NumPy alone.

Exit codes: 0 if no offered row fails, 1 if a row fails, 2 if a row ends in an error or the command
is invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.conformance.diagnosis import diagnose
from fedscaffold.conformance.identities import select
from fedscaffold.conformance.judge import OUTCOMES, PRECISIONS, judge, load_target, table
from fedscaffold.conformance.reference_target import ours

__all__ = ["judged", "main"]


def judged(
    target: str | None, only: Sequence[str] = (), precision: str = "float64"
) -> tuple[dict[str, Any], list[str], int]:
    """Return the verdicts as JSON and as lines of text, and the exit code.

    >>> answer, lines, code = judged(None, only=["start"])
    >>> answer["holds"], answer["fails"], code
    (1, 0, 0)
    """
    judgement = judge(ours if target is None else load_target(target), select(only), precision)
    verdicts, met = judgement.verdicts, judgement.met
    outcomes = [verdict.outcome for verdict in verdicts]
    counts: dict[str, int] = {name: outcomes.count(name) for name in OUTCOMES}
    diagnosis = diagnose(judgement)
    answer = {
        "target": target or "fedscaffold",
        "precision": precision,
        **counts,
        "c": "the mean over the clients met so far" if met else "the mean over all clients",
        "diagnosis": diagnosis,
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }
    lines = [table(verdicts)]
    lines += [f"c is {answer['c']}"] if met else []
    lines += (
        ["What is wrong, as far as the numbers tell:", *(f"- {one}" for one in diagnosis)]
        if diagnosis
        else []
    )
    return answer, lines, 1 if counts["fails"] else 2 if counts["error"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m fedscaffold.conformance", description="Judge a SCAFFOLD."
    )
    parser.add_argument(
        "target", nargs="?", help="module:name of an adapter or an algorithm; ours by default"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ROW",
        help="a row or a family; may be repeated",
    )
    parser.add_argument(
        "--precision", default="float64", choices=PRECISIONS, help="the target's arithmetic"
    )
    parser.add_argument("--json", action="store_true", help="verdicts for programs")
    given = parser.parse_args(arguments)
    try:
        answer, lines, code = judged(given.target, given.only, given.precision)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps(answer, indent=2) if given.json else "\n".join(lines)) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
