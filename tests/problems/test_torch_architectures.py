"""Torch modules as people write them, beyond the table of `test_torch_module`.

Value, gradient and changed buffers are torch's in double precision, in training mode.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import sharp
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.problems.torch_export import TracedFunction

pytestmark = pytest.mark.slow
N = 6  # records


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=3):
    return torch.randn(N, *shape, generator=seeded(seed))


def labels(*shape, classes=3):
    return torch.randint(0, classes, (N, *shape), generator=seeded(5))


def cross_entropy(module, batch):
    *inputs, wanted = batch
    return F.cross_entropy(module(*inputs), wanted)


class Inverted(nn.Module):
    """The block of a MobileNet, with squeeze and excitation."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.short = stride == 1 and inputs == outputs
        self.widen = nn.Sequential(
            nn.Conv2d(inputs, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)
        )
        self.deep = nn.Sequential(
            nn.Conv2d(6, 6, 3, stride, 1, groups=6, bias=False), nn.BatchNorm2d(6), nn.Hardswish()
        )
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 2, 1), nn.PReLU(), nn.Conv2d(2, 6, 1)
        )
        self.narrow = nn.Sequential(nn.Conv2d(6, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.deep(self.widen(x))
        y = self.narrow(y * F.hardsigmoid(self.excite(y), inplace=True))
        return x + y if self.short else y


def mobile():
    blocks = Inverted(3, 3, 1), Inverted(3, 4, 2)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding="same")
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        across = F.relu(self.norm(self.down(x)))
        below = F.relu(self.bottom(F.max_pool2d(across, 2)))
        return self.out(torch.cat([self.up(below), across], dim=1))


def dice(module, batch):
    scores, wanted = module(batch[0]), batch[1]
    share, goal = scores.softmax(1)[:, 1], wanted.to(scores.dtype)
    common = (share * goal).sum((1, 2))
    overlap = (2 * common + 1) / (share.sum((1, 2)) + goal.sum((1, 2)) + 1)
    return (1 - overlap).mean() + F.cross_entropy(scores, wanted)


class Temporal(nn.Module):
    """Dilated causal convolutions with weight normalisation, then a projecting LSTM both ways."""

    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(4, 5, 3, padding=2))
        self.second = parametrizations.spectral_norm(nn.Conv1d(5, 5, 3, padding=4, dilation=2))
        self.norm = nn.BatchNorm1d(5)
        self.recurrent = nn.LSTM(5, 6, proj_size=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.first(x.transpose(1, 2))[..., :-2])
        x = F.leaky_relu(self.norm(self.second(x)[..., :-4]), 0.2)
        path, (_, cell) = self.recurrent(x.transpose(1, 2))
        return self.out(path[:, -1]) + cell.sum((0, 2))[:, None]


class Cells(nn.Module):
    """Recurrent cells in a loop over time, and a bidirectional GRU's last states."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.long, self.gated = nn.LSTMCell(4, 5), nn.GRUCell(5, 5)
        self.both = nn.GRU(4, 3, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(11, 3)

    def forward(self, x):
        x = self.words(x)
        h = c = x.new_zeros(len(x), 5)
        k = torch.zeros(x.size(0), 5, dtype=x.dtype)
        for t in range(x.shape[1]):
            h, c = self.long(x[:, t], (h, c))
            k = self.gated(h, k)
        _, last = self.both(x)
        return self.out(torch.cat([k, last[-2], last[-1]], 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, absent):
        y, weights = self.attention(x, x, x, key_padding_mask=absent)
        return self.out(y.masked_fill(absent[..., None], 0.0).sum(1)) + weights.mean()


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        y = self.words(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=y.dtype)
        return self.out(self.body(y, y, tgt_mask=mask, tgt_is_causal=True)).transpose(1, 2)


class Bags(nn.Module):
    """Bags of words and a bilinear layer; the heads in a dict."""

    def __init__(self):
        super().__init__()
        kinds = {kind: nn.EmbeddingBag(9, 4, mode=kind) for kind in ("mean", "sum", "max")}
        kinds["mean"].padding_idx = 2
        self.bags = nn.ModuleDict(kinds)
        self.head, self.scales = nn.Bilinear(4, 4, 1), nn.ParameterList([torch.ones(1)])
        self.register_buffer("offset", torch.full((1,), 0.3))

    def forward(self, x):
        mean, total, most = (bag(x) for bag in self.bags.values())
        return (self.head(mean, total) * self.scales[0] + most.sum(1, True) - self.offset)[:, 0]


def cox(module, batch):
    words, times, seen = batch
    order = torch.argsort(times, descending=True)
    risk, seen = module(words)[order], seen[order].to(times.dtype)
    return -((risk - torch.logcumsumexp(risk, 0)) * seen).sum() / seen.sum().clamp(min=1)


class Vision(nn.Module):
    """A vision transformer's patches and attention, written by hand."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.first, self.places = (
            nn.Parameter(torch.zeros(1, 1, 8)),
            nn.Parameter(torch.ones(1, 5, 8)),
        )
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        rows, length, width = x.shape
        q, k, v = self.mixed(self.norm(x)).reshape(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        return self.out((x + y)[:, 0])


def volumes():
    layers = nn.Conv3d(1, 2, 3, (1, 2, 2), 1), nn.BatchNorm3d(2), nn.AvgPool3d((2, 1, 1))
    return nn.Sequential(*layers, nn.Flatten(), nn.SELU(), nn.AlphaDropout(0.0), nn.Linear(36, 3))


def enlarging():
    return nn.Sequential(
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=0.5, mode="bicubic"),
        nn.LocalResponseNorm(2),
    )


