"""The largest step of asynchronous rounds: by the roots of the recursion, and in the simulator."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.checks import InputError


def radius(a, staleness):
    """Spectral radius of e_{t+1} = e_t - a e_{t-staleness}, by its companion matrix."""
    companion = np.eye(staleness + 1, k=-1)
    companion[0, 0] += 1.0
    companion[0, staleness] -= a
    return np.abs(np.linalg.eigvals(companion)).max()


# with a server step of 1 and one step of delay the limit is only touched
@pytest.mark.parametrize("server_lr", [0.25, 0.9, 1.7])
@pytest.mark.parametrize("local_steps", [1, 2, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 11])
def test_the_limit_is_where_the_radius_is_one(staleness, local_steps, server_lr):
    curvature = 3.0
    limit = fs.theory.delayed_step_limit(
        curvature, staleness, local_steps=local_steps, server_lr=server_lr
    )

    def at(lr):
        return radius(server_lr * (1 - (1 - lr * curvature) ** local_steps), staleness)

    assert at(1.001 * limit) > 1
    assert all(at(share * limit) < 1 for share in np.linspace(0.01, 0.999, 50))


@pytest.mark.slow
def test_the_simulator_is_stable_below_it_and_not_above():
    """Six equal clients, equally fast, two replies a step: each reply is two steps late."""
    hessian = np.diag([0.5, 2.0])
    problem = fs.problems.quadratic(hessians=[hessian] * 6, linear=[[1.0, -2.0]] * 6)
    limit = fs.theory.delayed_step_limit(2.0, 2, local_steps=3)

    def grows(algorithm, lr):
        run = fs.simulate(
            algorithm, problem, rounds=300, local_steps=3, lr=lr, x0=np.ones(2), buffer=2,
            delays="constant:1", precision="float64", metrics=("distance",),
        )  # fmt: skip
        distance = np.asarray(run.history["distance"])
        return distance[-30:].max() / distance[20:50].max()

    assert grows(fs.fedavg(), 0.97 * limit) < 0.5
    assert grows(fs.fedavg(), 1.03 * limit) > 2
    assert grows(fs.scaffold(), 0.97 * limit) < 0.5
    assert grows(fs.scaffold(), 1.2 * limit) > 2


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match="staleness"):
        fs.theory.delayed_step_limit(1.0, -1)
    with pytest.raises(InputError, match="curvature"):
        fs.theory.delayed_step_limit(0.0, 1)
