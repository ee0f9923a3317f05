"""Torch modules in the simulator: torch's own gradients, on every architecture of a table; what is refused, and how."""

import copy
import runpy
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.problems import torch_export
from fedscaffold.problems.torch_export import TracedFunction

pytestmark = pytest.mark.slow

SIZES = (7, 4)  # records of the clients


def classes(n, seed):
    return torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(seed))


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Conv2d(3, 4, 3, stride=2, bias=False),
        )
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2, ceil_mode=True)
        x = F.avg_pool2d(F.relu(self.second(x)), 2, 1, padding=1)
        return self.out(F.adaptive_avg_pool2d(x, (2, 1)).flatten(1))


class Pools(nn.Module):
    """The less usual convolutions and poolings."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.deep = nn.Conv2d(4, 4, 3, dilation=2, padding=2, groups=4)
        self.line, self.cube = nn.Conv1d(4, 3, 2), nn.Conv3d(1, 2, 2)

    def forward(self, x):
        x = self.deep(self.up(x))
        x = F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 2, 1, dilation=2)
        y = F.max_pool1d(self.line(x.flatten(2)), 3)
        z = F.adaptive_max_pool2d(F.interpolate(x, scale_factor=2, mode="bilinear"), 2)
        w = F.avg_pool3d(self.cube(F.interpolate(x, size=(5, 4))[:, None]), 2)
        return torch.stack([y.mean((1, 2)), z.mean((1, 2, 3)), w.mean((1, 2, 3, 4))], 1)


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.stem, self.first, self.second = (
            nn.Conv2d(1, 4, 3),
            nn.Conv2d(4, 4, 3, 2, 1),
            nn.Conv2d(4, 4, 3, 1, 1),
        )
        self.short, self.one, self.two = nn.Conv2d(4, 4, 1, 2), norm(), norm()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        y = self.two(self.second(F.relu(self.one(self.first(x)), inplace=True)))
        y += self.short(x)
        return self.out(F.relu(y).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.words = nn.Embedding(5, 4, padding_idx=0)
        self.recurrent = kind(4, 3, batch_first=True, **options)
        self.out = nn.Linear(3, 5)

    def forward(self, x):
        return self.out(self.recurrent(self.words(x))[0])


class Several(nn.Module):
    """A GRU in both directions and a plain recurrent network without biases, from a state of their own."""

    def __init__(self):
        super().__init__()
        self.words, self.start = nn.Embedding(5, 4), nn.Parameter(torch.full((1, 1, 6), 0.3))
        self.gru, self.plain = (
            nn.GRU(4, 3, bidirectional=True, batch_first=True),
            nn.RNN(6, 6, bias=False),
        )
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        path, _ = self.gru(self.words(x))
        states, _ = self.plain(path.transpose(0, 1), self.start.expand(1, len(x), 6).contiguous())
        return self.out(states.transpose(0, 1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(0.1 * torch.ones(4, 6))
        self.layer = nn.TransformerEncoderLayer(
            6, 2, 8, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(4), persistent=False
        )
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.layer(x + self.place, self.mask, is_causal=True)[:, -1])


class Tied(nn.Module):
    """A tied output layer, a frozen layer, a buffer that is saved."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.words.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x):
        return self.out(torch.tanh(self.frozen(self.words(x))) * self.scale)


def next_word(module, batch):
    return F.cross_entropy(module(batch).flatten(0, 1), batch.roll(-1, 1).flatten())


def losses(module, batch):
    scores, labels = module(batch[0]), batch[1]
    weights = torch.tensor([1, 2, 3]).to(scores.dtype)
    chosen = F.one_hot(labels, 3).to(scores.dtype)
    return (
        F.cross_entropy(scores, labels, label_smoothing=0.1, weight=weights)
        + F.mse_loss(scores[:, 0], labels.to(scores.dtype))
        + F.binary_cross_entropy_with_logits(scores, chosen, pos_weight=weights)
        + F.nll_loss(F.log_softmax(scores, 1), labels)
        + F.kl_div(F.log_softmax(scores, 1), chosen, reduction="batchmean")
        + F.cosine_embedding_loss(scores, chosen, 2.0 * (labels > 0) - 1)
        + F.margin_ranking_loss(scores[:, 0], scores[:, 1], 2.0 * (labels > 1) - 1, margin=0.3)
    )