def warped(module, batch):
    return F.grid_sample(module(batch[0]), batch[1].tanh(), align_corners=False).square().mean()


def losses(module, batch):
    scores, goals, wanted = module(batch[0]), batch[1], batch[2]
    signs = 2 * (goals > 0).to(scores.dtype) - 1
    law = torch.distributions.Normal(scores, F.softplus(goals))
    return (
        F.gaussian_nll_loss(scores, goals, scores.exp())
        + F.poisson_nll_loss(scores, goals)
        + F.soft_margin_loss(scores, signs)
        + F.multi_margin_loss(scores, wanted)
        + F.hinge_embedding_loss(scores, signs)
        + F.multilabel_soft_margin_loss(scores, (goals > 0).to(scores.dtype))
        + F.cross_entropy(scores, goals.softmax(1), label_smoothing=0.1)
        + F.triplet_margin_loss(scores, goals, goals.roll(1, 0))
        + F.pairwise_distance(scores, goals).mean()
        - law.log_prob(goals).mean()
        - torch.distributions.Categorical(logits=scores).log_prob(wanted).mean()
    )


def operators(module, batch):
    s, wanted = module(batch[0]), batch[1]
    pairs, (largest, places), (ordered, _) = (
        torch.einsum("bi,bj->bij", s, s),
        s.topk(2, 1),
        torch.sort(s, 1),
    )
    chosen = torch.zeros_like(s).scatter_(1, wanted[:, None], 1.0)
    changed = s.clone()
    changed[:, 0] *= 2
    changed[:, 1] = 0
    changed += 1
    parts = (
        pairs.diagonal(dim1=1, dim2=2).sum(1) + torch.tril(pairs).mean((1, 2)),
        largest.sum(1) + ordered[:, 0] * places[:, 0] + s.median(1).values,
        torch.where(chosen > 0, s, s**2).cumsum(1)[:, -1],
        torch.logsumexp(s, 1) + s.std(1) + s.var(1, unbiased=False) + torch.norm(s, dim=1),
        changed.prod(1) + torch.lerp(s, changed, 0.3).sum(1) + torch.addcmul(s, s, changed).sum(1),
        s.unfold(1, 2, 1).sum((1, 2)) + torch.repeat_interleave(s, 2, 1).amin(1),
        s.abs().clamp(0.1, 0.9).log().sum(1) + torch.logaddexp(s[:, 0], s[:, 1]),
        torch.hypot(s[:, 0], s[:, 1]) + torch.linalg.cross(s, changed).sum(1),
        torch.stack(torch.chunk(torch.cat([s, s], 1), 2, 1)).sum((0, 2)),
        F.cosine_similarity(s, changed) + F.normalize(s, dim=1)[:, 0],
    )
    return torch.stack(parts).mean()


