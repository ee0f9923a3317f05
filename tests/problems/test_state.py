"""States that a loss updates beside the gradient (running statistics): trained, averaged, kept and measured as written."""

import operator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.checks import InputError

pytestmark = pytest.mark.slow

N, D, H = 4, 3, 5
COUNTS = (12, 12, 12, 12)
RAGGED = (7, 12, 9, 10)
MOMENTUM = 0.8


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def network(params, x, state, train):
    """One hidden layer with batch normalisation; returns predictions and the new running statistics."""
    hidden = x @ params["a"]
    mean, var = state["mean"], state["var"]
    if train:
        mean, var = hidden.mean(axis=0), hidden.var(axis=0)
        state = {
            "mean": MOMENTUM * state["mean"] + (1 - MOMENTUM) * mean,
            "var": MOMENTUM * state["var"] + (1 - MOMENTUM) * var,
            "steps": state["steps"] + 1,
        }
    hidden = jnp.tanh((hidden - mean) / jnp.sqrt(var + 0.1))
    return hidden @ params["b"], state


def loss(params, batch, state, train):
    x, y = batch
    predicted, state = network(params, x, state, train)
    return jnp.mean((predicted - y) ** 2), state


def score(params, batch, state):
    x, y = batch
    return jnp.mean(jnp.abs(network(params, x, state, train=False)[0] - y) < 1)


def clients(counts=COUNTS):
    rng = np.random.default_rng(0)
    made = []
    for i, n in enumerate(counts):
        x = (1 + i) * rng.normal(size=(n, D)) + i
        made.append((x, np.sin(x.sum(axis=1)) + i))
    return made


def begun():
    rng = np.random.default_rng(1)
    return {"a": rng.normal(size=(D, H)), "b": rng.normal(size=H)}


def start():
    return {"mean": np.full(H, 0.3), "var": np.full(H, 2.0), "steps": np.array(0)}


@cache
def problem(counts=COUNTS, **more):
    return fs.Problem(loss, begun(), clients(counts), accuracy=score, state=start(), **more)


ASK = {"rounds": 3, "local_steps": 2, "lr": 0.05, "precision": "float64"}


def oracle(algorithm, counts, weights, cohorts, local, batches=None):
    """SCAFFOLD or FedAvg with full batches, client by client, written out; returns x, c_i, averaged and own states."""
    p = np.asarray(weights) / np.sum(weights)
    data = clients(counts)
    add = lambda a, b, scale=1.0: jax.tree.map(lambda u, v: u + scale * v, a, b)  # noqa: E731
    zero = jax.tree.map(np.zeros_like, begun())
    x, c, c_i = begun(), zero, [zero] * N
    averaged, own = start(), [start() for _ in range(N)]
    slope = jax.jit(
        jax.grad(lambda params, batch, state: loss(params, batch, state, True), has_aux=True)
    )
    for cohort in cohorts:
        heard = sum(p[i] for i in cohort)
        moves, changes, states = zero, zero, []
        for i in cohort:
            y, state, total = x, own[i] if local else averaged, zero
            for _ in range(ASK["local_steps"]):
                # in NumPy, which compiles nothing
                g, state = jax.tree.map(np.asarray, slope(y, data[i], state))
                total = add(total, g, 1 / ASK["local_steps"])
                d = g if algorithm == "fedavg" else add(add(g, c), c_i[i], -1)
                y = add(y, d, -ASK["lr"])
            moves = add(moves, add(x, y, -1), p[i] / heard)
            changes = add(changes, add(total, c_i[i], -1), p[i])
            c_i[i], own[i] = total, state
            states.append(state)
        x = add(x, moves, -1)
        c = add(c, changes)
        shares = [p[i] / heard for i in cohort]
        averaged = jax.tree.map(
            lambda *rows, shares=shares: sum(map(operator.mul, shares, rows)), *states
        )
    return x, c_i, averaged, own


def agree(a, b):
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=0, atol=1e-12), a, b)


