"""Gradients of single records in torch and JAX, against a loop; learners that mix records are refused by name."""

import numpy as np
import private_case as case
import pytest
import torch
from torch import nn

from fedscaffold.deploy import ArraysLearner, TorchLearner
from fedscaffold.deploy.schema import Packet
from fedscaffold.deploy.torch_data import open_records
from fedscaffold.privacy.site_secret import SiteStream
from fedscaffold.privacy.site_steps import PrivateSteps


@pytest.fixture
def greet(tmp_path):
    """What the server reads where a site of a learner greets it."""
    hello = Packet({"kind": "hello"}, {})
    return lambda one: case.answer(hello, one, case.settings(), "ant", tmp_path).facts


def images(site):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, 6, 6, generator=generator, dtype=torch.float64)
    return {"image": x, "label": torch.arange(12) % 3}


def loss(module, batch):
    return nn.functional.cross_entropy(module(batch["image"]), batch["label"])


def network(*, norm=None, tail=()):
    norm = nn.GroupNorm(2, 4) if norm is None else norm
    first = nn.Conv2d(2, 4, 3)
    layers = [first, norm, nn.Tanh(), nn.Flatten(), *tail, nn.Linear(64, 3)]
    return nn.Sequential(*layers)


def alone(one, batch, rows):
    """By a loop of our own: backward on each record."""
    made = []
    for row in range(rows):
        one.module.zero_grad()
        loss(one.module, {name: leaf[row : row + 1] for name, leaf in batch.items()}).backward()
        made.append(torch.cat([p.grad.reshape(-1) for p in one.trained.values()]).clone())
    return torch.stack(made).numpy()


def test_gradients_of_records_are_those_of_a_loop():
    one = TorchLearner(network, loss, images, precision="float64")
    one.module.train()
    batch = images("ant")
    by_hand = alone(one, batch, 12)
    together = one._record_gradients(batch, 12).numpy()
    assert one.at_once
    np.testing.assert_allclose(together, by_hand, rtol=0, atol=1e-12)
    one.at_once = False
    np.testing.assert_allclose(one._record_gradients(batch, 12).numpy(), by_hand, atol=1e-12)


class Recurrent(nn.Module):
    """An LSTM, and weights that are used twice; a loss of it asks for a number, which vmap has not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 5)
        self.lstm = nn.LSTM(5, 5, batch_first=True)
        self.out = nn.Linear(5, 6)
        self.out.weight = nn.Parameter(self.embed.weight.detach().T.clone())

    def forward(self, x):
        made = self.out(self.lstm(self.embed(x[:, 0]))[0][:, -1])[:, :3]
        return made if float(made.detach().sum()) < 1e9 else 0 * made


def test_what_vmap_does_not_take_is_taken_record_by_record(caplog):
    one = TorchLearner(Recurrent, loss, images, precision="float64")
    one.module.train()
    batch = images("ant")
    made = one._record_gradients(batch, 12).numpy()
    assert not one.at_once
    assert "record by record" in caplog.text
    np.testing.assert_allclose(made, alone(one, batch, 12), rtol=0, atol=1e-12)


def coupled(module, batch):
    return module(batch["image"]).var()


def loader(site):
    held = images(site)
    return torch.utils.data.DataLoader([{k: v[i] for k, v in held.items()} for i in range(12)], 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": lambda: network(norm=nn.BatchNorm2d(4))}, "1 is BatchNorm2d, which mixes rec"),
        (
            {"model": lambda: network(norm=nn.InstanceNorm2d(4, track_running_stats=True))},
            "1 is InstanceNorm2d, which mixes records",
        ),
        ({"loss": coupled}, "its loss is no mean over records"),
        ({"coupled": True}, "its loss is no mean over records"),
        ({"data": loader}, "a DataLoader's batches are no Poisson samples"),
        ({"accumulate": 2}, "TorchLearner's accumulate is for whole batches"),
        ({"scaler": lambda: None}, "TorchLearner's scaler is for whole batches"),
    ],
)
def test_torch_learners_that_mix_records_are_refused_by_name(given, said, greet):
    model, of, data = (
        given.pop(name, default)
        for name, default in (("model", network), ("loss", loss), ("data", images))
    )
    facts = greet(TorchLearner(model, of, data, precision="float64", **given))
    assert facts["kind"] == "refusal"
    assert f"ant cannot train privately: {said}" in facts["reason"]


def test_layers_that_keep_records_apart_are_taken(greet):
    def plain():
        return network(norm=nn.InstanceNorm2d(4), tail=(nn.LayerNorm(64), nn.Dropout(0.3)))

    assert greet(TorchLearner(plain, loss, images, precision="float64"))["kind"] == "hello"


class Counting(nn.Module):
    """Counts what it has seen in a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.inner(x)


