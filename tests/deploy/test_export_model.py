"""Exports of a trained model: each is loaded again by its own library, and gives the module's outputs."""

import copy
import importlib.util
import json
import sys

import numpy as np
import pytest

from fedscaffold import InputError, cli
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.export_model import export_model

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

APP = '''
import torch
from torch import nn
from fedscaffold.deploy import TorchLearner


class Network(nn.Module):
    """Batch normalisation, dropout, a frozen layer, and a weight kept in half precision."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 6).requires_grad_(False)
        self.norm, self.drop, self.out = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x, *, bias):
        return self.out(self.drop(torch.relu(self.norm(self.frozen(x))))) * self.scale + bias


def loss(network, batch):
    return nn.functional.cross_entropy(network(batch["x"], bias=batch["bias"]), batch["y"])


def data(site):
    if HIDDEN:
        raise FileNotFoundError("records.csv")
    source = torch.Generator().manual_seed(len(site))
    x = 3 + 2 * torch.randn(12, 5, generator=source)
    return {"x": x, "bias": torch.ones(12, 3), "y": x.argmax(dim=1) % 3}


def example():
    return {"x": torch.ones(4, 5), "bias": torch.zeros(4, 3), "y": torch.zeros(4, dtype=int)}


def learner(settings):
    return TorchLearner(Network, loss, data, precision=settings.precision, example=EXAMPLE)
'''
TOML = """
rounds = 2
[local]
steps = 3
batch_size = 6
lr = 0.1
buffers = "average"
[deploy]
sites = ["ant", "bees"]
wait = 0
"""


def write_app(folder, hidden=False, example="None"):
    folder.mkdir(exist_ok=True)
    text = APP.replace("HIDDEN", str(hidden)).replace("EXAMPLE", example)
    (folder / "app.py").write_text(text, encoding="utf-8")
    (folder / "federation.toml").write_text(TOML, encoding="utf-8")
    return folder


def call(capsys, *words):
    """What a command of `deploy` prints as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedscaffold", "deploy", *map(str, words), "--json"])
        with pytest.raises(SystemExit) as end:
            cli.main()
    said = capsys.readouterr()
    return end.value.code, json.loads(said.out) if said.out else said.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An app and the folder of its run, and the module with the run's model in use."""
    from fedscaffold.deploy import InProcess, Server, drive

    folder = tmp_path_factory.mktemp("export")
    app, run = write_app(folder / "app"), folder / "run"
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, run, buffers=learner.buffers)
    summary = drive(server, InProcess(learner, settings, run), 2)
    (run / "deployment.json").write_text(json.dumps({"app": str(app), "engine": "in-process"}))
    network = type(learner.module)()
    network.load_state_dict(load_file(summary.model))
    return app, run, network.float().eval()


def inputs(rows):
    source = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 5, generator=source), torch.randn(rows, 3, generator=source)


def outputs(network, rows):
    x, bias = inputs(rows)
    with torch.no_grad():
        return network(x, bias=bias).numpy()


def test_the_module_is_another_in_training(trained):
    """The control: its running means moved, and with dropout or batch statistics it has other outputs."""
    network = trained[2]
    assert network.norm.running_mean.abs().max() > 0.1
    training = copy.deepcopy(network).train()
    assert not np.allclose(outputs(training, 5), outputs(network, 5), atol=1e-2)


def test_safetensors_are_those_of_the_run(trained, tmp_path, capsys):
    _, run, network = trained
    code, said = call(capsys, "export", run, "--out", tmp_path / "m.safetensors")
    assert (code, said["round"], said["format"]) == (0, 2, "safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert load_file(tmp_path / "m.safetensors").keys() == network.state_dict().keys()


@pytest.mark.slow
def test_torch_export_is_loaded_without_the_app(trained, tmp_path, capsys):
    _, run, network = trained
    code, said = call(capsys, "export", run, "--out", tmp_path / "m.pt2")
    assert code == 0
    assert said["any_batch"]
    assert said["difference"] < 1e-6
    again = torch.export.load(tmp_path / "m.pt2").module()
    for rows in (2, 7):
        x, bias = inputs(rows)
        found = again(x, bias=bias).detach().numpy()
        np.testing.assert_allclose(found, outputs(network, rows), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnx_has_the_outputs_of_the_module(trained, tmp_path, capsys):
    pytest.importorskip("onnxscript", reason="needs onnx: pip install 'fedscaffold[onnx]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to load it again")
    _, run, network = trained
    code, said = call(capsys, "export", run, "--out", tmp_path / "m.onnx")
    assert (code, said["any_batch"]) == (0, True)
    assert said["difference"] < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    for rows in (1, 2, 7):
        given = dict(zip(names, (value.numpy() for value in inputs(rows)), strict=True))
        (found,) = session.run(None, given)
        np.testing.assert_allclose(found, outputs(network, rows), rtol=0, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.slow
def test_mlflow_loads_its_model(trained, tmp_path, capsys):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    pytest.importorskip("onnxscript", reason="needs onnx")
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    _, run, network = trained
    code, said = call(capsys, "export", run, "--out", tmp_path / "model")
    assert (code, said["format"]) == (0, "mlflow")
    again = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    x, bias = inputs(4)
    found = again.predict({"x": x.numpy(), "bias": bias.numpy()})
    (found,) = found.values()
    np.testing.assert_allclose(found, outputs(network, 4), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_server_without_records_takes_the_apps_example(trained, tmp_path):
    run = trained[1]
    settings, learner = open_app(write_app(tmp_path / "app", hidden=True))
    with pytest.raises(InputError, match=r"ant: FileNotFoundError.*example=") as error:
        export_model(run, settings, learner, tmp_path / "m.pt2")
    assert "\n" not in str(error.value)
    settings, learner = open_app(write_app(tmp_path / "app", hidden=True, example="example"))
    assert export_model(run, settings, learner, tmp_path / "m.pt2").difference < 1e-6


def test_what_cannot_be_exported_is_said_in_a_line(trained, tmp_path, capsys, monkeypatch):
    app, run, _ = trained
    settings, learner = open_app(app)
    (tmp_path / "there.pt2").write_text("")
    missing = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnx" else missing(name)
    )
    for home, name, why in (
        (run, "m.pkl", "must end in"),
        (run, "there.pt2", "exists"),
        (tmp_path, "m.pt2", "holds no model"),
        (run, "m.onnx", "onnx needs onnx"),
    ):
        with pytest.raises(InputError, match=why) as error:
            export_model(home, settings, learner, tmp_path / name)
        assert "\n" not in str(error.value)
    del learner.module
    with pytest.raises(InputError, match="for torch modules"):
        export_model(run, settings, learner, tmp_path / "m.pt2")
    (tmp_path / "empty").mkdir()
    code, said = call(capsys, "export", tmp_path / "empty")
    assert code != 0
    assert "--app" in said
