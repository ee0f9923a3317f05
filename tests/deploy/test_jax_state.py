"""JAX sites whose loss updates a state: the deployment is the simulation, under either policy for the state."""

import jax.numpy as jnp
import numpy as np
import pytest
from deploy_case import SITES, START, data, settings

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.client import Work, answer
from fedscaffold.deploy.jax_client import JaxLearner
from fedscaffold.deploy.settings import Local
from fedscaffold.state import latest

ROUNDS, STEPS, LR = 3, 2, 0.01
STATE = {
    "mean": np.array([0.3, -0.2]),
    "seen": {"steps": np.array(2), "begun": np.array(False)},
}


def loss(params, batch, state, train):
    """Records are centred by their mean in training, and by the running mean where it is measured."""
    a, b = batch
    centre = b.mean(axis=0) if train else state["mean"]
    value = (a * (params["w"] * (1 + params["w"]) - b + centre) ** 2).sum(axis=1).mean()
    if train:
        seen = {"steps": state["seen"]["steps"] + 1, "begun": jnp.array(True)}
        mean = 0.8 * state["mean"] + 0.2 * (b * params["w"]).mean(axis=0)
        state = {"mean": mean, "seen": seen}
    return value, state


def spread(params, batch, state, weights):
    return weights @ jnp.abs(batch[1] - state["mean"]).sum(axis=1)


def learner(**more):
    made = {"state": STATE, "metrics": {"spread": spread}, "precision": "float64"} | more
    return JaxLearner(loss, {"w": START}, data, **made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "table", "buffers"),
    [
        (fs.scaffold(), "name = 'scaffold'", "average"),
        (fs.scaffold(option=1), "name = 'scaffold'\noption = 1", "local"),
        (fs.fedprox(mu=0.3), "name = 'fedprox'\nmu = 0.3", "average"),
    ],
    ids=["scaffold", "gradient-at-x", "fedprox"],
)
def test_a_deployment_is_the_simulation(algorithm, table, buffers, tmp_path):
    local = f"steps = {STEPS}\nlr = {LR}\nbuffers = '{buffers}'"
    config, one = settings(local=local, algorithm=table), learner()
    server = Server(config, one.schema, one.start, tmp_path, buffers=one.buffers)
    drive(server, InProcess(one, config, tmp_path), ROUNDS)

    clients = [data(site) for site in SITES]
    problem = fs.Problem(loss, {"w": START}, clients, state=STATE)
    ask = {"rounds": ROUNDS, "local_steps": STEPS, "lr": LR, "precision": "float64"}
    run = fs.simulate(algorithm, problem, buffers=buffers, **ask, metrics=())
    np.testing.assert_allclose(server.state.x, run.vector, rtol=0, atol=1e-12)
    if buffers == "average":
        held = [(server.state.buffers, run.state)]
    else:
        folders = [tmp_path / "sites" / server.run / site / "buffers" for site in SITES]
        assert server.state.buffers == {}
        held = [
            (latest(folder).arrays, row_of(run.clients.state, i))
            for i, folder in enumerate(folders)
        ]
    for deployed, simulated in held:
        np.testing.assert_allclose(deployed["state['mean']"], simulated["mean"], rtol=0, atol=1e-12)
        assert (
            deployed["state['seen']['steps']"] == simulated["seen"]["steps"] == 2 + ROUNDS * STEPS
        )
        assert deployed["state['seen']['begun']"] == simulated["seen"]["begun"] == 1


@pytest.mark.parametrize("state", ["server", "client"])
def test_a_request_that_comes_again_trains_the_state_once(state, tmp_path):
    """To the same reply; a try of the round that was abandoned counts as little."""
    local = f"steps = {STEPS}\nlr = {LR}\nbuffers = 'local'"
    config, one = settings(deploy=f"state = '{state}'", local=local), learner()
    server = Server(config, one.schema, one.start, tmp_path / "server", buffers=one.buffers)
    sites = InProcess(one, config, tmp_path)
    server.welcome(sites.greetings())

    def replies(request):
        return [answer(request, one, config, SITES[0], tmp_path / "sites") for _ in range(2)]

    for tries in (2, 1):
        for left in range(tries)[::-1]:
            requests = server.open(SITES)
            first, second = replies(requests[SITES[0]])
            assert first == second
            for site in SITES if not left else ():
                server.receive(site, answer(requests[site], one, config, site, tmp_path / "sites"))
            for site in server.waiting:
                server.failed(site, "lost")
            assert server.close().committed == (not left)
    folder = tmp_path / "sites" / server.run / SITES[0] / "buffers"
    assert latest(folder).arrays["state['seen']['steps']"] == 2 + 2 * STEPS


def row_of(state, i):
    return {
        "mean": state["mean"][i],
        "seen": {name: column[i] for name, column in state["seen"].items()},
    }


def test_sites_are_measured_with_the_state_and_not_in_training():
    one, site = learner(), SITES[0]
    measured = one.site(site).evaluate(one.start, one.buffers)
    a, b = data(site)
    predicted = START * (1 + START) - b + STATE["mean"]
    assert measured["loss"] == pytest.approx((a * predicted**2).sum(axis=1).mean(), rel=1e-12)
    assert measured["spread"] == pytest.approx(
        np.abs(b - STATE["mean"]).sum(axis=1).mean(), rel=1e-12
    )


def test_batches_update_the_state_one_after_the_other():
    one = learner()
    work = Work(one.start, None, fs.fedavg(), Local(epochs=1, batch_size=1, lr=LR), 3, one.buffers)
    trained = one.site(SITES[0]).train(work)
    assert trained.buffers["state['seen']['steps']"] == 2 + trained.steps
    assert trained.steps > 1


@pytest.mark.parametrize(
    ("said", "make"),
    [
        (r"loss takes a state: .*JaxLearner\(\.\.\., state=", lambda: learner(state=None)),
        (
            "a state needs a loss that takes it",
            lambda: JaxLearner(lambda p, b: 0.0, {"w": START}, data, state=STATE),
        ),
        ("must return a pair", lambda: train(lambda p, b, state: p["w"].sum())),
        ("a new state like the old one", lambda: train(lambda p, b, state: (p["w"].sum(), {}))),
        ("trains several models at once", lambda: train(loss, fs.ditto())),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(said, make):
    with pytest.raises(InputError, match=said):
        make()


def train(function, algorithm=None):
    one = JaxLearner(function, {"w": START}, data, state=STATE, precision="float64")
    algorithm = algorithm or fs.fedavg()
    own = algorithm.own(one.start)
    local = Local(steps=1, lr=LR)
    return one.site(SITES[0]).train(Work(one.start, None, algorithm, local, 0, one.buffers, own))
