"""Blocks of clients on several cores: the same bits on any number of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import sharp
from jax.experimental.compilation_cache import compilation_cache

import fedscaffold as fs
from fedscaffold.simulation import blocks, engine, program, threads

RNG = np.random.default_rng(0)


def clients(counts):
    return [(RNG.normal(size=(n, 6)), RNG.normal(size=n)) for n in counts]


def loss(w, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


START = {"a": RNG.normal(size=(6, 4)), "b": RNG.normal(size=4)}
EQUAL = fs.Problem(loss, START, clients([12] * 9))
UNEQUAL = fs.Problem(loss, START, clients([3, 12, 5, 9, 7, 12, 4, 10, 6]))


def coupled(w, batch):
    score = jnp.tanh(batch[0] @ w["a"]) @ w["b"]
    return jax.nn.logsumexp(score) - jnp.mean(score * batch[1])


def near(w, batch):
    return jnp.mean(jnp.abs(jnp.tanh(batch[0] @ w["a"]) @ w["b"] - batch[1]) < 1)


COUPLED = fs.Problem(coupled, START, clients([3, 12, 5, 9, 7]), evaluation_batch=4)
TESTED = fs.Problem(loss, START, clients([12] * 5), accuracy=near, test=clients([40])[0])
# in double precision and without metrics, so that all tests of a run share its programs; one row is in single precision
COMMON = {
    "rounds": 3,
    "lr": 0.05,
    "block": 2,
    "precision": "float64",
    "metrics": (),
    "progress": False,
}
RUNS = {
    "fedavg": (fs.fedavg(), EQUAL, {"local_steps": 2, "batch_size": 4, "cohort": 5}),
    "scaffold": (fs.scaffold(), EQUAL, {"local_steps": 2, "batch_size": 4, "cohort": 5}),
    "scaffold I": (fs.scaffold(option=1), UNEQUAL, {"local_steps": 2, "cohort": 6}),
    "everyone": (fs.scaffold(), EQUAL, {"local_steps": 2, "block": 3}),
    "epochs": (fs.scaffold(), UNEQUAL, {"local_epochs": 1, "batch_size": 4, "cohort": 5}),
    "float32": (
        fs.scaffold(),
        UNEQUAL,
        {"local_epochs": 1, "batch_size": 4, "cohort": 5, "precision": "float32"},
    ),
    "compressed": (
        fs.scaffold(),
        EQUAL,
        {"local_steps": 2, "cohort": 5, "compression": "top_k:0.5"},
    ),
    "mime": (fs.mime(), UNEQUAL, {"local_steps": 2, "batch_size": 4, "cohort": 5}),
    "decayed": (fs.scaffold(), EQUAL, {"local_steps": 2, "cohort": 5, "stale": "decay:0.9"}),
    "metrics": (
        fs.scaffold(),
        UNEQUAL,
        {"local_steps": 2, "cohort": 5, "metrics": ["loss", "grad_norm", "drift", "age"]},
    ),
    "coupled": (
        fs.scaffold(),
        COUPLED,
        {"local_steps": 2, "batch_size": 3, "cohort": 4, "metrics": ["loss", "grad_norm"]},
    ),
    "test": (
        fs.fedavg(),
        TESTED,
        {"local_steps": 2, "cohort": 4, "evaluate_every": 2, "metrics": ["accuracy"]},
    ),
}


def arrays(run):
    return jax.tree.leaves((run.x, run.server, run.clients, run.history))


@pytest.fixture(autouse=True)
def uncached():
    """JAX's cache of programs is off: lanes get the machine code of the first one."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks once whether it is on
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def heavy(monkeypatch):
    """All rounds run by blocks, and programs of a block are loaded on up to four lanes."""
    monkeypatch.setattr(program, "HEAVY", 0)
    monkeypatch.setattr(blocks, "threads", lambda: 4)


@pytest.fixture
def use(heavy, monkeypatch):
    """A function that lets runs use the first lanes only; how many they have used is in `use.lanes`."""
    compiled, begin = engine._compile, blocks.Lanes.__init__

    def use(number):
        def fewer(*given):
            parts = compiled(*given)
            on_lanes = {name: getattr(parts, name) for name in ("slope", "block", "shares")}
            return parts._replace(**{name: all and all[:number] for name, all in on_lanes.items()})

        monkeypatch.setattr(engine, "_compile", fewer)

    def begun(self, pool, number, federation):
        use.lanes.add(number)
        begin(self, pool, number, federation)

    monkeypatch.setattr(blocks.Lanes, "__init__", begun)
    use.lanes = set()
    return use


# Each kind of round once: the program of a block differs by what it is given (gradients before the steps, unequal clients,
# coupled records, sums of metrics, single precision). The others, whose blocks are like these, are compared with the loop.
KINDS = ("scaffold I", "float32", "compressed", "mime", "metrics", "coupled")