@pytest.mark.parametrize(
    ("name", "counts", "buffers"),
    [("scaffold", COUNTS, "average"), ("scaffold", RAGGED, "local"), ("fedavg", RAGGED, "average")],
)
def test_training_is_the_loop_written_out(name, counts, buffers):
    cohorts, weights = [[0, 2], [1, 2, 3], [0, 3]], [1.0, 2.0, 0.5, 1.5]
    run = fs.simulate(
        getattr(fs, name)(),
        problem(counts),
        cohorts=cohorts,
        weights=weights,
        buffers=buffers,
        metrics=(),
        **ASK,
    )
    x, c_i, averaged, own = oracle(name, counts, weights, cohorts, buffers == "local")
    agree(run.x, x)
    if name == "scaffold":
        for i in range(N):
            agree(
                run.clients.c_i[i],
                fs.Problem(lambda p, b: 0.0, begun(), clients()).layout.flatten(c_i[i], "float64"),
            )
        assert run.residual <= run.explained
    if buffers == "average":
        agree(run.state, averaged)
        assert run.clients.state is None
    else:
        assert run.state is None
        agree(run.clients.state, jax.tree.map(lambda *rows: np.stack(rows), *own))


@jax.jit
def measured(params, batch, state):
    """Loss and its gradient, and score, in evaluation."""
    value, slope = jax.value_and_grad(lambda p: loss(p, batch, state, False)[0])(params)
    return value, slope, score(params, batch, state)


def test_it_is_measured_with_running_statistics():
    made = problem()
    run = fs.simulate(
        fs.scaffold(), made, **ASK, metrics=["loss", "accuracy", "grad_norm", worst()]
    )
    values, slopes, scores = zip(
        *(measured(run.x, batch, run.state) for batch in clients()), strict=True
    )
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *slopes)
    assert run.history["grad_norm"][-1] == pytest.approx(
        np.linalg.norm(made.layout.flatten(mean, "float64")), rel=1e-12
    )
    assert run.history["loss"][-1] == pytest.approx(np.mean(values), rel=1e-12)
    assert run.history["accuracy"][-1] == pytest.approx(np.mean(scores), rel=1e-6)
    assert run.history["error_max"][-1] == pytest.approx(np.max(values), rel=1e-12)
    assert (
        run.measured["loss"] == "all records, one by one"
    )  # with running statistics it is a mean over records


def worst(compiled=None):
    def error(params, data, state):
        return loss(params, data, state, False)[0]

    return fs.metric(error, by_client=True, summary="max", compiled=compiled)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_metric_by_client_uses_the_clients_own_statistics(compiled):
    run = fs.simulate(fs.fedavg(), problem(), **ASK, buffers="local", metrics=[worst(compiled)])
    rows = jax.tree.map(np.asarray, run.clients.state)
    own = [jax.tree.map(lambda a: a[i], rows) for i in range(N)]  # noqa: B023
    values = [
        float(measured(run.x, batch, state)[0]) for batch, state in zip(clients(), own, strict=True)
    ]
    assert run.history["error_max"][-1] == pytest.approx(max(values), rel=1e-12)


@pytest.mark.parametrize("compiled", [True, False])
def test_means_of_counters_are_rounded(compiled):
    """In single precision the weights add up to 1 only nearly, and the mean of sixes is still six."""
    count = fs.metric(
        lambda params, data, state: 1.0 * state["steps"], name="count", compiled=compiled
    )
    many = [(x[:5], y[:5]) for x, y in clients()] + [clients()[0]] * 3
    made = fs.Problem(loss, begun(), many, state=start())
    ask = ASK | {
        "precision": "float32",
        "weights": [0.1, 0.2, 0.3, 0.7, 0.6, 0.9, 0.4],
        "buffers": "local",
    }
    assert fs.simulate(fs.fedavg(), made, **ask, metrics=[count]).history["count"].tolist() == [
        2,
        4,
        6,
    ]


def test_a_loss_that_is_not_told_measures_with_the_statistics_of_the_batch():
    def always(params, batch, state):
        return loss(params, batch, state, True)

    run = fs.simulate(fs.fedavg(), fs.Problem(always, begun(), clients(), state=start()), **ASK)
    values = [float(jax.jit(always)(run.x, batch, run.state)[0]) for batch in clients()]
    assert run.history["loss"][-1] == pytest.approx(np.mean(values), rel=1e-12)
    assert run.measured["loss"] == "all records of each client at once"


def test_a_round_that_nobody_answers_changes_nothing():
    run = fs.simulate(fs.scaffold(), problem(), cohorts=[[], [], []], **ASK, metrics=())
    agree(run.state, start())