def stopped(module, batch):
    """Gradients that are cut off, and a ragged mask."""
    scores = module(batch[0])
    with torch.no_grad():
        goal = module(batch[0] + 1).softmax(1)
    kept = torch.where(batch[1] > 0, scores.square().sum(1), scores.detach().sum(1).sin())
    return (
        F.smooth_l1_loss(scores, goal)
        + kept.clamp(-1, 2).mean()
        + F.huber_loss(scores, goal * 3, delta=0.5)
    )


def dense(*layers):
    return lambda: nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))


def rows(n):
    return normal(n, 4), classes(n, n)


def pictures(n):
    return normal(n, 1, 9, 8), classes(n, n)


def words(n):
    return torch.randint(0, 5, (n, 3), generator=torch.Generator().manual_seed(n))


ACTIVATIONS = (
    nn.Tanh(),
    nn.ELU(),
    nn.Softplus(),
    nn.Hardtanh(),
    nn.LeakyReLU(),
    nn.Mish(),
    nn.SiLU(),
    nn.Hardswish(),
)
TABLE = {
    "mlp": (dense(nn.ReLU()), cross_entropy, rows),
    "losses, activations": (dense(nn.LayerNorm(6), nn.GELU(), *ACTIVATIONS), losses, rows),
    "stopped": (dense(nn.ReLU()), stopped, rows),
    "lenet": (LeNet, cross_entropy, pictures),
    "pools": (Pools, cross_entropy, lambda n: (normal(n, 2, 4, 3), classes(n, n))),
    "group norm": (lambda: Residual(lambda: nn.GroupNorm(2, 4)), cross_entropy, pictures),
    "batch norm": (
        lambda: Residual(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
        cross_entropy,
        pictures,
    ),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), next_word, words),
    "gru, rnn": (Several, next_word, words),
    "transformer": (Transformer, cross_entropy, lambda n: (normal(n, 4, 6), classes(n, n))),
    "tied, frozen": (Tied, next_word, words),
}


def made(name, seed=0):
    build, loss, records = TABLE[name]
    torch.manual_seed(seed)
    return build(), loss, [records(n) for n in SIZES]


def torch_gradient(module, loss, batch, dtype):
    module = copy.deepcopy(module).to(dtype).train()
    cast = jax.tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    value = loss(module, cast)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    slopes = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    held = zip(trained.items(), slopes, strict=True)
    return value.item(), {
        n: (torch.zeros_like(p) if g is None else g).numpy() for (n, p), g in held
    }


def jax_gradient(loss, params, batch, dtype):
    def arrays(leaf):
        array = np.asarray(leaf)
        return jnp.asarray(array, dtype) if array.dtype.kind == "f" else jnp.asarray(array)

    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
        slope = jax.jit(jax.value_and_grad(loss))
        value, found = slope(params, jax.tree.map(arrays, batch))
        slopes = getattr(found, "arrays", found)  # of a problem's model, or of a dict
        return float(value), {name: np.asarray(array) for name, array in slopes.items()}


def recorded(module, loss, clients):
    """A loss as `fs.problems.torch` records it, and the trained parameters: without an export for another precision."""
    held = [jax.tree.map(np.asarray, client) for client in clients]
    traced = TracedFunction(module, loss, held)
    trained = {n: p.detach().numpy() for n, p in module.named_parameters() if p.requires_grad}
    return lambda params, batch: traced(params, batch, train=True), trained


SINGLE = ("mlp",)  # in single precision too; `make soak`: all
KINDS = {"lenet": "mean", "lstm": "mean", "batch norm": "coupled"}


