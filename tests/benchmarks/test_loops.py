"""The benchmark's PyTorch loops compute SCAFFOLD: both end where a plain float64 text of the paper ends."""

from __future__ import annotations

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from benchmarks import (  # noqa: E402
    machine,
    measure,
    networks,
    torch_func,
    torch_loops,
    torch_tight,
    workloads,
)
from benchmarks.workloads import L2, Workload, initial, sampled, widths  # noqa: E402
from fedscaffold.checks import InputError  # noqa: E402

ROUNDS, SEED = 4, 3
EPS = float(np.finfo(np.float32).eps)


def small(model: str, cohort: int = 4) -> Workload:
    """Six clients of unequal size, each with the labels of its own two classes and a little of the others."""
    rng = np.random.default_rng(7)
    classes = 2 if model == "logistic" else 3
    clients = []
    for i in range(6):
        n = int(rng.integers(5, 12))
        y = np.where(rng.random(n) < 0.7, i % classes, rng.integers(0, classes, n))
        x = rng.standard_normal((n, 5), np.float32) + np.float32(0.5 * i)
        clients.append((x, y))
    return Workload(
        "small", clients, model, 6 if model == "mlp" else 0, classes, cohort, 5, 4, 0.1, ROUNDS
    )


def gradients(workload: Workload, arrays, x, y):
    """Gradients of the mean loss of a batch, by hand."""
    if workload.model == "logistic":
        (w,) = arrays
        error = (1 / (1 + np.exp(-x @ w[0])) - y) / len(y)
        return [(error @ x)[None] + L2 * w]
    inputs = [x]
    for w, bias in zip(arrays[:-2:2], arrays[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ w.T + bias, 0))
    scores = np.exp(inputs[-1] @ arrays[-2].T + arrays[-1])
    error = (scores / scores.sum(1, keepdims=True) - np.eye(workload.classes)[y]) / len(y)
    found = []
    for w, below in zip(arrays[-2::-2], inputs[::-1], strict=True):
        found = [error.T @ below, error.sum(0), *found]
        error = (error @ w) * (below > 0)
    return found


def reference(workload: Workload, cohorts, draws):
    """Algorithm 1 of the SCAFFOLD paper with option II, line by line, in float64."""
    x = [array.astype(np.float64) for array in initial(workload, SEED)]
    c = [np.zeros_like(p) for p in x]
    c_all = [[np.zeros_like(p) for p in x] for _ in workload.clients]
    for cohort, records in zip(cohorts, draws, strict=True):
        dy, dc = [0.0] * len(x), [0.0] * len(x)
        for i, client_records in zip(cohort, records, strict=True):
            features, labels = workload.clients[i]
            y = list(x)
            for batch in client_records:
                g = gradients(workload, y, features[batch].astype(np.float64), labels[batch])
                y = [
                    a - workload.lr * (b - m + s)
                    for a, b, m, s in zip(y, g, c_all[i], c, strict=True)
                ]
            travel = workload.local_steps * workload.lr
            new = [m - s + (a - b) / travel for m, s, a, b in zip(c_all[i], c, x, y, strict=True)]
            dy = [d + b - a for d, a, b in zip(dy, x, y, strict=True)]
            dc = [d + n - m for d, n, m in zip(dc, new, c_all[i], strict=True)]
            c_all[i] = new
        x = [a + d / len(cohort) for a, d in zip(x, dy, strict=True)]
        c = [s + d / len(workload.clients) for s, d in zip(c, dc, strict=True)]
    return np.concatenate([p.ravel() for p in x])


def drawn(workload: Workload):
    rng = np.random.default_rng(11)
    cohorts, draws = zip(*(sampled(rng, workload) for _ in range(ROUNDS)), strict=True)
    return np.stack(cohorts), np.stack(draws)


def assert_same_model(found, expected):
    # A float32 sum of the few dozen terms behind every step, over 20 steps that contract or nearly so.
    np.testing.assert_allclose(found, expected, rtol=0, atol=100 * EPS * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [4, 6])
@pytest.mark.parametrize("model", ["mlp", "softmax", "logistic"])
def test_tutorial_loop_is_scaffold(model, cohort):
    workload = small(model, cohort)
    cohorts, draws = drawn(workload)
    result = torch_loops.tutorial(workload, ROUNDS, SEED, 1, cohorts, draws)
    assert_same_model(result.x, reference(workload, cohorts, draws))
    assert result.residual < 100 * EPS
    assert result.client_steps == ROUNDS * cohort * 5


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("model", ["mlp", "softmax", "logistic"])
def test_batched_loop_is_scaffold_whatever_the_block(model, block, monkeypatch):
    workload = small(model)
    cohorts, draws = drawn(workload)
    monkeypatch.setattr(torch_loops, "best_block", lambda *_: block)
    result = torch_loops.batched(workload, ROUNDS, SEED, 1, cohorts, draws)
    assert_same_model(result.x, reference(workload, cohorts, draws))
    assert result.residual < 100 * EPS
    assert result.block == block


@pytest.mark.parametrize("model", ["mlp", "softmax", "logistic"])
def test_tight_loop_is_scaffold(model):
    workload = small(model)
    cohorts, draws = drawn(workload)
    result = torch_tight.tight(workload, ROUNDS, SEED, 1, cohorts, draws)
    assert_same_model(result.x, reference(workload, cohorts, draws))
    assert result.residual < 100 * EPS


@pytest.mark.parametrize("local_steps", [5, 0])
def test_vectorised_loop_is_scaffold(local_steps):
    workload = small("mlp", 6)._replace(local_steps=local_steps)
    expected = torch_loops.tutorial(workload, ROUNDS, SEED, 1)
    result = torch_func.vectorised(workload, ROUNDS, SEED, 1)
    assert_same_model(result.x, expected.x)
    assert result.residual < 100 * EPS
    assert result.client_steps == expected.client_steps


