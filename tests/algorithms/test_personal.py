"""Models of the clients' own, on clients with unlike numbers of records, against NumPy alone: FedBN and Ditto."""

import numpy as np
import pytest

import fedscaffold as fs

RNG = np.random.default_rng(23)
COUNTS, FEATURES, LR, STEPS, ROUNDS = (3, 9, 5, 7), 3, 0.05, 4, 25
N = len(COUNTS)
CLIENTS = [(RNG.normal(size=(n, FEATURES)), RNG.normal(size=n) + i) for i, n in enumerate(COUNTS)]
W0, SCALE0, SHIFT0 = RNG.normal(size=FEATURES), np.array([0.8]), np.array([0.3])
PARAMS = {"norm": {"scale": SCALE0, "shift": SHIFT0}, "w": W0}
P = np.array(COUNTS) / sum(COUNTS)
COHORTS = [sorted(RNG.choice(N, 2, replace=False).tolist()) for _ in range(ROUNDS)]


def loss(params, batch):
    x, t = batch
    return (
        0.5
        * ((params["norm"]["scale"] * (x @ params["w"]) + params["norm"]["shift"] - t) ** 2).mean()
    )


PROBLEM = fs.Problem(loss, PARAMS, CLIENTS)


def slopes(i, w, scale, shift):
    """The gradients of client i's loss, by hand."""
    x, t = CLIENTS[i]
    off = scale * (x @ w) + shift - t
    return (
        scale * (x.T @ off) / len(t),
        np.mean(off * (x @ w), keepdims=True),
        np.mean(off, keepdims=True),
    )


def simulate(algorithm, **given):
    asked = {
        "rounds": ROUNDS,
        "cohorts": COHORTS,
        "local_steps": STEPS,
        "lr": LR,
        "weights": "records",
    }
    return fs.simulate(algorithm, PROBLEM, precision="float64", metrics=(), **(asked | given))


def fedbn_by_hand(server_lr):
    w = W0
    norms = [(SCALE0, SHIFT0)] * N
    for cohort in COHORTS:
        share, ends = P[cohort] / P[cohort].sum(), []
        for i in cohort:
            at, (scale, shift) = w, norms[i]
            for _ in range(STEPS):
                dw, dscale, dshift = slopes(i, at, scale, shift)
                at, scale, shift = at - LR * dw, scale - LR * dscale, shift - LR * dshift
            ends.append(at)
            norms[i] = scale, shift
        w = w + server_lr * (share @ np.stack(ends) - w)
    return w, norms


@pytest.mark.slow
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_fedbn_shares_the_weights_and_keeps_the_norms(server_lr):
    run = simulate(fs.fedbn(local=("norm",), server_lr=server_lr))
    w, norms = fedbn_by_hand(server_lr)
    np.testing.assert_allclose(run.x["w"], w, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(run.x["norm"]["scale"], SCALE0)  # the server never hears of them
    for i, (scale, shift) in enumerate(norms):
        model = run.model(client=i)
        np.testing.assert_allclose(model["w"], w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(model["norm"]["scale"], scale, rtol=0, atol=1e-12)
        np.testing.assert_allclose(model["norm"]["shift"], shift, rtol=0, atol=1e-12)
    assert len({scale.item() for scale, _ in norms}) == N


def test_only_shared_layers_travel():
    run, whole = simulate(fs.fedbn(local=["norm"])), simulate(fs.fedavg())
    for way in ("bytes_up", "bytes_down"):
        np.testing.assert_array_equal(run.history[way], 2 * FEATURES * 8)
        np.testing.assert_array_equal(whole.history[way], 2 * (FEATURES + 2) * 8)


def test_without_local_layers_it_is_fedavg():
    np.testing.assert_array_equal(simulate(fs.fedbn()).vector, simulate(fs.fedavg()).vector)


def test_layers_that_are_not_there_are_refused_with_those_that_are():
    line = r"no layer is called 'bn\*'; layers: norm\.scale, norm\.shift, w$"
    with pytest.raises(fs.InputError, match=line):
        simulate(fs.fedbn(local=("w", "bn*")))


def test_part_of_a_model_is_not_compressed():
    with pytest.raises(fs.InputError, match="fedbn sends part of the model"):
        simulate(fs.fedbn(local=("norm",)), compression="top_k:0.5")


def test_an_algorithm_that_does_not_know_the_layers_does_not_run():
    with pytest.raises(fs.InputError, match="must know the model's layers first"):
        fs.fedbn(local=("norm",)).start(np.zeros(5), None)


def test_scaffold_corrects_the_shared_layers_alone():
    """The control variates of what is not shared stay zero, and those of the weights are SCAFFOLD's."""
    w, c_i, norms = W0, np.zeros((N, FEATURES)), [(SCALE0, SHIFT0)] * N
    for cohort in COHORTS:
        share, ends, new, c = P[cohort] / P[cohort].sum(), [], c_i.copy(), P @ c_i
        for i in cohort:
            at, (scale, shift), seen = w, norms[i], []
            for _ in range(STEPS):
                dw, dscale, dshift = slopes(i, at, scale, shift)
                seen.append(dw)
                at, scale, shift = (
                    at - LR * (dw - c_i[i] + c),
                    scale - LR * dscale,
                    shift - LR * dshift,
                )
            ends.append(at)
            norms[i], new[i] = (scale, shift), np.mean(seen, axis=0)
        w, c_i = share @ np.stack(ends), new
    run = simulate(fs.local_layers(fs.scaffold(), local=["norm"]))
    np.testing.assert_allclose(run.x["w"], w, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.clients.c_i[:, 2:], c_i, rtol=0, atol=1e-12)
    assert not run.clients.c_i[:, :2].any()
    assert not run.server.c[:2].any()
    assert run.residual < 1e-14


def test_a_method_with_models_of_its_own_takes_no_local_layers():
    with pytest.raises(fs.InputError, match="ditto's clients keep something of their own already"):
        fs.local_layers(fs.ditto(), local=["norm"])


@pytest.mark.parametrize("name", ["dane", "fedprox", "mime"])
def test_methods_that_look_at_x_take_no_local_layers(name):
    with pytest.raises(fs.InputError, match=f"{name} looks at x itself"):
        fs.local_layers(fs.ALGORITHMS[name](), local=["norm"])


def test_local_layers_survive_a_restart_bit_for_bit(tmp_path):
    whole = simulate(fs.fedbn(local=("norm",)))
    simulate(fs.fedbn(local=("norm",)), rounds=11, checkpoint=tmp_path)
    resumed = simulate(fs.fedbn(local=("norm",)), checkpoint=tmp_path)
    assert resumed.clients.models.tobytes() == whole.clients.models.tobytes()


def test_ditto_on_ragged_clients_is_its_two_lines():
    lam = 0.4
    flat = np.concatenate([SCALE0, SHIFT0, W0])
    x, v = flat, np.tile(flat, (N, 1))

    def slope(i, y):
        dw, dscale, dshift = slopes(i, y[2:], y[:1], y[1:2])
        return np.concatenate([dscale, dshift, dw])

    for cohort in COHORTS:
        share, ends = P[cohort] / P[cohort].sum(), []
        for i in cohort:
            y = x
            for _ in range(STEPS):
                y, v[i] = y - LR * slope(i, y), v[i] - LR * (slope(i, v[i]) + lam * (v[i] - x))
            ends.append(y)
        x = share @ np.stack(ends)
    run = simulate(fs.ditto(lam=lam))
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.clients.models, v, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.model(client=1)["w"], v[1, 2:], rtol=0, atol=1e-12)
