"""What a loss may return: one floating-point number. All else is refused in a line, in the simulator and at a JAX site."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.deploy.jax_client import JaxLearner

CLIENTS = [np.arange(1.0, 4.0), np.arange(2.0, 7.0)]
WRONG = {
    "shape": (lambda v: v, r"got shape \(\d,\); end it with .mean\(\)"),
    "tuple": (lambda v: (v.mean(), 3), "got a tuple"),
    "None": (lambda v: None, "got a NoneType"),
    "dict": (lambda v: {"loss": v.mean()}, "got a dict"),
    "integer": (lambda v: jnp.int32(3) + 0 * v.mean().astype(jnp.int32), "got int32"),
    "truth": (lambda v: v.mean() > 0, "got bool"),
    "complex": (lambda v: v.mean() * 1j, "got complex"),
}


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("case", WRONG)
def test_the_simulator_refuses(case, batch_size):
    value, said = WRONG[case]
    problem = fs.Problem(lambda w, batch: value((batch - w) ** 2), np.ones(()), CLIENTS)
    with pytest.raises(fs.InputError, match=said):
        fs.simulate(fs.fedavg(), problem, rounds=1, local_steps=1, lr=0.1, batch_size=batch_size)


@pytest.mark.parametrize("case", WRONG)
def test_a_jax_site_refuses(case):
    value, said = WRONG[case]
    learner = JaxLearner(
        lambda params, batch: value((batch - params["w"]) ** 2),
        {"w": np.ones(())},
        lambda site: CLIENTS[0],
    )
    with pytest.raises(fs.InputError, match=said):
        learner._gradient(learner.start, CLIENTS[0], None, None)


def test_a_constant_has_no_gradient():
    problem = fs.Problem(lambda w, batch: 0.5, np.ones(()), CLIENTS)
    run = fs.simulate(fs.scaffold(), problem, rounds=2, local_steps=1, lr=0.1)
    assert float(run.x) == 1.0
    np.testing.assert_allclose(run.history["loss"], 0.5, rtol=1e-6)