@pytest.mark.parametrize(
    "algorithm", [fs.mime(), fs.dane(), fs.scaffold(option=1)], ids=lambda a: a.name
)
def test_gradients_at_x_leave_no_trace(algorithm):
    """The counter counts local steps; gradients at x, or of all data, are none."""
    run = fs.simulate(algorithm, problem(), **ASK, metrics=())
    assert run.state["steps"] == ASK["rounds"] * ASK["local_steps"]


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_step_sweep_and_resume_agree_with_the_run(buffers, tmp_path):
    more = {**ASK, "buffers": buffers, "batch_size": 5, "cohort": 0.5}
    whole = fs.simulate(fs.scaffold(), problem(), **more)
    simulator = fs.Simulator(fs.scaffold(), problem(), **more)
    state, rows = simulator.step(simulator.init(), rounds=3)
    assert simulator.result(state, rows).digest == whole.digest
    fs.simulate(fs.scaffold(), problem(), **{**more, "rounds": 2}, checkpoint=tmp_path)
    resumed = fs.simulate(fs.scaffold(), problem(), **more, checkpoint=tmp_path)
    assert resumed.digest == whole.digest
    jax.tree.map(
        np.testing.assert_array_equal,
        (resumed.state, resumed.clients.state),
        (whole.state, whole.clients.state),
    )
    swept = fs.sweep(fs.scaffold(), problem(), **{**more, "lr": [ASK["lr"]]}, seeds=1).runs[0][0]
    agree((swept.x, swept.state), (whole.x, whole.state))


def test_another_start_is_another_run(tmp_path):
    fs.simulate(fs.fedavg(), problem(), **ASK, checkpoint=tmp_path)
    other = fs.Problem(
        loss, begun(), clients(), accuracy=score, state=start() | {"mean": np.zeros(H)}
    )
    with pytest.raises(InputError, match="state"):
        fs.simulate(fs.fedavg(), other, **ASK, checkpoint=tmp_path)


def test_clients_out_of_core_average_too():
    arrays = fs.simulate(fs.scaffold(), problem(), **ASK, cohort=0.5, metrics=())
    sparse = fs.simulate(
        fs.scaffold(), problem(), **ASK, cohort=0.5, metrics=(), client_state="sparse"
    )
    agree((sparse.x, sparse.state), (arrays.x, arrays.state))


def test_bytes_count_the_statistics():
    run = fs.simulate(fs.scaffold(), problem(), **ASK)
    size = sum(a.nbytes for a in jax.tree.leaves(run.state))
    without = 8 * (D * H + H)
    assert run.history["bytes_up"][0] == N * (without + size)
    assert run.history["bytes_down"][0] == N * (2 * without + size)


def plain(params, batch):
    return jnp.mean((batch[0] @ params["a"]) ** 2)


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("loss takes a state: give the one", lambda: fs.Problem(loss, begun(), clients())),
        (
            "a state needs a loss that takes it",
            lambda: fs.Problem(plain, begun(), clients(), state=start()),
        ),
        (
            "state must hold numbers",
            lambda: fs.Problem(loss, begun(), clients(), state={"mean": np.array("a")}),
        ),
        ("state", lambda: fs.Problem(loss, begun(), clients(), state={"mean": np.array(np.nan)})),
        (
            "buffers says what becomes",
            lambda: fs.simulate(
                fs.fedavg(), fs.Problem(plain, begun(), clients()), **ASK, buffers="local"
            ),
        ),
        ("buffers", lambda: fs.simulate(fs.fedavg(), problem(), **ASK, buffers="none")),
        ("ditto trains two models", lambda: fs.simulate(fs.ditto(), problem(), **ASK)),
        (
            "must return a pair",
            lambda: fs.simulate(
                fs.fedavg(),
                fs.Problem(lambda p, b, state: plain(p, b), begun(), clients(), state=start()),
                **ASK,
            ),
        ),
        (
            "arrays of shapes",
            lambda: fs.simulate(
                fs.fedavg(),
                fs.Problem(
                    lambda p, b, state: (plain(p, b), {}), begun(), clients(), state=start()
                ),
                **ASK,
            ),
        ),
        (
            "keeps a state at every client",
            lambda: fs.simulate(
                fs.fedavg(), problem(), **ASK, metrics=(), buffers="local", client_state="sparse"
            ),
        ),
        ("which the theory does not know", lambda: fs.plan(problem(), target=0.1)),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(said, make):
    with pytest.raises(InputError, match=said):
        make()
