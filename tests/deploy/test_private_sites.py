"""Private gradients at deployed sites: by hand in NumPy with the same noise, in torch, JAX and NumPy; the gauge."""

import functools

import numpy as np
import private_case as case
import pytest
from private_case import BATCH, COUNTS, SITES

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.privacy.site_secret import SiteStream

SHARES = {site: n / sum(COUNTS.values()) for site, n in COUNTS.items()}


@functools.cache
def jax_learner():
    import jax.numpy as jnp

    from fedscaffold.deploy import JaxLearner

    def loss(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2

    return JaxLearner(loss, case.START, case.data, precision="float64")


@functools.cache
def torch_learner():
    import torch

    from fedscaffold.deploy import TorchLearner

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.b = torch.nn.Parameter(torch.tensor(case.START["b"]))
            self.w = torch.nn.Parameter(torch.tensor(case.START["w"]))

        def forward(self, x):
            return x @ self.w + self.b

    def loss(module, batch):
        x, y = batch
        return ((module(x) - y) ** 2).mean() / 2

    def data(site):
        return tuple(torch.from_numpy(a) for a in case.data(site))

    return TorchLearner(Model, loss, data, precision="float64")


LEARNERS = {"arrays": case.learner, "jax": jax_learner, "torch": torch_learner}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARNERS)
def test_a_run_is_the_one_by_hand_and_the_gauge_is_at_rounding(tmp_path, kind):
    server, summary = case.run(case.settings(), tmp_path, one=LEARNERS[kind]())
    x, c, c_i = case.by_hand(tmp_path, [SITES] * 3, SHARES)
    np.testing.assert_allclose(server.state.x, x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(server.state.server.c, c, rtol=0, atol=1e-10)
    for site in SITES:
        np.testing.assert_allclose(server.state.memory[site].c_i, c_i[site], rtol=0, atol=1e-10)
    assert server.fault is None
    assert server.residual < 1e-14
    assert summary.metrics == {}


def heavy_ball():
    velocity = np.zeros(4)

    def step(d):
        nonlocal velocity
        velocity = 0.9 * velocity + d
        return case.LR * velocity

    return step


def adam():
    m, v, t = np.zeros(4), np.zeros(4), 0

    def step(d):
        nonlocal m, v, t
        t += 1
        m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d * d
        return case.LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return step


@pytest.mark.parametrize(("optimizer", "move"), [("momentum", heavy_ball), ("adam", adam)])
@pytest.mark.parametrize("kind", ["arrays", "torch"])
def test_local_optimisers_act_on_the_corrected_private_gradient(tmp_path, optimizer, move, kind):
    local = f"steps = 3\nlr = {case.LR}\nbatch_size = {BATCH}\noptimizer = '{optimizer}'"
    server, _ = case.run(case.settings(local=local), tmp_path, one=LEARNERS[kind]())
    x, c, _ = case.by_hand(tmp_path, [SITES] * 3, SHARES, move)
    np.testing.assert_allclose(server.state.x, x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(server.state.server.c, c, rtol=0, atol=1e-10)


def test_fedavg_is_the_one_by_hand(tmp_path):
    config = case.settings(algorithm="name = 'fedavg'", top="weights = 'equal'")
    server, _ = case.run(config, tmp_path)
    x, _, _ = case.by_hand(tmp_path, [SITES] * 3, dict.fromkeys(SITES, 1 / 3), corrected=False)
    np.testing.assert_allclose(server.state.x, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("state", ["server", "client"])
def test_the_gauge_stays_at_rounding_with_sampling_lost_replies_and_restarts(tmp_path, state):
    """Also where clients keep their c_i: what they hold is what the server counted."""
    config = case.settings(
        deploy=f"state = '{state}'", top="weights = 'records'\n[cohort]\nsize = 2"
    )
    heard = []
    for r in range(6):
        server = case.server_of(config, tmp_path)  # started anew in every round
        for site in SITES:
            server.hello(site, case.greeting(case.learner(), config, site))
        requests = server.open(set(SITES))
        replies = {site: case.ask(q, config, tmp_path) for site, q in requests.items()}
        lost = sorted(requests)[0] if r % 2 else None
        for site, reply in replies.items():
            if site != lost:
                assert server.receive(site, reply).counted, reply.facts
        outcome = server.close()
        heard += [outcome.heard] if outcome.committed else []
        if state == "server":
            assert server.fault is None
            assert server.residual < 1e-14
    assert len(heard) == 6
    held = {site: np.zeros(4) for site in SITES}
    for site in SITES:
        if state == "client" and server.roster[site].digest:
            from fedscaffold.algorithms.scaffold import Memory
            from fedscaffold.deploy.client_state import load_record

            kept = tmp_path / "sites" / server.run / site
            held[site] = load_record(kept, server.roster[site].digest, Memory(np.zeros(4))).c_i
        elif state == "server" and site in server.state.memory:
            held[site] = server.state.memory[site].c_i
    mean = sum(SHARES[site] * held[site] for site in SITES)
    np.testing.assert_allclose(server.state.server.c, mean, rtol=0, atol=1e-14)


def deployable():
    """Algorithms that can be deployed and be private."""
    for name in fs.ALGORITHMS:
        try:
            case.settings(algorithm=f"name = '{name}'")
        except InputError:
            continue
        yield name


@pytest.mark.parametrize("name", [*deployable()])
def test_every_algorithm_that_can_be_private_is(tmp_path, name, monkeypatch):
    """Without noise, at a vast clip and with all records in each step, it is the algorithm itself."""
    monkeypatch.setattr(SiteStream, "noise", lambda self, step, size: np.zeros(size))
    given = {
        "local": "steps = 3\nlr = 0.02",
        "algorithm": f"name = '{name}'",
        "table": "clip = 1e6\nnoise = 0.15\ndelta = 1e-3",
        "deploy": "state = 'client'",
    }
    private, _ = case.run(case.settings(**given), tmp_path / "private", rounds=2)
    plain = case.settings(**given)._replace(privacy=None)
    other, _ = case.run(plain, tmp_path / "plain", rounds=2)
    assert np.abs(private.state.x - case.X0).max() > 1e-3
    for found, there in zip(private.state.server, other.state.server, strict=True):
        np.testing.assert_allclose(found, there, rtol=0, atol=1e-12)


def test_which_algorithms_can_be_private_at_sites():
    """Those of the simulator but for those that no deployment takes."""
    assert set(fs.ALGORITHMS) - set(deployable()) == {
        *("dane", "mime", "ditto"),  # gradients over all records, or two in a step
        *("scaffnew", "scaffold-xi"),  # every client in every round
        "fedexp",  # numbers beside vectors
    }


def simulated_noise(seed, round, client, step):
    """The noise of the simulator, by its keys."""
    import jax

    key = jax.random.wrap_key_data(np.array([0, seed], np.uint32), impl="threefry2x32")
    for word in (round, client, 4, step):
        key = jax.random.fold_in(key, word)
    high, low, turn = np.asarray(jax.random.bits(key, (3, 2), np.uint32)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((high + (low + 0.5) / 2**32) / 2**32))
    angle = 2 * np.pi * turn / 2**32
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


@pytest.mark.slow
def test_with_equal_draws_a_deployment_is_the_simulation(tmp_path, monkeypatch):
    private = fs.privacy.records(clip=case.CLIP, noise=case.NOISE, delta=1e-3)
    simulator = fs.Simulator(
        fs.scaffold(),
        fs.Problem(jax_learner().loss, case.START, [case.data(s) for s in SITES], coupled=False),
        rounds=3,
        local_steps=case.STEPS,
        lr=case.LR,
        batch_size=BATCH,
        weights="records",
        seed=5,
        precision="float64",
        privacy=private,
    )
    draws = simulator.ready.drawer.draw(5, 0, 3, 3)
    first = np.concatenate([[0], np.cumsum(list(COUNTS.values()))])
    taken = []  # (round, client) of each charge, in the order in which sites answer

    def begin(self, secret, charge):
        self.round, self.client = divmod(len(taken), 3)
        taken.append(self)

    def rows(self, step, records, rate):
        there = draws.row_weights[self.round, self.client, step] > 0
        return draws.rows[self.round, self.client, step][there] - first[self.client]

    monkeypatch.setattr(SiteStream, "__init__", begin)
    monkeypatch.setattr(SiteStream, "rows", rows)
    monkeypatch.setattr(
        SiteStream,
        "noise",
        lambda self, step, size: simulated_noise(5, self.round, self.client, step),
    )
    server, _ = case.run(case.settings(), tmp_path, one=jax_learner())
    run = simulator.run()
    assert len(taken) == 9
    np.testing.assert_allclose(server.state.x, run.vector, rtol=0, atol=1e-12)
    np.testing.assert_allclose(server.state.server.c, run.server.c, rtol=0, atol=1e-12)
    # and each site's own word is the simulator's accounting
    np.testing.assert_allclose(list(server.spent.values()), run.privacy.by_client(), rtol=1e-12)


def test_records_of_no_finite_gradient_add_nothing(tmp_path):
    """And one record moves what is sent by no more than its clip allows."""

    def with_record(value):
        def held(site):
            x, y = case.data(site)
            return np.vstack([x, np.full(3, value)]), np.r_[y, 1.0]

        return held

    local = f"steps = 1\nlr = {case.LR}\nbatch_size = 1.0"
    sent = {}
    for value in (0.0, 1e9, 1e200, np.inf, np.nan):
        folder = tmp_path / str(value)
        config = case.settings(local=local)
        one = case.learner()
        one.data = with_record(value)
        _, requests = case.requests_of(config, folder)
        where = case.place(folder, "ant")
        where.mkdir(parents=True)
        (where / "secret").write_bytes(bytes(32))
        (where / "secret").chmod(0o600)
        request = requests["ant"]
        request.facts["run"] = "same"
        with np.errstate(invalid="ignore", over="ignore"):
            reply = case.ask(request, config, folder, one)
        sent[value] = np.frombuffer(reply.blobs["d"].data)
    np.testing.assert_array_equal(sent[np.inf], sent[np.nan])
    np.testing.assert_array_equal(sent[np.inf], sent[1e200])  # its square is not finite
    assert np.isclose(np.linalg.norm(sent[1e9] - sent[np.inf]) * COUNTS["ant"], case.CLIP)


@pytest.mark.parametrize(
    ("table", "local", "said"),
    [
        ("clip = 1.0\nnoise = 1.0", "steps = 2", "privacy.delta must be given"),
        ("clip = 0\nnoise = 1.0\ndelta = 1e-3", "steps = 2", "privacy.clip must be a number above"),
        ("clip = 1\nnoise = 1\ndelta = 0.5", "steps = 2", "privacy.delta must be below 1 / 40"),
        ("clip = 1\nnoise = 1\ndelta = 1e-3\nunit = 'clients'", "steps = 2", "protects single rec"),
        ("clip = 1\nnoise = 1\ndelta = 1e-3\nfoo = 1", "steps = 2", "unknown key 'privacy.foo'"),
        ("clip = 1\nnoise = 1\ndelta = 1e-3", "epochs = 1", "local.epochs passes over records"),
        ("clip = 1\nnoise = 1\ndelta = 1e-3", "steps = 2\ndraw = 'shuffle'", "local.draw passes"),
    ],
)
def test_settings_that_are_not_private_are_refused_in_a_line(table, local, said):
    with pytest.raises(InputError, match=said) as caught:
        case.settings(table=table, local=local)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("name = 'scaffold'\noption = 1", "takes gradients over all records at x"),
        ("name = 'ditto'", "asks for gradients at"),
    ],
)
def test_algorithms_that_cannot_be_private_are_refused_by_name(algorithm, said):
    with pytest.raises(InputError, match=said):
        case.settings(algorithm=algorithm)


def test_a_site_without_a_public_number_of_records_is_named():
    with pytest.raises(InputError, match=r"write a number for dog under \[deploy.records\]"):
        case.parse(
            "[local]\nsteps = 1\n[deploy]\nsites = ['dog']\n"
            "[privacy]\nclip = 1.0\nnoise = 1.0\ndelta = 1e-5"
        )
