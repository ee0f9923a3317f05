"""Integers that a float32 run cannot hold are refused wherever data come in; all others count as they are."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.deploy.jax_client import JaxLearner

WIDE = np.array([3, 1 << 40])
CLIENTS = [{"i": WIDE, "y": np.array([1.0, 2.0])}, {"i": np.array([1, 2]), "y": np.ones(2)}]
SCALE = 1e-12
ASK = {"rounds": 1, "local_steps": 1, "lr": 0.1, "metrics": ("loss",)}
TOO_LARGE = "hold 1099511627776, which is too large for int32, the integers of float32 runs"


def loss(w, batch):
    return jnp.mean((batch["i"] * SCALE * w[0] - batch["y"]) ** 2)


def mean_loss(w):
    return np.mean([np.mean((c["i"] * SCALE * w - c["y"]) ** 2) for c in CLIENTS])


def narrow(clients):
    return [{"i": client["i"] % 1000, "y": client["y"]} for client in clients]


def test_double_precision_has_them():
    run = fs.simulate(
        fs.fedavg(), fs.Problem(loss, np.ones(1), CLIENTS), **ASK, precision="float64"
    )
    assert run.history["loss"][-1] == pytest.approx(mean_loss(run.vector[0]), rel=1e-12)
    assert abs(mean_loss(run.vector[0]) - mean_loss(0.0)) > 0.1  # and they matter


@pytest.mark.parametrize(
    "more",
    [{}, {"client_state": "sparse"}, {"devices": 1}, {"cohort": 1, "cohorts": None, "seed": 3}],
    ids=["array", "out of core", "one device", "sampled"],
)
def test_single_precision_refuses_them(more):
    problem = fs.Problem(loss, np.ones(1), CLIENTS)
    with pytest.raises(fs.InputError, match=TOO_LARGE):
        fs.simulate(fs.fedavg(), problem, **ASK | {"metrics": ()}, **more)


def test_small_ones_of_64_bits_are_those_of_32():
    runs = [
        fs.simulate(
            fs.fedavg(),
            fs.Problem(
                lambda w, batch: jnp.mean((batch["i"] * w[0] - batch["y"]) ** 2),
                np.ones(1),
                [{"i": c["i"].astype(kind), "y": c["y"]} for c in narrow(CLIENTS)],
            ),
            **ASK | {"lr": 1e-7},
        )
        for kind in (np.int64, np.uint64, np.int32)
    ]
    np.testing.assert_array_equal(runs[0].vector, runs[2].vector)
    np.testing.assert_allclose(runs[1].vector, runs[2].vector, rtol=1e-6)


def test_data_of_a_metric_and_of_the_test_are_refused_too():
    problem = fs.Problem(loss, np.ones(1), narrow(CLIENTS), test=CLIENTS[0], accuracy=loss)
    with pytest.raises(fs.InputError, match=TOO_LARGE):
        fs.simulate(fs.fedavg(), problem, **ASK | {"metrics": ("accuracy",)})
    metric = fs.metric(loss, on=CLIENTS[0], name="own")
    with pytest.raises(fs.InputError, match=TOO_LARGE):
        fs.simulate(
            fs.fedavg(),
            fs.Problem(loss, np.ones(1), narrow(CLIENTS)),
            **ASK | {"metrics": [metric]},
        )


def test_a_state_that_is_too_wide_is_refused():
    def counting(w, batch, state):
        return loss(w, batch), {"seen": state["seen"] + 1}

    problem = fs.Problem(counting, np.ones(1), narrow(CLIENTS), state={"seen": np.array(1 << 40)})
    with pytest.raises(fs.InputError, match=TOO_LARGE):
        fs.simulate(fs.fedavg(), problem, **ASK | {"metrics": ()})


def test_a_jax_site_refuses_its_own():
    sites = dict(zip(("north", "south"), CLIENTS, strict=True))
    with pytest.raises(fs.InputError, match=f"the records of north {TOO_LARGE}"):
        JaxLearner(loss, {"w": np.ones(1)}, sites.__getitem__).site("north")
    JaxLearner(loss, {"w": np.ones(1)}, sites.__getitem__, precision="float64").site("north")
    JaxLearner(loss, {"w": np.ones(1)}, sites.__getitem__).site("south")