def agrees_with_torch(ours, module, loss, batch, dtype, bound):
    value, slopes = torch_gradient(module, loss, batch, getattr(torch, dtype))
    found, mine = jax_gradient(*ours, batch, dtype)
    assert abs(found - value) <= bound * max(1, abs(value))
    size = max(1, max(np.abs(one).max() for one in slopes.values()))
    for parameter, slope in slopes.items():
        assert np.abs(mine[parameter] - slope).max() <= bound * size, parameter


@pytest.mark.parametrize("name", TABLE)
def test_gradients_are_those_of_torch(name):
    module, loss, clients = made(name)
    if name not in {*SINGLE, *KINDS}:  # their problems: the next test
        ours = recorded(module, loss, clients)
        agrees_with_torch(ours, module, loss, clients[0], "float64", 1e-12)
        return
    problem = fs.problems.torch(module, loss, clients)
    ours = problem.functions.loss, problem.params
    agrees_with_torch(ours, module, loss, clients[0], "float64", 1e-12)
    if name in SINGLE:
        agrees_with_torch(ours, module, loss, clients[1], "float32", 1e-6)
    if name in KINDS:  # whether the loss is a mean over records
        assert problem.kinds.loss == problem.kinds.gradient == KINDS[name]


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(TABLE.keys() - set(SINGLE)))
def test_gradients_in_single_precision_are_those_of_torch(name):
    module, loss, clients = made(name)
    problem = fs.problems.torch(module, loss, clients)
    ours = problem.functions.loss, problem.params
    agrees_with_torch(ours, module, loss, clients[1], "float32", 1e-6)


def scores(module, batch):
    right = module(batch[0]).argmax(1) == batch[1]
    return {
        "accuracy": float(right.float().mean()),
        "confidence": module(batch[0]).softmax(1).amax(1).mean().item(),
    }


@cache
def simple():
    """A linear layer, with metrics on nine records that are kept apart."""
    torch.manual_seed(0)
    clients = [rows(n) for n in SIZES]
    return fs.problems.torch(nn.Linear(4, 3), cross_entropy, clients, test=rows(9), metrics=scores)


def of(module, batch):
    """A module's loss on a batch by torch, in evaluation mode and double precision."""
    with torch.no_grad():
        return cross_entropy(module.double().eval(), (batch[0].double(), batch[1])).item()


def normalised(*more):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), *more, nn.Linear(6, 3))


@pytest.mark.parametrize(
    "norm",
    [pytest.param(False, marks=pytest.mark.soak), True],
    ids=["plain", "running statistics"],
)
def test_simulator_and_deployment_end_at_one_model(norm, tmp_path):
    from fedscaffold.deploy import InProcess, Server, drive, parse
    from fedscaffold.deploy.torch_client import TorchLearner

    records = {f"site-{n}": rows(n) for n in SIZES}

    def tensors(site):
        x, y = records[site]
        return x.double(), y

    text = f"rounds = 4\nprecision = 'float64'\n[local]\nsteps = 3\nlr = 0.3\n[deploy]\nsites = {list(records)}"
    settings = parse(text)
    module = normalised if norm else dense(nn.Tanh())
    learner = TorchLearner(module, cross_entropy, tensors, precision="float64")
    server = Server(settings, learner.schema, learner.start, tmp_path, buffers=learner.buffers)
    drive(server, InProcess(learner, settings, tmp_path), rounds=4)
    problem = fs.problems.torch(module, cross_entropy, list(records.values()))
    run = fs.simulate(fs.scaffold(), problem, rounds=4, local_steps=3, lr=0.3, precision="float64")
    assert np.abs(run.vector - learner.start).max() > 1e-2
    np.testing.assert_allclose(run.vector, server.state.x, rtol=0, atol=1e-10)
    assert sorted(run.state or ()) == sorted(server.state.buffers)
    for name, buffer in server.state.buffers.items():
        np.testing.assert_allclose(run.state[name], buffer, rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.soak), "float64"])