def contrastive(module, batch):
    """The loss of supervised contrastive learning, with diagonals written in place."""
    z = F.normalize(module(batch[0]), dim=1)
    likeness = z @ z.T
    likeness.diagonal(1).mul_(2)
    same = (batch[1][:, None] == batch[1]).to(z.dtype).fill_diagonal_(0)
    scores = likeness.clone().fill_diagonal_(-9) - likeness.logsumexp(1, keepdim=True)
    return -((scores * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def gaussian(module, batch):
    """Linear algebra: laws with a covariance, and what is solved, inverted and factorised."""
    s = module(batch[0])
    root = torch.stack([s, s.roll(1, 1).cos(), s.sin()], 1)
    spread = root @ root.mT + torch.eye(3, dtype=s.dtype)
    law = torch.distributions.MultivariateNormal(s, spread)
    factor = torch.linalg.cholesky(spread)
    solved = torch.linalg.solve(spread, s), torch.linalg.solve(spread, spread.sin(), left=False)
    parts = (
        -law.log_prob(batch[1]),
        torch.logdet(spread) + torch.linalg.det(root) + torch.linalg.slogdet(root).logabsdet,
        torch.linalg.inv(spread).sum((1, 2)) + torch.cholesky_inverse(factor).sum((1, 2)),
        solved[0].sum(1) + solved[1].sum((1, 2)),
        torch.cholesky_solve(batch[1][:, :, None], factor).sum((1, 2)),
        torch.linalg.solve_triangular(factor.mT, spread, upper=True, left=False).sum((1, 2)),
        torch.linalg.eigvalsh(spread).log().sum(1) + torch.linalg.svdvals(root).sum(1),
        torch.linalg.matrix_norm(root, "nuc") + torch.linalg.matrix_norm(root),
    )
    return torch.stack(parts).mean()


ABSENT = torch.arange(7)[None] >= torch.tensor([7, 5, 6, 3, 2, 7])[:, None]
PICTURES = (normal(3, 8, 8), labels())
EVERY_DAY = {
    "mobile": (mobile, cross_entropy, PICTURES),
    "bags, cox": (Bags, cox, (labels(5, classes=9), normal(seed=8), labels(classes=2))),
    "temporal": (Temporal, cross_entropy, (normal(9, 4), labels())),
    "losses": (lambda: nn.Linear(4, 3), losses, (normal(4), normal(3, seed=9), labels())),
    "gaussian": (lambda: nn.Linear(4, 3), gaussian, (normal(4), normal(3, seed=9))),
    "contrastive": (lambda: nn.Linear(4, 3), contrastive, (normal(4), labels())),
}
SOAK = {
    "operators": (lambda: nn.Linear(4, 3), operators, (normal(4), labels())),
    "unet": (UNet, dice, (normal(3, 8, 8), labels(8, 8, classes=2))),
    "cells": (Cells, cross_entropy, (labels(4, classes=5), labels())),
    "attention": (Attention, cross_entropy, (normal(7, 4), ABSENT, labels())),
    "translation": (Translation, cross_entropy, (labels(6, classes=5),) * 2),
    "vision": (Vision, cross_entropy, PICTURES),
    "volumes": (volumes, cross_entropy, (normal(1, 4, 6, 6), labels())),
    "enlarging": (enlarging, warped, (normal(2, 3, 3), normal(4, 4, 2, seed=8))),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        cross_entropy,
        (normal(4), labels()),
    ),
}
CASES = [*EVERY_DAY, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)]


