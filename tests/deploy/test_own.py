"""What sites keep for themselves, deployed: as the reference has it, with lost replies, restarts and lost files."""

import shutil
from functools import partial

import numpy as np
import pytest
from deploy_case import SITES, START, data, settings

from fedscaffold.algorithms.reference import Federation, begin, descend, play
from fedscaffold.algorithms.round import fitted
from fedscaffold.checks import InputError
from fedscaffold.deploy import ArraysLearner, Server
from fedscaffold.deploy.client import Work, answer, greeting
from fedscaffold.deploy.client_state import load_record
from fedscaffold.deploy.schema import flatten
from fedscaffold.deploy.settings import Local

ROUNDS = 9
LOST = {1: "ant", 3: "cow", 4: "cow", 7: "elk"}
"""By round, the site whose reply does not arrive."""
METHODS = {
    "ditto": "name = 'ditto'\nlam = 0.4",
    "fedbn": "name = 'fedbn'\nlocal = ['norm']",
    "scafcom": "name = 'scafcom'\nbeta = 0.3",
}


def slope(site, y):
    a, b = data(site)
    return (a * (y - b)).mean(axis=0)


def gradient(params, batch):
    a, b = batch
    flat_gradient = (a * (np.concatenate([params["norm"], params["w"]]) - b)).mean(axis=0)
    return {"norm": flat_gradient[:1], "w": flat_gradient[1:]}


def loss(params, batch):
    a, b = batch
    return float(
        (a * (np.concatenate([params["norm"], params["w"]]) - b) ** 2).sum(axis=1).mean() / 2
    )


def learner():
    return ArraysLearner(
        gradient, {"norm": START[:1], "w": START[1:]}, data, loss=loss, precision="float64"
    )


def server_of(config, folder):
    one = learner()
    return Server(config, one.schema, one.start, folder)


def one_round(server, config, folder, lost=None):
    """A round in which every site is a new process, and one reply is lost."""
    for site, request in server.open(SITES).items():
        reply = answer(request, learner(), config, site, folder / "sites")
        if site == lost:
            server.failed(site, "the connection broke")
        else:
            server.receive(site, reply)
    return server.close()


def kept_by(server, folder, site):
    """What a site keeps for itself, as the last round left it that counted it."""
    begun = server.algorithm.own(START)
    files = folder / "sites" / server.run / site / "own"
    return load_record(files, server.roster[site].own, begun)


def by_reference(algorithm, config):
    lrs = [config.local.lr] * config.local.steps

    def steps(i, start, x, shift):
        return descend(algorithm, partial(slope, SITES[i]), start, x, shift, lrs=lrs)

    everyone = range(len(SITES))
    state = begin(algorithm, START, len(SITES))
    clients = Federation([1 / len(SITES)] * len(SITES), steps)
    for r in range(ROUNDS):
        state = play(
            algorithm, state, clients, everyone, [i for i in everyone if SITES[i] != LOST.get(r)]
        )
    return state


@pytest.mark.parametrize("keeper", ["server", "client"])
@pytest.mark.parametrize("name", METHODS)
def test_a_federation_is_the_reference_with_lost_replies_and_a_restart(name, keeper, tmp_path):
    config = settings(algorithm=METHODS[name], deploy=f"state = '{keeper}'")
    server = server_of(config, tmp_path)
    for site in SITES:
        server.hello(site, greeting(learner(), config, site))
    for r in range(ROUNDS):
        if r == 5:
            server = server_of(config, tmp_path)  # from its files
        outcome = one_round(server, config, tmp_path, LOST.get(r))
        assert outcome.committed, outcome
    algorithm = fitted(server.algorithm, learner().schema)
    right = by_reference(algorithm, config)
    for mine, other in zip(server.state.server, right.server, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
    for i, site in enumerate(SITES):
        own = kept_by(server, tmp_path, site)
        np.testing.assert_allclose(flatten(own), flatten(right.own[i]), rtol=0, atol=1e-12)
        if algorithm.has_personal:
            mine = algorithm.personal(server.state.x, own)
            other = algorithm.personal(right.server.x, right.own[i])
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)


def test_only_shared_layers_are_in_messages(tmp_path):
    config = settings(algorithm=METHODS["fedbn"])
    server = server_of(config, tmp_path)
    server.hello("ant", greeting(learner(), config, "ant"))
    (request,) = server.open(["ant"]).values()
    reply = answer(request, learner(), config, "ant", tmp_path / "sites")
    for packet, vectors in ((request, {"x"}), (reply, {"move"})):
        assert packet.blobs.keys() == vectors
        assert {blob.shape for blob in packet.blobs.values()} == {(1,)}
    server.receive("ant", reply)
    assert server.close().committed
    assert server.state.x[0] == START[0]


def test_sites_measure_the_model_that_they_use(tmp_path):
    config = settings(algorithm=METHODS["ditto"])
    server = server_of(config, tmp_path)
    server.hello("ant", greeting(learner(), config, "ant"))
    one_round(server, config, tmp_path)
    outcome = one_round(server, config, tmp_path)
    first = server_of(config, tmp_path / "again")
    first.hello("ant", greeting(learner(), config, "ant"))
    one_round(first, config, tmp_path / "again")
    v = kept_by(first, tmp_path / "again", "ant").v
    assert outcome.metrics["loss"] == pytest.approx(
        loss({"norm": v[:1], "w": v[1:]}, data("ant")), rel=1e-12
    )


def test_a_lost_file_is_said_and_begins_again(tmp_path):
    config = settings(algorithm=METHODS["ditto"])
    server = server_of(config, tmp_path)
    for site in SITES:
        server.hello(site, greeting(learner(), config, site))
    for _ in range(3):
        one_round(server, config, tmp_path)
    shutil.rmtree(tmp_path / "sites" / server.run / "bee" / "own")
    outcome = one_round(server, config, tmp_path)
    assert "bee" not in outcome.heard
    assert "what it keeps for itself" in outcome.refused["bee"]
    assert server.roster["bee"].own == ""
    assert not server.resync  # the others have nothing to do with it
    x, v = server.state.x.copy(), START
    assert "bee" in one_round(server, config, tmp_path).heard
    for _ in range(config.local.steps):
        v = v - config.local.lr * (slope("bee", v) + 0.4 * (v - x))
    np.testing.assert_allclose(kept_by(server, tmp_path, "bee").v, v, rtol=0, atol=1e-12)


def test_a_torch_site_trains_one_model_at_a_time():
    torch = pytest.importorskip("torch")
    from fedscaffold.algorithms import ditto
    from fedscaffold.deploy.torch_client import TorchLearner

    one = TorchLearner(
        lambda: torch.nn.Linear(2, 1),
        lambda module, batch: module(batch[0]).mean(),
        lambda site: (torch.ones(3, 2),),
    )
    work = Work(one.start, None, ditto(), Local(steps=1), 0, {}, ditto().own(one.start))
    with pytest.raises(InputError, match="ditto trains several models at once"):
        one.site("ant").train(work)