def test_running_statistics_are_the_state_of_a_run(precision):
    def metrics(module, batch):
        scores = module(batch[0])
        return {
            "accuracy": (scores.argmax(1) == batch[1]).float().mean(),
            "size": scores.abs().mean().item(),
        }

    torch.manual_seed(0)
    clients, module = [rows(n) for n in SIZES], normalised(nn.Dropout(0.2))
    problem = fs.problems.torch(module, cross_entropy, clients, metrics=metrics)
    asked = ["loss", "accuracy", *problem.metrics]
    run = fs.simulate(
        fs.scaffold(), problem, rounds=3, local_steps=2, lr=0.1, precision=precision, metrics=asked
    )
    fresh = normalised(nn.Dropout(0.2)).to(getattr(torch, precision))
    fresh.load_state_dict(run.x | run.state)  # strictly
    assert fresh[1].num_batches_tracked == 6
    assert not torch.equal(fresh[1].running_mean, module[1].running_mean)
    with torch.no_grad():
        x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
        together = metrics(fresh.eval(), (x.to(fresh[0].weight.dtype), y))
        each = [
            metrics(fresh, (x.to(fresh[0].weight.dtype), y))["accuracy"].item() for x, y in clients
        ]
    tolerance = 1e-5 if precision == "float32" else 1e-10
    assert (
        abs(run.history["loss"][-1] - np.mean([of(fresh, batch) for batch in clients])) < tolerance
    )
    assert abs(run.history["accuracy"][-1] - np.mean(each)) < 1e-6
    assert abs(run.history["size"][-1] - together["size"]) < 1e-5


def test_the_model_of_a_run_is_a_state_dict():
    module, loss, clients = made("tied, frozen")
    problem = fs.problems.torch(module, loss, clients)
    run = fs.simulate(fs.scaffold(), problem, rounds=2, local_steps=2, lr=0.1, precision="float64")
    fresh = Tied().double()
    assert list(run.x) == list(fresh.state_dict())
    fresh.load_state_dict(run.x)
    assert fresh.out.weight is fresh.words.weight
    assert torch.equal(fresh.frozen.weight, module.frozen.weight.double())
    with torch.no_grad():
        expected = np.mean([loss(fresh, batch).item() for batch in clients])
    assert abs(run.history["loss"][-1] - expected) < 1e-12
    assert not torch.equal(fresh.words.weight, module.words.weight.double())
    again = fs.simulate(
        fs.scaffold(), problem, rounds=1, local_steps=1, lr=0.1, x0=run.x, precision="float64"
    )
    assert problem.layout.digest == fs.problems.Layout.of(again.x).digest


def test_dropout_draws_by_key_and_is_measured_without():
    module = nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 3))
    clients = [rows(n) for n in SIZES]
    problem = fs.problems.torch(module, lambda m, b: m(torch.ones_like(b[0]))[:, 0].mean(), clients)
    weight = np.zeros((3, 4), np.float32)
    weight[0] = 0.25
    params = jax.tree.unflatten(
        jax.tree.structure(problem.params), [weight, np.zeros(3, np.float32)]
    )
    loss = jax.jit(problem.functions.loss)
    batch = tuple(np.asarray(a) for a in clients[0])
    draws = np.array([loss(params, batch, key=jax.random.key(i)) for i in range(200)])
    assert float(loss(params, batch)) == 1  # measured: all entries are kept
    share = 0.75 * draws * 28  # of 28 entries, each kept with probability 0.75
    np.testing.assert_allclose(share, share.round(), atol=1e-4)
    assert abs(draws.mean() - 1) < 5 * np.sqrt(0.25 / 0.75 / 28 / 200)
    assert len(np.unique(draws)) > 5


def test_metrics_are_those_of_torch():
    problem = simple()
    asked = ["loss", "accuracy", *problem.metrics]
    run = fs.simulate(fs.scaffold(), problem, rounds=3, local_steps=2, lr=0.5, metrics=asked)
    module = nn.Linear(4, 3)
    module.load_state_dict(run.x)
    with torch.no_grad():
        expected = scores(module.eval(), rows(9))
    assert abs(run.history["accuracy"][-1] - expected["accuracy"]) < 1e-6
    assert abs(run.history["confidence"][-1] - expected["confidence"]) < 1e-6
    assert abs(run.history["loss"][-1] - np.mean([of(module, rows(n)) for n in SIZES])) < 1e-6


