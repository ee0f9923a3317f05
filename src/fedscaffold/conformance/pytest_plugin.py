"""The suite inside a peer's own tests, one pytest item a row.

    from fedscaffold.conformance.pytest_plugin import conformance
    test_scaffold = conformance(adapter)

A row that is not offered is skipped, with its reason; one that fails says by how much, and what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from fedscaffold.conformance.diagnosis import diagnose
from fedscaffold.conformance.identities import select
from fedscaffold.conformance.judge import Judgement, judge, measured
from fedscaffold.conformance.targets import Target

__all__ = ["conformance"]


def conformance(target: Target, only: Sequence[str] = (), precision: str = "float64") -> Callable[..., Any]:
    """Return a test function with an item for each row; the target is judged once, when the first of them runs."""
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
            pytest.fail(f"{verdict.outcome}: {verdict.statement} {measured(verdict)}{diagnosis()}", pytrace=False)

    return test
