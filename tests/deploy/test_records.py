"""A method with records of its own is deployed without a line of the deployment; states of before are still read."""

import shutil
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from deploy_case import CENTRE, CURVATURE, SITES, START, data, gradient, run_quietly, settings

from fedscaffold import algorithms
from fedscaffold.algorithms import dane, fedavg, scaffold
from fedscaffold.algorithms.base import Algorithm, LocalWork
from fedscaffold.algorithms.reference import Federation, begin, descend, play
from fedscaffold.checks import InputError
from fedscaffold.deploy.aggregation import residual
from fedscaffold.deploy.arrays_client import draw_batches
from fedscaffold.deploy.client import Work
from fedscaffold.deploy.server_state import peek_state
from fedscaffold.deploy.settings import Local
from fedscaffold.state import commit, latest

BETA, ROUNDS = 0.6, 12


class Three(NamedTuple):
    x: object
    c: object
    m: object


class Two(NamedTuple):
    h: object
    c_i: object


class Sent(NamedTuple):
    d: object
    move: object


def with_momentum() -> Algorithm:
    """SCAFFOLD along beta (g - c_i + c) + (1 - beta) m, m the last mean direction; clients also keep a shadow of c_i."""

    def shift(server, memory):
        return BETA * (server.c - memory.c_i) + (1 - BETA) * server.m

    def update(server, sent, mean, heard):
        c = server.c + heard * ((mean.d - (1 - BETA) * sent.m) / BETA - sent.c)
        return Three(server.x - mean.move, c, 1.0 * mean.d)

    return Algorithm(
        "with-momentum",
        lambda gradient, y, x, shift: BETA * gradient(y) + shift,
        lambda walk, shift: Sent(walk.d, walk.move),
        update,
        lambda x: Three(x, 0 * x, 0 * x),
        lambda x: Two(0 * x, 0 * x),
        shift,
        lambda memory, shift, message: Two(memory.c_i, (message.d - shift) / BETA),
        means=(("c", "c_i"),),
        references=(("d", lambda server: BETA * server.c + (1 - BETA) * server.m),),
    )


@pytest.fixture
def known(monkeypatch):
    def add(algorithm):
        monkeypatch.setitem(algorithms.ALGORITHMS, algorithm.name, lambda: algorithm)
        return f"name = '{algorithm.name}'"

    return add


def reference(algorithm, config):
    """The same rounds, all sites heard, by the plain driver."""

    def slope(site, y):
        return gradient({"w": y}, data(site))["w"]

    lrs = [config.local.lr] * config.local.steps

    def steps(i, start, x, shift):
        return descend(algorithm, partial(slope, SITES[i]), start, x, shift, lrs=lrs)

    everyone = Federation([1 / len(SITES)] * len(SITES), steps, lambda i, x: slope(SITES[i], x))
    state = begin(algorithm, START, len(SITES))
    for _ in range(ROUNDS):
        state = play(algorithm, state, everyone, range(len(SITES)))
    return state