def test_data_sets_and_dicts():
    class Pictures(torch.utils.data.Dataset):
        def __init__(self, n):
            self.x, self.y = rows(n)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"y": self.y[i], "x": self.x[i]}  # not in the order of their names

    def loss(module, batch):
        return cross_entropy(module, (batch["x"], batch["y"]))

    torch.manual_seed(0)
    problem = fs.problems.torch(nn.Linear(4, 3), loss, [Pictures(n) for n in SIZES])
    plain = simple()
    for n in SIZES:
        x, y = map(np.asarray, rows(n))
        ours = jax.jit(problem.functions.loss)(problem.params, {"x": x, "y": y})
        assert ours == jax.jit(plain.functions.loss)(plain.params, (x, y))


def test_a_loss_of_pairs_has_a_graph_for_each_size():
    def pairs(module, batch):
        first, second = module(batch[0]).view(-1, 2, 3).unbind(1)
        return (first - second).square().mean() + first.std()

    module, clients = nn.Linear(4, 3), [rows(n) for n in (4, 6)]
    problem = fs.problems.torch(module, pairs, clients)
    for batch in clients:
        value, slopes = torch_gradient(module, pairs, batch, torch.float64)
        found, ours = jax_gradient(problem.functions.loss, problem.params, batch, "float64")
        assert abs(found - value) < 1e-12
        np.testing.assert_allclose(ours["weight"], slopes["weight"], rtol=0, atol=1e-12)


def test_changed_buffers_are_values_of_the_graph():
    """BatchNorm's running statistics after a batch."""
    module, batch = (
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double(),
        (rows(7)[0].double(), rows(7)[1]),
    )
    traced = TracedFunction(module, cross_entropy, [tuple(np.asarray(a) for a in batch)])
    with jax.enable_x64(True):
        arrays = {name: p.detach().numpy() for name, p in module.named_parameters()}
        evaluate = jax.jit(partial(traced.evaluate, train=True))
        value, changed = evaluate(arrays, tuple(np.asarray(a) for a in batch))
    moved = copy.deepcopy(module).train()
    assert abs(float(value) - cross_entropy(moved, batch).item()) < 1e-12
    for name, buffer in moved.named_buffers():
        np.testing.assert_allclose(np.asarray(changed[name]), buffer.numpy(), rtol=0, atol=1e-12)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -slope


class Bessel(nn.Linear):
    def forward(self, x):
        return torch.special.i0(super().forward(x))  # the line that is named


REFUSED = {
    "narrow labels": (
        nn.Linear(4, 3),
        lambda m, b: cross_entropy(m, (b[0], b[1].int())),
        "fails in torch: .*Long",
    ),
    "operator": (
        Bessel(4, 3),
        cross_entropy,
        rf"aten\.\w*i0\S* .*{Path(__file__).name}:\d+.*write this part in JAX",
    ),
    "custom gradient": (
        nn.Linear(4, 3),
        lambda m, b: cross_entropy(m, (Reverse.apply(b[0] + m.bias.sum()), b[1])),
        "not torch's",
    ),
    "branch on data": (
        nn.Linear(4, 3),
        lambda m, b: m(b[0]).sum() if b[0].sum() > 0 else m(b[0]).mean(),
        "torch.export",
    ),
    "skipped batch": (nn.Linear(4, 3), lambda m, b: None, "every batch"),
    "another module": (nn.Linear(4, 3), lambda m, b: b[0].square().mean(), "no trained parameter"),
    "a vector": (nn.Linear(4, 3), lambda m, b: m(b[0]).mean(1), "must be one number"),
    "noise in evaluation": (
        nn.Linear(4, 3),
        lambda m, b: m(b[0] + torch.randn_like(b[0])).mean(),
        "module.training",
    ),
    "frozen": (
        nn.Linear(4, 3).requires_grad_(False),
        cross_entropy,
        "no parameter that is trained",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    module, loss, said = REFUSED[case]
    with pytest.raises(InputError, match=said) as error:
        fs.problems.torch(module, loss, [rows(n) for n in SIZES])
    assert "\n" not in str(error.value)


def test_the_app_that_deploy_new_writes_runs_in_the_simulator(tmp_path, monkeypatch):
    from fedscaffold.deploy.templates import write_example

    monkeypatch.delenv("FEDSCAFFOLD_DATA", raising=False)
    write_example(tmp_path / "app", "torch")
    app = runpy.run_path(str(tmp_path / "app" / "app.py"))
    run = fs.simulate(
        fs.scaffold(),
        app["problem"](),
        rounds=2,
        local_steps=5,
        batch_size=32,
        lr=0.05,
        metrics=["accuracy"],
    )
    network = app["model"]()
    network.load_state_dict(run.x)
    with torch.no_grad():
        expected = app["metrics"](network, app["tensors"](app["SITES"][0], test=True))["accuracy"]
    assert abs(run.history["accuracy"][-1] - expected) < 1e-6


def test_loaders_are_refused():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows(4)))
    with pytest.raises(InputError, match="got a DataLoader"):
        fs.problems.torch(nn.Linear(4, 3), cross_entropy, [loader])