@pytest.mark.parametrize("name", sharp(RUNS, KINDS))
def test_bits_do_not_depend_on_the_number_of_threads(name, use):
    algorithm, problem, arguments = RUNS[name]
    simulator = fs.Simulator(algorithm, problem, **COMMON | arguments)
    assert simulator.ready.spec.by_blocks
    blocks_of_a_cohort = -(-simulator.ready.drawer.slots // simulator.ready.spec.block)
    runs = []
    for number in range(1, blocks_of_a_cohort + 1):
        use(number)
        runs.append(simulator.run())
    assert use.lanes == set(range(1, blocks_of_a_cohort + 1))
    for other in runs[1:]:
        for a, b in zip(arrays(runs[0]), arrays(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sharp(RUNS, lambda name: name not in ("fedavg", "scaffold", "float32"))
)
def test_the_parts_of_a_round_are_the_compiled_loop(name, monkeypatch):
    algorithm, problem, arguments = RUNS[name]
    exact = COMMON | arguments | {"precision": "float64"}
    loop = fs.simulate(algorithm, problem, **exact)
    monkeypatch.setattr(program, "HEAVY", 0)
    monkeypatch.setattr(blocks, "threads", lambda: 4)
    parts = fs.simulate(algorithm, problem, **exact)
    for a, b in zip(arrays(loop), arrays(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_sweep_has_the_bits_of_single_runs(heavy):
    same = COMMON | {"local_steps": 2, "batch_size": 4, "cohort": 5}
    del same["lr"]
    swept = fs.sweep(fs.scaffold(), EQUAL, lr=[0.01, 0.05], seeds=2, **same)
    for j, lr in enumerate((0.01, 0.05)):
        for seed in (0, 1):
            alone = fs.simulate(fs.scaffold(), EQUAL, lr=lr, seed=seed, **same)
            np.testing.assert_array_equal(swept.runs[j][seed].vector, alone.vector)


@pytest.mark.slow
def test_a_run_of_a_sweep_that_has_ended_waits_for_the_others(heavy, monkeypatch):
    monkeypatch.setattr(engine, "STRETCH_SECONDS", 0)  # chunks of one round
    own = {"rounds": 6, "local_steps": 2, "cohort": 5, "metrics": ["loss"]}
    lrs, same = [0.01, 0.05], COMMON | own
    del same["lr"]
    never = {"stop_at": {"loss": 0.0}}  # the program is that of the runs that end
    first = fs.simulate(fs.scaffold(), EQUAL, lr=0.05, **never, **same).history["loss"][1]
    swept = fs.sweep(fs.scaffold(), EQUAL, lr=lrs, seeds=1, stop_at={"loss": first}, **same)
    ends = []
    for lr, (run,) in zip(lrs, swept.runs, strict=True):
        alone = fs.simulate(fs.scaffold(), EQUAL, lr=lr, stop_at={"loss": first}, **same)
        for a, b in zip(arrays(run), arrays(alone), strict=True):
            np.testing.assert_array_equal(a, b)
        ends.append(len(run.history["loss"]))
    assert ends[1] < ends[0]


@pytest.mark.slow
def test_clients_out_of_core_have_the_bits_of_those_in_memory(heavy):
    same = COMMON | {"local_steps": 2, "batch_size": 4, "cohort": 5}
    runs = [
        fs.simulate(fs.scaffold(), UNEQUAL, client_state=where, **same)
        for where in ("array", "sparse")
    ]
    np.testing.assert_array_equal(runs[0].vector, runs[1].vector)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(use, tmp_path):
    same = COMMON | {"local_steps": 2, "batch_size": 4, "cohort": 5}
    whole = fs.simulate(fs.scaffold(), EQUAL, **same)
    for rounds, number in ((2, 1), (3, 3)):
        use(number)
        run = fs.simulate(
            fs.scaffold(), EQUAL, **same | {"rounds": rounds, "checkpoint": tmp_path / "run"}
        )
    assert use.lanes == {1, 3}
    np.testing.assert_array_equal(whole.vector, run.vector)


def test_a_run_ends_at_the_round_that_diverges(heavy):
    run = fs.simulate(
        fs.fedavg(),
        EQUAL,
        **COMMON | {"lr": 1e30, "rounds": 20, "metrics": ["loss"]},
        local_steps=3,
        cohort=4,
    )
    assert run.diverged_at is not None
    assert len(run.history["loss"]) == run.diverged_at < 20


def test_a_jaxlib_without_further_clients_is_said_in_the_log(monkeypatch, caplog):
    first = jax.devices()[0]
    monkeypatch.delattr("jaxlib.xla_client.make_cpu_client")
    assert threads.lane.__wrapped__(0) == first
    (record,) = caplog.records
    assert "depend on the number of cores" in record.getMessage()


def test_programs_of_lanes_come_from_the_cache_of_programs(heavy, tmp_path):
    """As on the command line, where the second run of a configuration finds all programs compiled."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    runs = []
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            runs.append(fs.simulate(fs.fedavg(), EQUAL, local_steps=2, cohort=5, **COMMON))
            engine._compile.cache_clear()
            jax.clear_caches()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert any(tmp_path.iterdir())
    np.testing.assert_array_equal(runs[0].vector, runs[1].vector)
