"""The torch client against an oracle of its own: whatever a loss does to `.grad`, the steps are SCAFFOLD's, or refused."""

import copy
from itertools import product

import numpy as np
import pytest
from cases import sharp

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.algorithms.scaffold import message
from fedscaffold.checks import InputError
from fedscaffold.deploy.client import Work
from fedscaffold.deploy.settings import Local

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fedscaffold.deploy.torch_client import TorchLearner  # noqa: E402

STEPS, LR, DECAY = 4, 0.05, 0.1


class Net(torch.nn.Module):
    """Several tensors: an embedding, a tied pair, a frozen layer, a BatchNorm, a parameter that is never used."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3, sparse=sparse)
        self.first = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.second = torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.out = torch.nn.Linear(3, 1)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, batch):
        rows, x, _ = batch
        h = torch.tanh(self.first(x + self.table(rows)))
        return self.out(self.second(self.norm(self.frozen(h)))).squeeze(1)


def data(site):
    g = torch.Generator().manual_seed(3)
    rows, x = (
        torch.randint(0, 5, (8,), generator=g),
        torch.randn(8, 3, generator=g, dtype=torch.float64),
    )
    return rows, x, x[:, 0] ** 2 - rows


def loss(module, batch):
    return ((module(batch) - batch[2]) ** 2).mean()


# What an independent mind makes of it: autograd on a dictionary of tensors, optimisers in plain NumPy


def start():
    torch.manual_seed(0)
    return Net().double()


def oracle(optimizer, shift):
    """Where the steps end, and the mean direction, one flat vector each."""
    module = start()
    values = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    fixed |= {name: b.clone() for name, b in module.named_buffers()}

    def gradient(y):
        leaves, at = {}, 0
        for name, value in values.items():
            leaves[name] = (
                torch.from_numpy(y[at : at + value.numel()].copy())
                .reshape(value.shape)
                .requires_grad_()
            )
            at += value.numel()
        out = torch.func.functional_call(module, leaves | fixed, (data("a"),))
        grads = torch.autograd.grad(
            ((out - data("a")[2]) ** 2).mean(), list(leaves.values()), allow_unused=True
        )
        flat = [
            torch.zeros_like(v) if g is None else g
            for g, v in zip(grads, leaves.values(), strict=True)
        ]
        return np.concatenate([g.detach().numpy().ravel() for g in flat])

    y = np.concatenate([v.numpy().ravel() for v in values.values()])
    m, v, total = np.zeros_like(y), np.zeros_like(y), np.zeros_like(y)
    for k in range(1, STEPS + 1):
        d = gradient(y) + shift
        total += d
        if "adam" in optimizer:
            m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d * d
            y = y * (1 - LR * DECAY) if optimizer == "adamw" else y
            y = y - LR * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
        else:
            m = (0.0 if optimizer == "sgd" else 0.9) * m + d
            y = y - LR * m
    return y, total / STEPS


def shift_of(one):
    return np.random.default_rng(1).normal(size=one.schema.size)


def own(kind):
    if kind == "adamw":
        return lambda module: torch.optim.AdamW(module.parameters(), LR, weight_decay=DECAY)
    return lambda module: torch.optim.SGD(
        module.parameters(), LR, momentum=0.9 if kind == "momentum" else 0.0
    )


def trained(one, optimizer="sgd", algorithm=None, **more):
    shift = None if algorithm is not None else shift_of(one)
    work = Work(
        one.start,
        shift,
        algorithm or scaffold(),
        Local(steps=STEPS, lr=LR, optimizer=optimizer),
        seed=5,
        buffers={name: one.buffers[name] for name, _, _ in one.schema.buffers},
        **more,
    )
    return one.site("a").train(work)


def learner(loss, **more):
    return TorchLearner(Net, loss, data, precision="float64", **more)


# Losses that are rough with gradients and memory, and are right all the same


def zeroes(module, batch):
    module.zero_grad()
    return loss(module, batch)


def zeroes_in_place(module, batch):
    module.zero_grad(set_to_none=False)
    value = loss(module, batch)
    module.zero_grad(set_to_none=False)
    return value


def replaces(module, batch):
    for p in module.parameters():
        p.grad = torch.full_like(p, 7.0) if p.requires_grad else None
    return loss(module, batch)


def goes_backward_itself(module, batch):
    value = loss(module, batch)
    value.backward(retain_graph=True)
    return value


def penalises_gradients(module, batch):
    value = loss(module, batch)
    slopes = torch.autograd.grad(value, module.out.weight, create_graph=True)[0]
    return value + 0.0 * slopes.square().sum()


def moves_memory(module, batch):
    for p in module.parameters():
        p.data = p.data.clone()
    return loss(module, batch)


def checkpoints(module, batch):
    x = batch[1].clone().requires_grad_()
    return checkpoint(lambda x: loss(module, (batch[0], x, batch[2])), x, use_reentrant=True)


ROUGH = [
    loss,
    zeroes,
    zeroes_in_place,
    replaces,
    goes_backward_itself,
    penalises_gradients,
    moves_memory,
    checkpoints,
]


OPTIMIZERS = ["sgd", "momentum", "adam", "own sgd", "own momentum", "own adamw"]


def in_turn(case):
    """The plain loss with each optimiser, every other one with two of them."""
    k, j = ROUGH.index(case[0]), OPTIMIZERS.index(case[1])
    return k == 0 or j % 3 == k % 3


@pytest.mark.parametrize(
    ("rough", "optimizer"),
    sharp(product(ROUGH, OPTIMIZERS), in_turn),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_whatever_the_loss_does_the_steps_are_the_oracles(rough, optimizer):
    kind = optimizer.removeprefix("own ")
    one = learner(rough, optimizer=own(kind))
    done = trained(one, "own" if "own" in optimizer else kind)
    y, d = oracle(kind, shift_of(one))
    assert np.abs(y - one.start).max() > LR / 10  # it does move
    assert done.steps == STEPS
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "own"])
def test_sparse_gradients_are_gradients(optimizer):
    one = TorchLearner(
        lambda: Net(sparse=True), loss, data, precision="float64", optimizer=own("sgd")
    )
    y, d = oracle("sgd", shift_of(one))
    done = trained(one, optimizer)
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "own sgd", "own adamw"])
@pytest.mark.parametrize("rough", [loss, zeroes, replaces, moves_memory], ids=lambda f: f.__name__)
def test_loss_scaling_changes_nothing(rough, optimizer):
    kind = optimizer.removeprefix("own ")
    scaler = lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)  # noqa: E731
    done = trained(one := learner(rough, optimizer=own(kind), scaler=scaler), optimizer.split()[0])
    y, d = oracle(kind, shift_of(one))
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


def test_an_optimiser_may_move_the_memory_and_work_on_gradients_in_place():
    class Rough(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data.clone()
                    if p.grad is not None:
                        p.grad.zero_()

    done = trained(one := learner(loss, optimizer=lambda m: Rough(m.parameters(), LR)), "own")
    y, d = oracle("sgd", shift_of(one))
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


def test_without_a_shift_the_direction_is_the_gradient():
    one = learner(zeroes, optimizer=own("sgd"))
    y, d = oracle("sgd", 0.0)
    for optimizer in ("sgd", "own"):
        done = trained(one, optimizer, algorithm=fedavg()._replace(message=message))
        np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


def test_a_buffer_bound_to_another_tensor_is_still_seen():
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, batch):
            self.seen = self.seen + 1
            return super().forward(batch)

    one = TorchLearner(Counting, loss, data, precision="float64")
    for _ in range(2):
        assert trained(one).buffers["seen"] == STEPS


def test_a_loss_that_diverges_is_not_mistaken_for_one_that_meddles():
    one = learner(lambda module, batch: loss(module, batch) * float("nan"))
    assert np.isnan(trained(one).walk.y).any()


# Losses and optimisers that cannot be right


def detached(module, batch):
    return loss(module, batch).detach()


def unwatched(module, batch):
    with torch.no_grad():
        return loss(module, batch)


def of_a_copy(module, batch):
    return loss(copy.deepcopy(module), batch)


def item(module, batch):
    return loss(module, batch).item()


def renorms(module, batch):
    with torch.no_grad():
        module.out.weight.clamp_(-0.01, 0.01)
    return loss(module, batch)


def rebinds(module, batch):
    module.out.weight.data = 0.5 * module.out.weight.data
    return loss(module, batch)


def remakes(module, batch):
    module.out.weight = torch.nn.Parameter(module.out.weight.detach().clone())
    return loss(module, batch)


def unties(module, batch):
    module.second.weight = torch.nn.Parameter(module.first.weight.detach().clone())
    return loss(module, batch)


def freezes(module, batch):
    module.out.requires_grad_(False)
    return loss(module, batch)


def thaws(module, batch):
    module.frozen.requires_grad_(True)
    return loss(module, batch)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (detached, "no gradient in any trained parameter"),
        (unwatched, "no gradient in any trained parameter"),
        (of_a_copy, "no gradient in any trained parameter"),
        (item, "must return a tensor, or None to skip a batch, got float"),
        (lambda m, b: (m(b) - b[2]) ** 2, r"must be one number.*\(8,\)"),
        (renorms, "changed the parameter 'out.weight'"),
        (rebinds, "changed the parameter 'out.weight'"),
        (remakes, "replaced the parameter 'out.weight'"),
        (unties, "replaced the parameter 'second.weight'"),
        (freezes, "froze or unfroze the parameter 'out"),
        (thaws, "froze or unfroze the parameter 'frozen"),
    ],
)
def test_a_loss_that_cannot_be_right_is_refused(bad, said):
    with pytest.raises(InputError, match=said) as refusal:
        trained(learner(bad))
    assert "\n" not in str(refusal.value)


class Private(torch.optim.SGD):
    """As optimisers for differential privacy do: the gradient is made anew from something else."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else torch.randn_like(p)
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda m: Private(m.parameters(), LR), "replaced the gradient of"),
        (
            lambda m: torch.optim.SGD(m.out.parameters(), LR),
            "leaves out 'unused'|leaves out 'table.weight'",
        ),
        (
            lambda m: torch.optim.SGD([*m.parameters(), torch.nn.Parameter(torch.ones(1))], LR),
            "none of the module's",
        ),
        (lambda m: object(), "must return a torch.optim.Optimizer, got object"),
    ],
)
def test_an_optimiser_that_cannot_be_right_is_refused(optimizer, said):
    with pytest.raises(InputError, match=said):
        trained(learner(loss, optimizer=optimizer), "own")
