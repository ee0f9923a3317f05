"""A model's file loads strictly into a fresh module, and a site with another backbone is refused by name."""

import json

import numpy as np
import pytest

from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive, parse
from fedscaffold.deploy.client import answer, greeting
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import blob

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file
from fedscaffold.deploy.torch_client import TorchLearner  # noqa: E402

SITES = ("ant", "bee")


class Net(torch.nn.Module):
    """Frozen, tied (twice, across frozen and trained), shared and narrow tensors; buffers of every kind."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
        )
        self.backbone.requires_grad_(False)
        with torch.no_grad():
            self.backbone[2].weight.mul_(scale)
        self.again = self.backbone[0]
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 3, bias=False)
        self.tied = torch.nn.Linear(3, 3)
        self.tied.weight = self.head.weight
        self.out = torch.nn.Linear(3, 2)
        self.narrow = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
        self.brake = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float16), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(3, dtype=torch.int32))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("brief", torch.tensor([0.25, 1.5], dtype=torch.bfloat16))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        h = self.norm(self.backbone(x)) * self.narrow * self.brake
        return self.out(self.tied(self.head(h)) * self.mask)


def data(site):
    g = torch.Generator().manual_seed(SITES.index(site))
    x = torch.randn(12, 3, generator=g)
    return x, (x[:, 0] > 0).long()


def loss(module, batch):
    return torch.nn.functional.cross_entropy(module(batch[0].to(module.out.weight.dtype)), batch[1])


def config(precision="float32", buffers="average"):
    return parse(
        f"rounds = 2\nprecision = '{precision}'\n[local]\nsteps = 2\nlr = 0.1\nbuffers = '{buffers}'\n"
        f"[deploy]\nsites = {list(SITES)}\nwait = 0"
    )


def run(settings, one, folder):
    server = Server(settings, one.schema, one.start, folder, buffers=one.buffers)
    return server, drive(server, InProcess(one, settings, folder), settings.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_file_loads_strictly_into_a_fresh_module(buffers, precision, folder):
    settings = config(precision, buffers)
    one = TorchLearner(Net, loss, data, precision=precision)
    server, summary = run(settings, one, folder)
    file = load_file(summary.model)
    fresh = Net().to(one.dtype)
    assert fresh.load_state_dict(file, strict=True).missing_keys == []
    torch.manual_seed(0)
    made = Net()
    wide = {torch.float32: one.dtype}
    for name, tensor in made.state_dict().items():
        assert (file[name].dtype, file[name].shape) == (
            wide.get(tensor.dtype, tensor.dtype),
            tensor.shape,
        ), name
    for name, tensor in made.state_dict().items():
        if "backbone" in name or name in ("brake", "mask", "empty"):
            assert torch.equal(file[name], tensor.to(file[name].dtype)), name
    assert torch.equal(file["tied.weight"], file["head.weight"])
    assert not torch.equal(file["head.weight"], made.head.weight.to(one.dtype))
    assert torch.equal(file["again.weight"], file["backbone.0.weight"])
    trained = server.schema.unflatten(server.state.x)
    np.testing.assert_array_equal(file["out.weight"].numpy(), trained["out.weight"])
    np.testing.assert_array_equal(
        file["narrow"].float().numpy(), torch.tensor(trained["narrow"]).bfloat16().float()
    )
    counted = file["norm.num_batches_tracked"]
    assert (counted.shape, counted.item()) == ((), 4 if buffers == "average" else 0)
    x = data("ant")[0].to(one.dtype)
    one._load(
        server.state.x,
        {name: server.untrained[name] for name, *_ in server.schema.buffers} | server.state.buffers,
    )
    with torch.no_grad():
        difference = (fresh.eval()(x) - one.module.eval()(x)).abs().max()
    assert difference < 0.05  # bfloat16 keeps 8 bits of `narrow` and `brief`


def test_bfloat16_is_rounded_as_torch_rounds():
    from fedscaffold.state.safetensors_io import bfloat16

    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32) * 10.0 ** np.arange(
        -20, 20
    ).repeat(250)
    values = np.concatenate([values, [0.0, -0.0, 1.00390625, 1.01171875, 3.3e38, 1e-40]]).astype(
        np.float32
    )
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().tobytes()
    assert bfloat16(values).tobytes() == theirs


def test_a_site_with_another_backbone_is_refused_by_name(folder):
    settings = config()
    one = TorchLearner(Net, loss, data)
    other = TorchLearner(lambda: Net(scale=1.0 + 2.0**-23), loss, data)
    assert one.schema.digest == TorchLearner(Net, loss, data).schema.digest != other.schema.digest
    server = Server(settings, one.schema, one.start, folder, buffers=one.buffers)
    server.hello("ant", greeting(one, settings, "ant"))
    with pytest.raises(
        Refused, match=r"^config: .*bee.*: backbone\.2\.weight; load them from the same file"
    ) as refusal:
        server.hello("bee", greeting(other, settings, "bee"))
    assert "\n" not in str(refusal.value)
    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert [
        (e["site"], "backbone.2.weight" in e["reason"]) for e in lines if e["event"] == "refused"
    ] == [("bee", True)]
    request = server.open(SITES)["ant"]
    assert (
        answer(request, other, settings, "ant", folder).facts["kind"] == "refusal"
    )  # nor is it trained there


@pytest.mark.parametrize("bytes_", [b"", b"\0" * 15, b"\0" * 10_000])
def test_a_greeting_with_strange_fingerprints_is_refused_all_the_same(bytes_, folder):
    settings, one = config(), TorchLearner(Net, loss, data)
    server = Server(settings, one.schema, one.start, folder, buffers=one.buffers)
    packet = greeting(one, settings, "ant")
    packet.facts["schema"] = "another"
    packet.blobs["frozen"] = blob(np.frombuffer(bytes_, np.uint8))
    with pytest.raises(Refused, match="its schema differ"):
        server.hello("ant", packet)


def test_another_start_or_other_running_means_are_no_reason_to_refuse():
    def seeded():
        net = Net()
        with torch.no_grad():
            net.out.weight.add_(1.0)
            net.norm.running_mean.add_(1.0)
        return net

    assert (
        TorchLearner(Net, loss, data).schema.digest
        == TorchLearner(seeded, loss, data).schema.digest
    )


def test_a_frozen_parameter_that_moves_is_refused():
    def meddling(module, batch):
        module.backbone[0].weight.data.add_(1.0)
        return loss(module, batch)

    from fedscaffold.algorithms import fedavg
    from fedscaffold.deploy.client import Work

    one = TorchLearner(Net, meddling, data)
    with pytest.raises(InputError, match=r"frozen parameter 'backbone\.0\.weight' was changed"):
        one.site("ant").train(Work(one.start, None, fedavg(), config().local, 0, one.buffers))


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"not": "a tensor"}

    def set_extra_state(self, state):
        pass


def sharing():
    pair = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    pair[1].weight.data = pair[0].weight.data
    return pair


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: torch.nn.LazyLinear(3), "has no shape yet"),
        (lambda: torch.nn.Linear(2, 2, dtype=torch.complex64), "is complex"),
        (lambda: Extra(2, 2), "_extra_state"),
        (sharing, "'1.weight' shares the memory of '0.weight'"),
        (lambda: torch.nn.Linear(2, 2).requires_grad_(False), "no trained arrays"),
    ],
)
def test_a_module_that_cannot_be_kept_is_refused(model, said):
    with pytest.raises(InputError, match=said) as refusal:
        TorchLearner(model, loss, data)
    assert "\n" not in str(refusal.value)


def test_a_server_without_the_frozen_arrays_is_refused(folder):
    one = TorchLearner(Net, loss, data)
    with pytest.raises(InputError, match=r"buffers=learner\.buffers"):
        Server(config(), one.schema, one.start, folder)