def operand_shapes(jaxpr):
    """Shapes of the factors of all products, in whatever the program calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield from (atom.aval.shape for atom in equation.invars)
        for value in equation.params.values():
            for one in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from operand_shapes(inner)


def test_a_matrix_is_not_copied_for_each_place_of_a_sequence():
    """Attention has its sequences first and its records second; torch multiplies them in a batch."""
    width, places = 8, 5

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0].mean((1, 2))

    records = [(normal(n, places, width), normal(n, 1)[:, 0]) for n in SIZES]
    problem = fs.problems.torch(
        Attention(), lambda module, batch: F.mse_loss(module(batch[0]), batch[1]), records
    )
    batch = jax.tree.map(np.asarray, records[0])
    jaxpr = jax.make_jaxpr(jax.grad(problem.functions.loss))(problem.params, batch).jaxpr
    shapes = set(operand_shapes(jaxpr))
    assert {(3 * width, width), (width, 3 * width)} & shapes
    assert not {(places, width, 3 * width), (places, 3 * width, width)} & shapes


class Counted(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_is_recorded_without_its_time_steps(layer, monkeypatch):
    """A record of all steps takes torch a second for every ten of them."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(2, 3, num_layers=2, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.layer(x)[0][:, -1].sum(1)

    def counted(function):
        def run(*given, **more):
            with count:
                return function(*given, **more)

        return run

    monkeypatch.setattr(torch.export, "export", counted(torch.export.export))
    monkeypatch.setattr(torch_export, "_decomposed", counted(torch_export._decomposed))
    numbers = []
    for steps in (2, 5):
        count = Counted()
        clients = [(normal(n, steps, 2), normal(n, 1)[:, 0]) for n in SIZES]
        fs.problems.torch(
            Last(), lambda module, batch: F.mse_loss(module(batch[0]), batch[1]), clients
        )
        numbers.append(count.number)
    assert numbers[0] == numbers[1] > 0


def test_an_interrupted_recording_of_a_recurrent_network_can_be_repeated(monkeypatch):
    """As by Ctrl-C in a notebook."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(2, 3, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0][:, -1].sum(1)

    def build():
        clients = [(normal(n, 4, 2), normal(n, 1)[:, 0]) for n in SIZES]
        return fs.problems.torch(
            Last(), lambda module, batch: F.mse_loss(module(batch[0]), batch[1]), clients
        )

    register = torch.library.register_fake

    def interrupt(operator, *given, **more):
        if str(operator).startswith(torch_export.NAMESPACE):
            raise KeyboardInterrupt
        return register(operator, *given, **more)

    torch_export._recorded_whole.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch.library, "register_fake", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build()
    assert build().dim > 0
    torch_export._recorded_whole.cache_clear()  # and another copy of the package may record it
    assert build().dim > 0