def test_all_loops_draw_the_same_rounds_from_a_seed():
    workload = small("mlp")
    one = torch_loops.tutorial(workload, ROUNDS, SEED, 1)
    for loop in (torch_loops.batched, torch_tight.tight):
        other = loop(workload, ROUNDS, SEED, 1)
        assert_same_model(one.x, other.x)
        assert workload.cohort % other.block == 0
    assert np.abs(one.x - torch_loops.tutorial(workload, ROUNDS, SEED + 1, 1).x).max() > 0.01


def test_the_reference_gradient_is_the_slope_of_the_loss():
    rng = np.random.default_rng(5)
    for model in ("mlp", "softmax", "logistic"):
        workload = small(model)
        x, y = workload.clients[0]
        module = torch_loops.module(workload, SEED).double()
        arrays = [p.detach().numpy().copy() for p in module.parameters()]
        away = [rng.standard_normal(a.shape) for a in arrays]
        slope = sum(
            np.sum(g * a)
            for g, a in zip(gradients(workload, arrays, x.astype(float), y), away, strict=True)
        )
        labels = torch.from_numpy(y).to(torch.float64 if model == "logistic" else torch.int64)
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for p, a, d in zip(module.parameters(), arrays, away, strict=True):
                    p.copy_(torch.from_numpy(a + step * d))
                ends.append(
                    float(
                        torch_loops.mean_loss(
                            module, torch.from_numpy(x).double(), labels, workload
                        )
                    )
                )
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


def test_gemm_flops_are_those_torch_counts():
    for model in ("mlp", "softmax", "logistic"):
        workload = small(model)
        x, y = (torch.from_numpy(part[:4]) for part in workload.clients[0])
        counter = FlopCounterMode(display=False)
        with counter:
            labels = y.float() if model == "logistic" else y
            torch_loops.mean_loss(torch_loops.module(workload, 0), x, labels, workload).backward()
        steps = ROUNDS * workload.cohort * workload.local_steps
        assert machine.gemm_flops(workload) == counter.get_total_flops() * steps


@pytest.mark.parametrize("model", ["mlp", "softmax", "logistic"])
def test_the_roofline_counts_the_model_and_its_batch(model):
    workload = small(model)
    size = sum(array.size for array in initial(workload, 0))
    batch = workload.clients[0][0][: workload.batch_size].nbytes
    floor = machine.floor_of(workload, gflops=2.0, gigabytes=4.0)
    assert floor.bytes == 2 * batch + 6 * 4 * size
    steps = workload.rounds * workload.cohort * workload.local_steps
    assert floor.flops * steps == machine.gemm_flops(workload)
    assert floor.products == pytest.approx(floor.flops * steps / 2e9)
    assert floor.moves == pytest.approx(floor.bytes * steps / 4e9)
    assert floor.seconds == max(floor.products, floor.moves)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "lenet5", "cnn", "resnet8"])
def test_networks_are_the_same_in_jax_and_torch(name):
    classes, size, channels = (10, 32, 3) if name == "resnet8" else (62, 28, 1)
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(2, size, size, channels)).astype(np.float32),
        rng.integers(0, classes, 2),
    )
    module, start = networks.torch_module(name, classes, SEED), networks.start(name, classes, SEED)
    expected = torch.nn.functional.cross_entropy(
        module(torch_loops.tensor(x)), torch.from_numpy(y)
    ).item()
    found = jax.jit(networks.jax_loss(name))(start, (x, y))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_an_epoch_of_the_tutorial_loop_is_scaffold():
    workload = small("mlp")._replace(local_steps=0)
    result = torch_loops.tutorial(workload, ROUNDS, SEED, 1)
    rng = np.random.default_rng(SEED)
    chosen = [sampled(rng, workload)[0] for _ in range(ROUNDS)]
    assert result.client_steps == sum(
        -(-len(workload.clients[i][1]) // 4) for cohort in chosen for i in cohort
    )
    assert result.residual < 100 * EPS


def test_the_matrix_rate_is_a_rate_and_threads_are_given_back():
    before = torch.get_num_threads()
    assert 0.1 < machine.sgemm_rate() < 10_000
    assert 0.1 < machine.copy_rate() < 10_000
    with machine.num_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(InputError, match="threads must be a whole number of at least 1"):
        machine.sgemm_rate(0)


def test_work_loads_have_the_stated_shapes():
    w1, w4 = workloads.w1(200), workloads.w4(10)
    sizes = [len(y) for _, y in w1.clients]
    assert (len(sizes), min(sizes) >= 50, max(sizes) <= 199) == (200, True, True)
    x, y = (np.concatenate(part) for part in zip(*w1.clients, strict=True))
    assert (x.dtype, x.shape[1], set(y)) == (np.float32, 32, set(range(10)))
    # The coordinate of the label has mean 2, all others 0: within five standard errors.
    marked = x[np.arange(len(y)), y]
    assert abs(marked.mean() - 2) < 5 / len(y) ** 0.5
    assert abs(x.sum() - marked.sum()) < 5 * (31 * len(y)) ** 0.5
    # Dirichlet(0.1) over ten classes: most clients are dominated by one class.
    assert np.median([np.bincount(y, minlength=10).max() / len(y) for _, y in w1.clients]) > 0.5
    assert [x.shape for x, _ in w4.clients] == [(200, 20)] * 10
    assert w4.cohort == 10
    assert widths(w4) == [20, 1]
    assert [p.shape for p in initial(w4, 0)] == [(1, 20)]


def test_an_unknown_work_load_is_refused():
    with pytest.raises(InputError, match="unknown work load"):
        measure.everything("W99", growth=False, tell=lambda line: None)
