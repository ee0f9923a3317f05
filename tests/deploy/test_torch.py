"""The torch client: equal to plain NumPy, whatever the module, the optimiser, the loader; only steps performed count."""

import numpy as np
import pytest
from deploy_case import SITES, START, data, gradient, learner, settings

from fedscaffold.algorithms import make, scaffold, travelled
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.client import Work, answer, greeting
from fedscaffold.deploy.settings import Local

torch = pytest.importorskip("torch")
from fedscaffold.deploy.jax_client import JaxLearner  # noqa: E402
from fedscaffold.deploy.torch_client import TorchLearner  # noqa: E402


class Point(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(START))


def loss(module, batch):
    a, b = batch
    return (a * (module.w - b) ** 2).sum(dim=1).mean() / 2


def tensors(site):
    return tuple(torch.from_numpy(a) for a in data(site))


def torch_learner(**more):
    return TorchLearner(Point, loss, tensors, precision="float64", **more)


def run(config, one, folder, rounds=6):
    server = Server(config, one.schema, one.start, folder, buffers=one.buffers)
    summary = drive(server, InProcess(one, config, folder), rounds)
    return server, summary


def jax_loss(params, batch):
    a, b = batch
    return (a * (params["w"] - b) ** 2).sum(axis=1).mean() / 2


SCAFFOLD, *OTHERS = (
    "name = 'scaffold'",
    "name = 'scaffold'\noption = 1",
    "name = 'fedprox'",
    "name = 'sgd'",
)
PLAIN, *LOCALS = (
    "steps = 3\nlr = 0.2",
    "epochs = 2\nbatch_size = 2\nlr = 0.1",
    "steps = 4\nbatch_size = 3\nlr = 0.05\noptimizer = 'momentum'",
    "steps = 4\nlr = 0.05\noptimizer = 'adam'",
)


# SCAFFOLD with every loop, and every algorithm with one: formulas do not know of the loop around them, and
# tests/algorithms/test_worlds.py has them on torch under every condition. `make soak` has all pairs.
@pytest.mark.parametrize(
    ("algorithm", "local"),
    [
        *((SCAFFOLD, local) for local in (PLAIN, *LOCALS)),
        *((algorithm, PLAIN) for algorithm in OTHERS),
        *(
            pytest.param(algorithm, local, marks=pytest.mark.soak)
            for algorithm in OTHERS
            for local in LOCALS
        ),
    ],
)
def test_torch_is_numpy(algorithm, local, folder):
    config = settings("[cohort]\nsize = 0.6", local=local, algorithm=algorithm)
    mine, _ = run(config, torch_learner(), folder / "torch")
    plain, _ = run(config, learner(), folder / "numpy")
    np.testing.assert_allclose(mine.state.x, plain.state.x, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_jax_is_numpy(folder):
    config = settings(local="epochs = 2\nbatch_size = 2\nlr = 0.1")
    one = JaxLearner(jax_loss, {"w": START}, data, precision="float64")
    mine, summary = run(config, one, folder / "jax", rounds=3)
    plain, other = run(config, learner(), folder / "numpy", rounds=3)
    np.testing.assert_allclose(mine.state.x, plain.state.x, rtol=0, atol=1e-12)
    assert abs(summary.metrics["loss"] - other.metrics["loss"]) < 1e-12


def collected(**local):
    """Plain SGD by way of momentum: the directions are added up."""
    return Local(optimizer="momentum", momentum=0.0, **local)


def work(one, local, shift=None):
    shift = np.array([0.3, -0.2]) if shift is None else shift
    return Work(one.start, shift, scaffold(), local, seed=5, buffers=one.buffers)


@pytest.mark.parametrize("nesterov", [False, True])
def test_any_optimiser_of_ones_own(nesterov):
    local = Local(steps=4, lr=0.1, optimizer="own")
    one = torch_learner(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=nesterov)
    )
    done = one.site("bee").train(work(one, local))
    # by hand: the mean of g + shift over the very points that were visited
    y, v, total = START.copy(), 0.0, 0.0
    for _ in range(4):
        d = gradient({"w": y}, data("bee"))["w"] + np.array([0.3, -0.2])
        v = 0.9 * v + d
        total, y = total + d, y - 0.1 * ((d + 0.9 * v) if nesterov else v)
    np.testing.assert_allclose(done.walk.y, y, atol=1e-13)
    np.testing.assert_allclose(done.walk.d, total / 4, atol=1e-13)


def test_plain_sgd_needs_no_accumulation():
    one = torch_learner()
    assert not work(one, Local(steps=5, lr=0.1)).collect
    plain = one.site("cow").train(work(one, Local(steps=5, lr=0.1)))
    added = one.site("cow").train(work(one, collected(steps=5, lr=0.1)))
    assert plain.walk.y.tobytes() == added.walk.y.tobytes()
    np.testing.assert_allclose(plain.walk.d, added.walk.d, atol=1e-13)


