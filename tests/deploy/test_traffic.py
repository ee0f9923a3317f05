"""The bytes that the simulator counts are those of the vectors in a deployment's messages, and both train the same."""

import itertools
from pathlib import Path

import numpy as np
import optax
import pytest
from cases import sharp
from deploy_case import CENTRE, CURVATURE, RECORDS, SITES, START, gradient, loss, settings

import fedscaffold as fs
from fedscaffold.deploy import ArraysLearner, Server, drive
from fedscaffold.deploy.server_loop import InProcess

ROUNDS, LR = 4, 0.1


def data(site):
    """The records of a site are all the same, so that it does not matter in which order they are drawn."""
    return tuple(np.tile(one[site], (RECORDS[site], 1)) for one in (CURVATURE, CENTRE))


class Weighed(InProcess):
    """A transport that weighs the vectors of the messages it carries."""

    def __init__(self, *given):
        super().__init__(*given)
        self.up, self.down, self.rounds, self.cohorts = {}, {}, {}, {}

    def send(self, requests):
        for site, request in requests.items():
            if request.facts["kind"] == "train":
                number = request.facts["round"]
                self._add(self.down, number, request)
                self.cohorts.setdefault(number, []).append(SITES.index(site))
        super().send(requests)

    def collect(self):
        came = super().collect()
        for _, reply in came:
            if reply.facts["kind"] == "train":
                self._add(self.up, reply.facts["round"], reply)
        return came

    def _add(self, column, number, packet):
        column[number] = column.get(number, 0) + sum(len(one.data) for one in packet.blobs.values())


@pytest.fixture(scope="module")
def problem():
    """The sites in the simulator: one problem, so that runs that differ by who keeps the state share a program."""

    def loss(w, batch):
        return (batch[0] * (w - batch[1]) ** 2).sum(axis=1).mean() / 2

    return fs.Problem(loss, START, list(map(data, SITES)))


EQUAL, UNEQUAL = "steps = 3", "epochs = 1\nbatch_size = 1"
ALGORITHMS = {
    "fedavg": fs.fedavg(),
    "fedprox": fs.fedprox(),
    "fednova": fs.fednova(),
    "sgd": fs.sgd(),
    "feddyn": fs.feddyn(),
    "scaffold": fs.scaffold(),
    "scaffold\noption = 1": fs.scaffold(option=1),
}
OPTIMIZERS = {"sgd": None, "momentum": optax.sgd(LR, momentum=0.9), "adam": optax.adam(LR)}
TABLE = [
    # who keeps the state: both with equal steps, the server with unequal ones; all in `make soak`
    *sharp(
        itertools.product(
            ALGORITHMS, (EQUAL, UNEQUAL), ("sgd",), ("equal",), ("client", "server"), ("float64",)
        ),
        lambda case: case[1] == EQUAL or case[4] == "server",
    ),
    *itertools.product(
        ("scaffold", "fedavg"),
        (UNEQUAL,),
        ("sgd",),
        ("records",),
        ("server",),
        ("float32", "float64"),
    ),
    *itertools.product(
        ("scaffold", "feddyn"),
        (EQUAL, UNEQUAL),
        ("momentum", "adam"),
        ("equal",),
        ("server",),
        ("float64",),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "local", "optimizer", "weights", "keeper", "precision"), TABLE)
def test_bytes_and_models_are_those_of_the_deployment(
    name, local, optimizer, weights, keeper, precision, problem, tmp_path
):
    word, _, option = name.partition("\n")
    config = settings(
        local=f"{local}\nlr = {LR}\noptimizer = '{optimizer}'",
        algorithm=f"name = '{word}'\n{option}",
        top=f"weights = '{weights}'",
        deploy=f"state = '{keeper}'",
        extra="[cohort]\nsize = 3",
    )._replace(precision=precision)
    learner = ArraysLearner(gradient, {"w": START}, data, loss=loss, precision=precision)
    transport = Weighed(learner, config, Path(tmp_path))
    server = Server(config, learner.schema, learner.start, tmp_path)
    drive(server, transport, ROUNDS)
    run = fs.simulate(
        ALGORITHMS[name],
        problem,
        rounds=ROUNDS,
        cohorts=[sorted(transport.cohorts[r]) for r in range(1, ROUNDS + 1)],
        local_steps=3 if local == EQUAL else None,
        local_epochs=None if local == EQUAL else 1,
        batch_size=None if local == EQUAL else 1,
        lr=LR if optimizer == "sgd" else None,
        local_optimizer=OPTIMIZERS[optimizer],
        weights=weights,
        precision=precision,
        metrics=(),
    )
    assert run.history["bytes_up"].tolist() == [transport.up[r] for r in range(1, ROUNDS + 1)]
    own = (
        keeper == "server" and word == "feddyn"
    )  # its clients are sent the c_i that they do not keep
    down = (run.history["bytes_down"] * (2 if own else 1)).tolist()
    assert down == [transport.down[r] for r in range(1, ROUNDS + 1)]
    close = 1e-13 if precision == "float64" else 1e-5
    np.testing.assert_allclose(run.x, server.state.x, rtol=0, atol=close * np.abs(START).max())
    for field, _ in server.algorithm.means:
        mine, simulated = getattr(server.state.server, field), getattr(run.server, field)
        np.testing.assert_allclose(mine, simulated, rtol=0, atol=close * max(run.scale, 1) / LR)
    assert run.fault is None
    assert server.fault is None


@pytest.mark.slow
def test_compressed_directions_of_unequal_steps_are_one_message():
    """As those of equal steps: d_i is what is compressed, and the server multiplies it by K_i lr."""
    problem = fs.problems.quadratic(num_clients=6, dim=20, mu=0.1, seed=0)
    given = {
        "rounds": 300,
        "lr": 0.05,
        "cohort": 3,
        "compression": "top_k:0.5",
        "precision": "float64",
    }
    unequal = fs.simulate(fs.scaffold(), problem, local_steps=[1, 2, 3, 4, 5, 6], **given)
    equal = fs.simulate(fs.scaffold(), problem, local_steps=3, **given)
    assert unequal.history["bytes_up"].tolist() == equal.history["bytes_up"].tolist()
    assert unequal.history["distance"][-1] < 1e-3 * unequal.history["distance"][0]
    assert unequal.fault is None