def test_a_buffer_that_training_changes_is_refused_and_not_sent(tmp_path):
    one = TorchLearner(Counting, loss, images, precision="float64")
    config = case.settings()
    server = case.server_of(config, tmp_path, one)
    for site in case.SITES:
        server.hello(site, case.greeting(one, config, site))
    request = server.open(set(case.SITES))["ant"]
    reply = case.ask(request, config, tmp_path, one)
    assert reply.facts["kind"] == "refusal"
    said = "".join(p.read_text() for p in (tmp_path / "sites" / "errors").iterdir())
    assert "training changed the buffer 'seen', which nothing noises" in said


def test_dropout_is_drawn_for_each_record(tmp_path):
    """A record's gradient depends on it and its place, not on who else is there."""
    one = TorchLearner(lambda: network(tail=(nn.Dropout(0.5),)), loss, images, precision="float64")
    one.module.train()
    batch = images("ant")
    other = {name: leaf.clone() for name, leaf in batch.items()}
    other["image"][3] += 1.0
    made = []
    for held in (batch, other):
        torch.manual_seed(0)
        made.append(one._record_gradients(held, 12).numpy())
    differs = np.abs(made[0] - made[1]).max(axis=1) > 0
    assert differs.tolist() == [row == 3 for row in range(12)]


def test_other_learners_are_refused_unless_they_say_that_they_can(greet):
    from fedscaffold.deploy.client import Site

    class Own:
        schema, start, buffers = case.learner().schema, case.learner().start, {}

        def site(self, name):
            return Site(5, lambda work: None, lambda x, buffers: {})

    assert "its learner has no gradients of single records" in greet(Own())["reason"]
    whole = ArraysLearner(case.gradient, case.START, case.data, precision="float64")
    assert "ArraysLearner has the gradient of whole batches alone" in greet(whole)["reason"]


def test_rows_that_are_not_one_for_each_record_are_refused(tmp_path):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    case.ask(requests["ant"], config, tmp_path, case.learner(record_gradients=case.gradient))
    said = "".join(p.read_text() for p in (tmp_path / "sites" / "errors").iterdir())
    assert "record_gradients(params, batch)['b'] has shape () at ant" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("coupled", "its loss is no mean over records"),
        ("weights", "its loss takes the weights of a batch"),
        ("state", "its loss updates a state from whole batches"),
        ("key", None),
    ],
)
def test_jax_losses_that_mix_records_are_refused_by_name(kind, said, greet):
    import jax
    import jax.numpy as jnp

    from fedscaffold.deploy import JaxLearner

    def errors(params, batch):
        x, y = batch
        return x @ params["w"] + params["b"] - y

    losses = {
        "coupled": lambda params, batch: jnp.var(errors(params, batch)),
        "weights": lambda params, batch, weights: weights @ errors(params, batch) ** 2,
        "state": lambda params, batch, state: (jnp.mean(errors(params, batch) ** 2), state + 1),
        "key": lambda params, batch, key: jnp.mean(
            errors(params, batch) ** 2 * jax.random.bernoulli(key, 0.5, (len(batch[1]),))
        ),
    }
    state = {"state": np.zeros(())} if kind == "state" else {}
    one = JaxLearner(losses[kind], case.START, case.data, precision="float64", **state)
    facts = greet(one)
    assert facts["kind"] == ("hello" if said is None else "refusal")
    assert said is None or said in facts["reason"]


def test_data_sets_are_batched_by_poisson_samples(tmp_path):
    """A Dataset's records are taken by their numbers, as tensors in memory are."""
    held = images("ant")
    listed = [{name: leaf[i] for name, leaf in held.items()} for i in range(12)]
    sent = []
    for data in (images, lambda site: listed):
        one = TorchLearner(network, loss, data, precision="float64")
        records = open_records("ant", data("ant"))
        draws = SiteStream(bytes(32), "ab12")
        steps = PrivateSteps(draws, clip=1.0, noise=1.0, rate=0.5, expected=6.0, steps=1)
        one._private_gradient(steps, 0, records)
        sent.append(one.g.numpy().copy())
    np.testing.assert_allclose(*sent, rtol=0, atol=1e-13)