@pytest.mark.process
@pytest.mark.parametrize("keeper", ["server", "client"])
def test_any_record_is_deployed(keeper, known, tmp_path):
    algorithm = with_momentum()
    config = settings(algorithm=known(algorithm), deploy=f"state = '{keeper}'")
    half, _ = run_quietly(config, tmp_path, ROUNDS // 2)
    server, _ = run_quietly(config, tmp_path, ROUNDS)  # from what the first has written
    assert server.run == half.run
    right = reference(algorithm, config)
    for mine, other in zip(server.state.server, right.server, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
    if keeper == "server":
        for i, site in enumerate(SITES):
            np.testing.assert_allclose(
                server.state.memory[site], right.memory[i], rtol=0, atol=1e-12
            )
        assert server.residual < 1e-13
    names = latest(tmp_path / "state").arrays.keys()
    rows = {f"{field}.{site}" for field in Two._fields for site in SITES}
    assert names == {*Three._fields, *(rows if keeper == "server" else ())}


@pytest.mark.parametrize("clip", ["", "clip = 0.5"])
@pytest.mark.parametrize("weights", ["equal", "records"])
def test_its_means_hold_in_single_precision_whoever_comes_and_goes(clip, weights, known, tmp_path):
    config = settings(algorithm=known(with_momentum()), deploy=clip, top=f"weights = '{weights}'")
    config = config._replace(precision="float32")
    run_quietly(config, tmp_path, 5)
    fewer = config._replace(deploy=config.deploy._replace(sites=SITES[:3]))
    run_quietly(fewer, tmp_path, 8)
    server, _ = run_quietly(config, tmp_path, 11)
    assert set(server.roster) == set(SITES)
    assert server.fault is None
    assert server.state.server.c.dtype == server.state.server.m.dtype == np.float64
    assert np.linalg.norm(server.state.server.c) > 1e-3


@pytest.mark.slow
def test_lost_records_are_made_anew(known, tmp_path):
    """Two fields lie in a client's file; with it gone all report theirs, and c is their mean again."""
    config = settings(
        algorithm=known(with_momentum()), deploy="state = 'client'", local="steps = 3\nlr = 0.3"
    )
    server, _ = run_quietly(config, tmp_path, 4)
    shutil.rmtree(tmp_path / "sites" / server.run / "ant")
    server, _ = run_quietly(config, tmp_path, 60)
    best = sum(CURVATURE[s] * CENTRE[s] for s in SITES) / sum(CURVATURE[s] for s in SITES)
    np.testing.assert_allclose(
        server.state.x, best, atol=1e-9
    )  # a mismatch would stay, at some 1e-2


def test_a_state_of_before_is_read(tmp_path):
    """It did not say which fields are means."""
    config = settings()
    quiet, _ = run_quietly(config, tmp_path / "quiet", 6, token="t")
    server, _ = run_quietly(config, tmp_path / "old", 3, token="t")
    found = latest(tmp_path / "old" / "state")
    assert found.arrays.keys() == {"x", "c", *(f"c_i.{site}" for site in SITES)}
    facts = {key: value for key, value in found.facts.items() if key != "means"}
    commit(tmp_path / "old" / "state", found.arrays, facts, after=found.generation, private=True)
    assert peek_state(tmp_path / "old" / "state").means == (("c", "c_i"),)
    server, _ = run_quietly(config, tmp_path / "old", 6, token="t")
    assert [one.tobytes() for one in server.state.server] == [
        one.tobytes() for one in quiet.state.server
    ]


def test_who_only_looks_needs_no_algorithm(known, tmp_path):
    server, _ = run_quietly(settings(algorithm=known(with_momentum())), tmp_path, 3)
    kept = peek_state(tmp_path / "state")
    assert kept.means == (("c", "c_i"),)
    assert kept.state.server._asdict().keys() == set(Three._fields)
    assert residual(server.algorithm, kept.state) == server.residual


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prepare": lambda server, gradient: server}, "it needs a second exchange"),
        ({"finds": ("c",)}, "its clients must receive every model"),
        ({"needs": (("everyone", "it hears all"),)}, "it needs every client in every round"),
        (
            {"needs": (("equal steps", "it divides by them"),)},
            "it needs equal numbers of local steps",
        ),
        ({"needs": (("a full moon", "of tides"),)}, "it needs 'a full moon'"),
        (
            {"work": lambda work: work._replace(geometric=True)},
            "it draws the number of local steps",
        ),
        ({"memory": lambda x: Two(x, 0 * x)}, "does not begin at zero"),
        (
            {
                "update": lambda server, sent, mean, heard: server._replace(
                    x=server.x / server.x.sum()
                )
            },
            "it sums over coordinates",
        ),
    ],
)
def test_what_cannot_be_deployed_is_refused_by_name(change, said, known):
    with pytest.raises(InputError, match=f"with-momentum cannot be deployed: .*{said}") as error:
        settings(algorithm=known(with_momentum()._replace(**change)))
    assert "\n" not in str(error.value)


def test_the_local_work_is_the_algorithms(known, tmp_path):
    """Twice the steps that were asked for; the gate lets so many in."""
    double = fedavg()._replace(
        name="double", work=lambda work: LocalWork(2 * work.steps, work.batch_size)
    )
    assert len(list(draw_batches(double, Local(epochs=1, batch_size=2), 6, seed=0))) == 6
    config = settings(algorithm=known(double))
    mine, _ = run_quietly(config, tmp_path / "double", 3)
    plain, _ = run_quietly(
        settings(algorithm="name = 'fedavg'", local="steps = 6\nlr = 0.2"), tmp_path / "six", 3
    )
    assert mine.state.x.tobytes() == plain.state.x.tobytes()


def test_nothing_is_collected_that_is_not_read():
    for algorithm, collects, at_x in (
        (fedavg(), False, False),
        (scaffold(), True, False),
        (scaffold(1), False, True),
    ):
        work = Work(START, None, algorithm, Local(steps=1, optimizer="adam"), 0, {})
        assert (work.collect, work.at_x) == (collects, at_x)


def test_a_torch_model_has_its_gradient_at_y_alone():
    torch = pytest.importorskip("torch")
    from fedscaffold.deploy.torch_client import TorchLearner

    one = TorchLearner(
        lambda: torch.nn.Linear(2, 1),
        lambda module, batch: module(batch[0]).mean(),
        lambda site: (torch.ones(3, 2),),
    )
    elsewhere = fedavg()._replace(direction=dane().direction)
    shift = np.zeros_like(one.start)
    with pytest.raises(InputError, match="at y alone"):
        one.site("ant").train(Work(one.start, shift, elsewhere, Local(steps=1), 0, {}))
