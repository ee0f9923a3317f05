"""Clipped directions, dropped batches and accumulated batches mean what they do at the sites."""

import numpy as np
import pytest
from deploy_case import SITES, START, data, learner, settings

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.simulation import resolve
from fedscaffold.simulation.program import prepare

LOCAL = {"local_epochs": 2, "batch_size": 2, "lr": 0.1, "precision": "float64"}


def loss(w, batch):
    a, b = batch
    return (a * (w - b) ** 2).sum(axis=1).mean() / 2


PROBLEM = fs.Problem(loss, START, [data(site) for site in SITES])


def repeated(site):
    """Records that are all alike, so that runs with other draws are the same."""
    return tuple(np.repeat(column[:1], len(column), axis=0) for column in data(site))


def deployed(folder, local, rounds=3):
    """Return the model of a federation in one process, with NumPy learners."""
    config, one = settings(local=local), learner(data=repeated)
    server = Server(config, one.schema, one.start, folder)
    drive(server, InProcess(one, config, folder), rounds, sleep=lambda s: None)
    return server.state.x


def by_hand(most, rounds, lr, steps, corrected=True):
    """SCAFFOLD, or FedAvg, with clipped directions on full batches, every client in every round."""
    clients = [data(site) for site in SITES]
    x, c = START.copy(), np.zeros(2)
    controls = [np.zeros(2) for _ in clients]
    for _ in range(rounds):
        ends, means = [], []
        for (a, b), own in zip(clients, controls, strict=True):
            y, total = x.copy(), np.zeros(2)
            for _ in range(steps):
                d = (a * (y - b)).mean(axis=0) + (c - own if corrected else 0)
                total += d
                y = y - lr * d * min(1.0, most / np.linalg.norm(d))
            ends.append(y)
            means.append(total / steps - (c - own))
        x = np.mean(ends, axis=0)
        controls = means
        c = np.mean(controls, axis=0)
    return x


@pytest.mark.parametrize("most", [0.3, 1e6])
@pytest.mark.parametrize("algorithm", [fs.scaffold(), fs.fedavg()], ids=lambda a: a.name)
def test_clipping_scales_the_steps_and_not_what_is_remembered(algorithm, most):
    run = fs.simulate(
        algorithm,
        PROBLEM,
        rounds=4,
        local_steps=3,
        lr=0.1,
        clip_norm=most,
        precision="float64",
        metrics=(),
    )
    expected = by_hand(most, 4, 0.1, 3, corrected=algorithm.name == "scaffold")
    np.testing.assert_allclose(run.vector, expected, rtol=0, atol=1e-13)
    assert run.residual < 1e-14


def test_each_of_two_models_is_clipped_by_its_own_norm():
    same = {"rounds": 4, "local_steps": 3, "lr": 0.1, "clip_norm": 0.3, "precision": "float64"}
    same["metrics"] = ()
    runs = [fs.simulate(method, PROBLEM, **same) for method in (fs.ditto(), fs.fedavg())]
    np.testing.assert_allclose(runs[0].vector, runs[1].vector, rtol=0, atol=1e-14)


def test_clipping_is_that_of_optax():
    optax = pytest.importorskip("optax")
    chain = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1))
    same = {"rounds": 4, "local_steps": 3, "precision": "float64", "metrics": ()}
    ours = fs.simulate(fs.scaffold(), PROBLEM, lr=0.1, clip_norm=0.3, **same)
    theirs = fs.simulate(fs.scaffold(), PROBLEM, local_optimizer=chain, **same)
    np.testing.assert_allclose(ours.vector, theirs.vector, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("batch_size", "more", "sizes"),
    [
        (2, {"drop_last": True}, [2, 2]),
        (2, {"accumulate": 2}, [4, 1]),
        (1, {"accumulate": 2}, [2, 2, 1]),
        (2, {"accumulate": 2, "drop_last": True}, [4]),
        (1, {"accumulate": 3, "drop_last": True}, [3, 2]),
        (0.5, {"drop_last": True}, [3]),
        (64, {"accumulate": 2}, [5]),
    ],
)
def test_batches_of_an_epoch(batch_size, more, sizes):
    clients = [(np.ones((n, 2)), np.arange(n)[:, None] * np.ones(2)) for n in (5, 5)]
    problem = fs.Problem(loss, START, clients)
    config = fs.RunConfig(
        fs.scaffold(), problem, local_epochs=2, batch_size=batch_size, lr=0.1, **more
    )
    drawer = prepare(config).drawer
    draws = drawer.draw(0, 0, 1, 1)
    for slot in (0, 1):
        batches = list(draws.rows[0, slot, : drawer.steps[slot]])
        if draws.row_weights is not None:
            weights = draws.row_weights[0, slot, : drawer.steps[slot]]
            batches = [rows[w > 0] for rows, w in zip(batches, weights, strict=True)]
        assert [len(rows) for rows in batches] == sizes * 2
        for epoch in (batches[: len(sizes)], batches[len(sizes) :]):
            seen = np.concatenate(epoch)
            assert len(set(seen)) == len(seen)
            assert set(seen) <= set(range(5 * slot, 5 * slot + 5))