def in_double(leaf):
    return leaf.double() if leaf.is_floating_point() else leaf


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_buffers_are_those_of_torch(name):
    build, loss, batch = (EVERY_DAY | SOAK)[name]
    torch.manual_seed(0)
    module = build()
    traced = TracedFunction(module, loss, [jax.tree.map(np.asarray, batch)])
    moved = copy.deepcopy(module).double().train()
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(11), dtype=p.dtype))
    trained = dict(moved.named_parameters())
    arrays = {n: p.detach().numpy().copy() for n, p in trained.items()}
    expected = loss(moved, jax.tree.map(in_double, batch))
    slopes = torch.autograd.grad(expected, list(trained.values()))
    with jax.enable_x64(True):
        records = jax.tree.map(lambda leaf: jnp.asarray(in_double(leaf).numpy()), batch)
        evaluate = jax.value_and_grad(
            lambda p: traced.evaluate(p, records, train=True), has_aux=True
        )
        (value, changed), found = jax.tree.map(np.asarray, jax.jit(evaluate)(arrays))
    assert abs(value - expected.item()) <= 1e-12 * max(1, abs(expected.item()))
    size = max(1, max(float(slope.abs().max()) for slope in slopes))
    for parameter, slope in zip(trained, slopes, strict=True):
        assert np.abs(found[parameter] - slope.numpy()).max() <= 1e-12 * size, parameter
    for buffer, after in moved.named_buffers():
        now = changed.get(buffer, traced.constants[buffer])
        np.testing.assert_allclose(now, after.numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.soak
def test_simulator_and_deployment_train_one_mobile_network(tmp_path):
    from fedscaffold.deploy import InProcess, Server, drive, parse
    from fedscaffold.deploy.torch_client import TorchLearner

    records = {f"site-{seed}": (normal(3, 8, 8, seed=seed).double(), labels()) for seed in (1, 2)}
    text = "rounds = 2\nprecision = 'float64'\n[local]\nsteps = 2\nlr = 0.1\n[deploy]\n"
    settings = parse(f"{text}sites = {list(records)}")
    learner = TorchLearner(mobile, cross_entropy, records.__getitem__, precision="float64")
    server = Server(settings, learner.schema, learner.start, tmp_path, buffers=learner.buffers)
    drive(server, InProcess(learner, settings, tmp_path), rounds=2)
    problem = fs.problems.torch(mobile, cross_entropy, list(records.values()))
    run = fs.simulate(fs.scaffold(), problem, rounds=2, local_steps=2, lr=0.1, precision="float64")
    assert np.abs(run.vector - learner.start).max() > 1e-3
    np.testing.assert_allclose(run.vector, server.state.x, rtol=0, atol=1e-10)
    assert sorted(run.state) == sorted(server.state.buffers)
    for name, buffer in server.state.buffers.items():
        np.testing.assert_allclose(run.state[name], buffer, rtol=0, atol=1e-10)
    mobile().double().load_state_dict(run.x | run.state)


class Packed(nn.LSTM):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return super().forward(packed)[1][0][-1]


def measured_without_gradient(module, batch):
    with torch.set_grad_enabled(module.training):
        return F.cross_entropy(module(batch[0]), batch[1])


def test_a_loss_may_have_no_gradient_where_it_is_measured():
    problem = fs.problems.torch(nn.Linear(4, 3), measured_without_gradient, [(normal(4), labels())])
    assert problem.kinds == ("mean", "mean", "mean")


def with_old_weight_norm():
    module = nn.Linear(4, 3)
    module.__dict__["weight"] = 2 * module.weight  # what torch.nn.utils.weight_norm leaves
    return module


def penalised(module, batch):
    slope = torch.autograd.grad(module(batch[0]).sum(), module.weight, create_graph=True)[0]
    return slope.square().mean()


def flat(module, batch):
    return module(batch[0]).square().mean()


class Counting(nn.Linear):
    """Divides by the number of its calls, which only Python knows."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Centred(nn.Linear):
    """Subtracts a running mean, assigned to its buffer or changed in place."""

    def __init__(self, assigned, persistent=True):
        super().__init__(4, 3)
        self.assigned = assigned
        self.register_buffer("centre", torch.zeros(3), persistent=persistent)

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            new = 0.5 * self.centre + 0.5 * y.detach().flatten(0, -2).mean(0)
            if self.assigned:
                self.centre = new
            else:
                self.centre.copy_(new)
        return y - self.centre


def test_a_buffer_that_is_changed_in_place_is_the_state():
    problem = fs.problems.torch(Centred(False), cross_entropy, [(normal(4), labels())])
    assert list(problem.state) == ["centre"]


def hooked():
    module = nn.Linear(4, 3)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    return module


class Caching(nn.Linear):
    """Keeps the size of what it was called with, as layers that cache positions do."""

    length = 0

    def forward(self, x):
        self.length = x.shape[-1]
        return super().forward(x)


def test_a_module_may_keep_what_stays_the_same():
    problem = fs.problems.torch(Caching(4, 3), cross_entropy, [(normal(4), labels())])
    assert problem.state is None


LINEAR = nn.Linear(4, 3)
REFUSED = {
    "hook": (hooked(), flat, "'weight' has a hook for its gradient"),
    "hook of a made module": (hooked, flat, "'weight' has a hook for its gradient"),
    "counter": (Counting(4, 3), flat, "changes 'calls' of the module at each call"),
    "assigned": (Centred(True), flat, "changes 'centre' of the module at each call"),
    "not stored": (Centred(False, persistent=False), flat, "'centre', which is no part of .*dict"),
    "weight norm": (with_old_weight_norm(), cross_entropy, "parametrizations.weight_norm"),
    "packed": (Packed(4, 3, batch_first=True), cross_entropy, "packed sequence"),
    "branch": (
        LINEAR,
        lambda m, b: m(b[0]).sum() if m(b[0]).mean() > 0 else m(b[0]).mean(),
        r"test_torch_architectures.py:\d+\): a branch .* depends on the data",
    ),
    "fft": (LINEAR, lambda m, b: torch.fft.rfft(m(b[0])).abs().mean(), "aten._fft_r2c"),
    "mask": (LINEAR, lambda m, b: m(b[0])[b[2] > 0].mean(), "size that depends on the data"),
    "derivative": (LINEAR, penalised, "torch.autograd.grad"),
}


# an operator without a rule: `operator` of test_torch_module.py too
@pytest.mark.parametrize("case", sharp(REFUSED, lambda case: case != "fft"))
def test_what_is_refused(case):
    module, loss, said = REFUSED[case]
    batch = (normal(5, 4), 1 + labels(), labels())
    with pytest.raises(InputError, match=said) as error:
        fs.problems.torch(module, loss, [jax.tree.map(np.asarray, batch)])
    assert "\n" not in str(error.value)
