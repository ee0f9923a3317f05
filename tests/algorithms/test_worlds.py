"""One text, many worlds: the algorithms give the same run on NumPy arrays and on torch tensors."""

import inspect
from itertools import product

import numpy as np
import pytest
from cases import sharp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscaffold.algorithms import ALGORITHMS, scaffold
from fedscaffold.algorithms.round import work_of
from fedscaffold.conformance import federation, run
from fedscaffold.conformance.federations import CONDITIONS, brief

torch = pytest.importorskip("torch")

# The coin of Scaffnew is the engine's; here it would be SCAFFOLD.
TRIED = {
    **{
        name: factory()
        for name, factory in ALGORITHMS.items()
        if not work_of(factory(), 1).geometric
    },
    "scaffold, option I": scaffold(option=1),
}


def assert_same(algorithm, case):
    """Both worlds agree to 1e-12 of the size of the numbers."""
    numpy, tensors = run(algorithm, case), run(algorithm, case, asarray=torch.asarray)
    assert numpy.buffers is None is tensors.buffers
    for one, other in zip(numpy[:3], tensors[:3], strict=True):
        assert other.dtype == np.float64
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12 * max(1.0, np.abs(one).max()))


# Every algorithm under all conditions at once and under none; two under each of them: a memory by moves, one by gradients.
WHICH = sharp(
    product(TRIED, CONDITIONS),
    lambda case: case[0] in ("scaffold", "feddyn") or case[1] in ("all", "together"),
)


@pytest.mark.parametrize(("name", "condition"), WHICH)
def test_numpy_and_torch_agree_under_every_condition(name, condition):
    assert_same(TRIED[name], brief(CONDITIONS[condition].case, rounds=15))


@st.composite
def cases(draw):
    """Any small federation: sampling, losses, weights, momentum, unequal steps, a schedule, a restart."""
    n, dim, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    root = random.standard_normal((n, dim, dim)) / dim
    steps = tuple(draw(st.lists(st.integers(1, 4), min_size=n, max_size=n)))
    cohorts = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))) for _ in range(rounds)
    )
    weights = random.uniform(0.1, 1.0, n)
    case = federation(
        root @ root.swapaxes(1, 2),
        random.standard_normal((n, dim)),
        random.standard_normal(dim),
        rounds,
        1,
        0.1,
    )
    return case._replace(
        cohorts=cohorts,
        lost=tuple(tuple(i for i in cohort if random.random() < 0.2) for cohort in cohorts),
        local_steps=steps,
        lr=tuple(draw(st.sampled_from([(0.1,) * 4, (0.2, 0.1, 0.05, 0.02)]))[: max(steps)]),
        weights=weights / weights.sum(),
        momentum=draw(st.sampled_from([0.0, 0.5, 0.9])),
        restart=draw(st.sampled_from([None, 1])),
    )


@given(
    cases(), st.sampled_from(sorted(set(ALGORITHMS) - {"scaffnew"})), st.sampled_from([0.5, 1.0])
)
@settings(max_examples=60, deadline=None)
def test_numpy_and_torch_agree_on_any_federation(case, name, server_lr):
    make = ALGORITHMS[name]
    takes = "server_lr" in inspect.signature(make).parameters  # FedExP finds its own
    assert_same(make(server_lr=server_lr) if takes else make(), case)