@pytest.mark.parametrize(
    ("local", "more"),
    [
        ("drop_last = true", {"drop_last": True}),
        ("clip_norm = 0.3", {"clip_norm": 0.3}),
        ("drop_last = true\nclip_norm = 0.3", {"drop_last": True, "clip_norm": 0.3}),
    ],
)
def test_the_simulator_is_the_deployment(local, more, tmp_path):
    same = "epochs = 2\nbatch_size = 2\nlr = 0.1\n"
    problem = fs.Problem(loss, START, [repeated(site) for site in SITES])
    run = fs.simulate(fs.scaffold(), problem, rounds=3, **LOCAL, **more, metrics=())
    there = deployed(tmp_path, same + local)
    np.testing.assert_allclose(run.vector, there, rtol=0, atol=1e-12)
    plain = fs.simulate(fs.scaffold(), problem, rounds=3, **LOCAL, metrics=())
    assert np.abs(plain.vector - run.vector).max() > 1e-3


def test_an_app_that_accumulates_is_the_same_in_the_simulator(tmp_path):
    torch = pytest.importorskip("torch")
    from fedscaffold.deploy.torch_client import TorchLearner

    class Point(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(START))

    def of_module(module, batch):
        a, b = batch
        return (a * (module.w - b) ** 2).sum(dim=1).mean() / 2

    def tensors(site):
        return tuple(torch.from_numpy(column) for column in repeated(site))

    config = settings(local="epochs = 2\nbatch_size = 2\nlr = 0.1\ndrop_last = true")
    one = TorchLearner(Point, of_module, tensors, accumulate=2, precision="float64")
    server = Server(config, one.schema, one.start, tmp_path, buffers=one.buffers)
    drive(server, InProcess(one, config, tmp_path), 3, sleep=lambda s: None)
    problem = fs.Problem(loss, START, [repeated(site) for site in SITES])
    more = {"drop_last": True, "accumulate": 2, "metrics": ()}
    run = fs.simulate(fs.scaffold(), problem, rounds=3, **LOCAL, **more)
    np.testing.assert_allclose(run.vector, server.state.x, rtol=0, atol=1e-12)


def coupled(w, batch):
    a, b = batch
    return (((w - b) * a).mean(axis=0) ** 2).sum()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch_size": None, "drop_last": True}, "drop_last needs batch_size"),
        ({"batch_size": None, "accumulate": 2}, "accumulate needs batch_size"),
        ({"batch_size": 3, "drop_last": True}, "client 0 has 2 records, fewer than a batch of 3"),
        ({"drop_last": 1}, "drop_last must be True or False, got 1"),
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1"),
        ({"clip_norm": 0}, "clip_norm must be a number above 0, got 0"),
    ],
)
def test_what_cannot_be_is_one_line(more, said):
    with pytest.raises(InputError, match=said) as refusal:
        prepare(fs.RunConfig(fs.scaffold(), PROBLEM, **(LOCAL | more)))
    assert "\n" not in str(refusal.value)


def test_batches_of_a_loss_that_couples_records_are_not_computed_as_one():
    problem = fs.Problem(coupled, START, [data(site) for site in SITES])
    with pytest.raises(InputError, match="this loss is no mean over records"):
        prepare(fs.RunConfig(fs.scaffold(), problem, **LOCAL, accumulate=2))


def test_an_algorithm_of_plain_steps_refuses_clipping():
    with pytest.raises(InputError, match="scafcom"):
        prepare(fs.RunConfig(fs.scafcom(beta=0.3), PROBLEM, **LOCAL, clip_norm=1.0))


def test_steps_of_an_epoch_follow_from_whole_batches():
    config = fs.RunConfig(fs.scaffold(), PROBLEM, **LOCAL, drop_last=True)
    counts = PROBLEM.counts
    assert resolve.local_work(config).steps.tolist() == (2 * (counts // 2)).tolist()
