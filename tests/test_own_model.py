"""The reader's own algorithm, as docs/own-model.md has it: what the page says of it is so."""

import re
from pathlib import Path

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.conformance import conform

PAGE = Path(__file__).parent.parent / "docs" / "own-model.md"


@pytest.fixture(scope="module")
def mine():
    (text,) = re.findall(r"^```python\n(# mine\.py\n.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names = {}
    exec(compile(text, "mine.py", "exec"), names)
    return names


def test_the_suite_judges_it_as_the_page_says(mine):
    whole = [verdict.outcome for verdict in conform(mine["adapter"])]
    assert "fails" not in whole
    assert whole.count("holds") > 10 * whole.count("not offered")
    half = {verdict.name: verdict.outcome for verdict in conform(mine["half"])}
    assert half["mean: all"] == half["first round: all"] == "holds"
    assert half["mean: sampling"] == half["optimum: all"] == "fails"


def test_with_full_trust_it_is_scaffold_in_the_simulator_too(mine):
    problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, seed=0)
    settings = {"rounds": 20, "local_steps": 4, "lr": 0.2, "cohort": 0.5, "precision": "float64"}
    runs = [fs.simulate(algorithm, problem, **settings) for algorithm in (mine["cautious"](), fs.scaffold())]
    np.testing.assert_allclose(runs[0].vector, runs[1].vector, rtol=1e-12)
    half = fs.simulate(mine["cautious"](0.5), problem, **settings)
    assert np.abs(half.vector - runs[1].vector).max() > 1e-6
