"""The compiled simulator against the identities, and against the plain NumPy loop, for every registered algorithm."""

import numpy as np
import optax
import pytest
import simulator_target

import fedscaffold as fs
from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.algorithms.round import needs
from fedscaffold.conformance import IDENTITIES, conform, federation, select
from fedscaffold.conformance import run as plain

MISSING = {
    "buffers",
    "loss scaling",
    "private optimiser",
    "private clip",
    "clipping",
}  # of families; the correction comes before optax, and no private run is without noise

# Conditions that "together" has all at once; each is a program of its own, and most of the time is compiling.
# `test_jax_is_numpy` and tests/algorithms/test_contract.py have momentum, unequal steps, weights and cohorts, against a loop
# that satisfies all rows; server step,
# schedule, lost replies and restart are tested one at a time by `make soak` only.
AT_ONCE = (
    "changing cohorts",
    "weights",
    "weights and sampling",
    "server step",
    "momentum",
    "unequal steps",
    "schedule",
    "lost replies",
    "restart",
)
FAMILIES = ("mean", "moves", "optimum", "first round", "gradients seen")
SHORT = [
    one
    for one in IDENTITIES
    if not (one.family in FAMILIES and one.name.endswith(tuple(f": {c}" for c in AT_ONCE)))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [SHORT, pytest.param(IDENTITIES, marks=pytest.mark.soak)], ids=["short", "all"]
)
def test_the_simulator_satisfies_every_identity(rows):
    verdicts = conform(simulator_target.run, rows)
    offered = [verdict for verdict in verdicts if verdict.outcome != "not offered"]
    assert [verdict for verdict in offered if verdict.outcome != "holds"] == []
    assert {identity.name for identity in rows if identity.family not in MISSING} == {
        one.name for one in offered
    }


@pytest.mark.slow
def test_the_simulator_in_float32_satisfies_the_identities_of_its_arithmetic():
    rows = select(
        [
            "mean: together",
            "moves: together",
            "optimum: sampling",
            "gradients seen: schedule",
            "tensors",
        ]
    )
    assert {verdict.outcome for verdict in conform(simulator_target.run, rows, "float32")} == {
        "holds"
    }


SOAK = pytest.mark.soak
SAMPLED = sorted(name for name in ALGORITHMS if not needs(ALGORITHMS[name](), "everyone"))
# With momentum one algorithm of each kind: no memory, control variates, a memory of moves, an exchange before the steps, two
# models. `test_contract.py` of tests/algorithms has all of them without, with unequal steps; `make soak` has all four.
KINDS = ("fedavg", "scaffold", "feddyn", "mime", "ditto")
CASES = [
    pytest.param(
        name, momentum, unequal, marks=() if momentum and not unequal and name in KINDS else SOAK
    )
    for name in SAMPLED
    for plain_sgd in [needs(ALGORITHMS[name](), "sgd")]
    for momentum in ((0.0,) if plain_sgd else (0.0, 0.8))
    for unequal in (False, True)
]


@pytest.mark.parametrize(("name", "momentum", "unequal"), CASES)
def test_jax_is_numpy(name, momentum, unequal):
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(5, 3, 3))
    hessians = roots @ roots.transpose(0, 2, 1) / 3 + 0.3 * np.eye(3)
    case = federation(
        hessians, rng.normal(size=(5, 3)), rng.normal(size=3), rounds=9, steps=4, lr=0.05
    )._replace(
        cohorts=tuple(tuple(sorted(rng.permutation(5)[: 1 + r % 4].tolist())) for r in range(9)),
        local_steps=(1, 4, 2, 3, 4) if unequal else (4,) * 5,
        weights=np.array([0.1, 0.3, 0.2, 0.25, 0.15]),
        momentum=momentum,
    )
    local = {"local_optimizer": optax.sgd(0.05, momentum=momentum)} if momentum else {"lr": 0.05}
    run = fs.simulate(
        ALGORITHMS[name](),
        fs.problems.quadratic(hessians=case.hessians, linear=case.linear, x0=case.x0),
        rounds=9,
        local_steps=case.local_steps,
        cohorts=case.cohorts,
        weights=case.weights,
        precision="float64",
        metrics=(),
        **local,
    )
    trace = plain(ALGORITHMS[name](), case)
    np.testing.assert_allclose(run.vector, trace.x[-1], rtol=0, atol=1e-12)
    if run.clients.c_i is not None:
        np.testing.assert_allclose(run.clients.c_i, trace.c_i[-1], rtol=0, atol=1e-12)
        np.testing.assert_allclose(run.server.c, trace.c[-1], rtol=0, atol=1e-12)