def test_only_steps_performed_count():
    skipped = []

    def sometimes(module, batch):
        skipped.append(len(skipped) % 3 == 1)
        return None if skipped[-1] else loss(module, batch)

    one = TorchLearner(Point, sometimes, tensors, precision="float64")
    done = one.site("cow").train(work(one, collected(steps=6, lr=0.1)))
    assert done.steps == 4
    np.testing.assert_allclose(travelled(one.start, done.walk.y, 4, 0.1), done.walk.d, atol=1e-13)


def test_a_step_that_the_scaler_skips_does_not_count():
    calls = []

    def overflowing(module, batch):
        calls.append(1)
        return loss(module, batch) * (float("inf") if len(calls) == 2 else 1.0)

    one = TorchLearner(
        Point,
        overflowing,
        tensors,
        precision="float64",
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    done = one.site("cow").train(work(one, collected(steps=4, lr=0.1)))
    assert done.steps == 3
    assert np.isfinite(done.walk.d).all()
    np.testing.assert_allclose(travelled(one.start, done.walk.y, 3, 0.1), done.walk.d, atol=1e-13)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(3, 4)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.norm(self.frozen(x)))


def net_data(site):
    g = torch.Generator().manual_seed(SITES.index(site))
    x = torch.randn(12, 3, generator=g) + SITES.index(site)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 4, shuffle=True
    )


def net_loss(module, batch):
    return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])


def net():
    return TorchLearner(Net, net_loss, net_data)


@pytest.mark.parametrize("policy", ["average", "local"])
def test_buffers_travel_apart_under_their_policy(policy, folder):
    config = settings(
        top="precision = 'float32'".replace("precision", "weights").replace("float32", "equal"),
        local=f"epochs = 1\nlr = 0.1\nbuffers = '{policy}'",
    )
    config = config._replace(precision="float32")
    one = net()
    assert one.schema.names == ("norm.weight", "norm.bias", "out.weight", "out.bias")
    assert [name for name, _, _ in one.schema.buffers] == [
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    server, _ = run(config, one, folder, rounds=2)
    if policy == "local":
        assert server.state.buffers == {}
        assert all((folder / "sites" / server.run / site / "buffers").is_dir() for site in SITES)
    else:
        assert server.state.buffers["norm.num_batches_tracked"] == 6  # two epochs of three batches
        assert np.abs(server.state.buffers["norm.running_mean"]).max() > 0
    rounded = max(np.abs(memory.c_i).max() for memory in server.state.memory.values()) * 1e-6
    assert server.residual < rounded


def test_average_of_buffers_is_the_weighted_mean(folder):
    config = settings(local="epochs = 1\nlr = 0.1")._replace(precision="float32")
    one = net()
    server = Server(config, one.schema, one.start, folder, buffers=one.buffers)
    for site in SITES[:2]:
        server.hello(site, greeting(one, config, site))
    replies = {site: answer(r, one, config, site, folder) for site, r in server.open(SITES).items()}
    for site, reply in replies.items():
        assert server.receive(site, reply).counted
    server.close()
    sent = [
        np.frombuffer(r.blobs["buffer.norm.running_mean"].data, np.float32)
        for r in replies.values()
    ]
    np.testing.assert_allclose(
        server.state.buffers["norm.running_mean"], np.mean(sent, axis=0), rtol=1e-6
    )


def test_a_round_done_again_is_the_same_round(folder):
    config = settings(local="epochs = 1\nlr = 0.1")._replace(precision="float32")
    one = net()
    server = Server(config, one.schema, one.start, folder, buffers=one.buffers)
    server.hello("ant", greeting(one, config, "ant"))
    request = server.open(SITES)["ant"]
    first, second = (answer(request, net(), config, "ant", folder) for _ in range(2))
    assert first == second
    torch.rand(3)  # the app's own use of randomness changes nothing
    assert answer(request, net(), config, "ant", folder) == first


def test_mistakes_are_said_in_a_line():
    one = torch_learner()
    with pytest.raises(InputError, match="optimizer=module"):
        one.site("ant").train(work(one, Local(steps=1, optimizer="own")))
    with pytest.raises(InputError, match="leave one out"):
        net().site("ant").train(
            work(net(), Local(steps=1, batch_size=3), shift=np.zeros(net().schema.size))
        )
    with pytest.raises(InputError, match="no records"):
        TorchLearner(Point, loss, lambda site: (torch.zeros(0, 2), torch.zeros(0, 2))).site("ant")


def test_a_batch_that_is_a_share_of_a_data_set_takes_the_steps_that_the_server_expects(folder):
    """30 % of 4 records are 2, rounded up as everywhere: with 1 there would be too many steps."""
    one = torch_learner()
    one.data = lambda site: torch.utils.data.TensorDataset(
        *(torch.from_numpy(part) for part in data(site))
    )
    config = settings(local="epochs = 1\nbatch_size = 0.3\nlr = 0.1")
    _, summary = run(config, one, folder, rounds=2)
    assert summary.missed == {}


def test_the_torch_path_uses_the_written_formula():
    assert make(**settings().algorithm).direction is scaffold().direction


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_the_cpu(folder):
    config = settings()
    mine, _ = run(config, torch_learner(device="cuda"), folder / "cuda")
    plain, _ = run(config, learner(), folder / "numpy")
    np.testing.assert_allclose(mine.state.x, plain.state.x, rtol=0, atol=1e-10)
