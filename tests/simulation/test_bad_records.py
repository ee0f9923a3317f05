"""A run that diverges by a record, and not by its step, says which record."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs

RNG = np.random.default_rng(0)
SIZES = (70, 100, 30)


def clients(bad=None):
    made = [(RNG.normal(size=(n, 3)), RNG.integers(0, 2, n)) for n in SIZES]
    if bad is not None:
        client, record = bad
        made[client][1][record] = 5  # a class that there is not
    return made


def loss(w, batch):
    x, y = batch
    scores = x @ w
    taken = jnp.take_along_axis(scores, y[:, None], 1, mode="fill", fill_value=jnp.nan)
    return jnp.mean(jnp.log(jnp.exp(scores).sum(1)) - taken[:, 0])


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("bad", [(0, 0), (1, 99), (2, 29)])
def test_the_record_is_named(bad, precision):
    problem = fs.Problem(loss, np.zeros((3, 2)), clients(bad))
    run = fs.simulate(
        fs.scaffold(), problem, rounds=9, local_steps=2, lr=0.1, batch_size=4, precision=precision
    )
    assert run.diverged_at is not None
    assert f"the loss of record {bad[1]} of client {bad[0]} is nan" in run.advice


def test_of_a_loss_over_the_batch_the_client_is_named():
    def contrast(w, batch):
        return jnp.log(jnp.std(batch[0] @ w))  # no mean over records

    made = clients()
    made[2][0][:] = 0.0
    run = fs.simulate(
        fs.scaffold(), fs.Problem(contrast, np.ones(3), made), rounds=9, local_steps=2, lr=0.1
    )
    assert run.diverged_at is not None
    assert "the loss of client 2 is -inf" in run.advice


def test_a_step_that_is_too_large_is_still_the_reason():
    run = fs.simulate(
        fs.scaffold(),
        fs.Problem(lambda w, x: jnp.mean(jnp.exp(x @ w)), np.ones(3), [x for x, _ in clients()]),
        rounds=9,
        local_steps=2,
        lr=1e4,
    )
    assert run.diverged_at is not None
    assert "try a tenth of it" in run.advice
