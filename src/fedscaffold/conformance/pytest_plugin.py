"""Run the suite in the tests of another project, with one pytest item per row.

    from fedscaffold.conformance.pytest_plugin import conformance
    test_scaffold = conformance(adapter)

Rows that are not offered are skipped with the reason; a failure reports the violation and the
diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from fedscaffold.conformance.diagnosis import diagnose
from fedscaffold.conformance.identities import select
from fedscaffold.conformance.judge import Judgement, format_measure, judge
from fedscaffold.conformance.targets import Target

__all__ = ["conformance"]


def conformance(
    target: Target, only: Sequence[str] = (), precision: str = "float64"
) -> Callable[..., Any]:
    """Return a test function with one item per row.

    The target is judged once, when the first item runs.
    """
    rows = select(only)

    @cache
    def judgement() -> Judgement:
        return judge(target, rows, precision)

    @cache
    def diagnosis() -> str:
        return "".join(f"\n- {sentence}" for sentence in diagnose(judgement()))

    @pytest.mark.parametrize("row", [identity.name for identity in rows])
    def test(row: str) -> None:
        (verdict,) = [one for one in judgement().verdicts if one.name == row]
        if verdict.outcome == "not offered":
            pytest.skip(verdict.note)
        if verdict.outcome != "holds":
            pytest.fail(
                f"{verdict.outcome}: {verdict.statement} {format_measure(verdict)}{diagnosis()}",
                pytrace=False,
            )

    return test
