"""The judge beside somebody's code: NumPy alone, as a command, inside pytest, and around a torch training loop."""

import copy
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from fedscaffold.conformance import (
    Trace,
    Unsupported,
    conform,
    diagnose,
    judge,
    offers,
    select,
    table,
)
from fedscaffold.conformance.__main__ import main
from fedscaffold.conformance.torch_model import Quadratic, batch, loss, vector

ROOT = Path(__file__).parents[2]
ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {"numpy", "fedscaffold", "theirs"}:
            raise ModuleNotFoundError(f"{name} is not at hand", name=name)
sys.meta_path.insert(0, Refuse())
from fedscaffold.conformance.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def alone(*arguments, cwd=None):
    """The command in a process that has NumPy and nothing else."""
    return subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, cwd=cwd
    )


@pytest.mark.process
def test_the_command_needs_numpy_only(tmp_path):
    done = alone("--only", "mean: sampling", "--only", "moves: all", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["holds"], answer["fails"], answer["error"]) == (2, 0, 0)
    (tmp_path / "theirs.py").write_text(
        "from fedscaffold.algorithms import fedavg\nfrom fedscaffold.conformance import run\n"
        "def drifts(case):\n    return run(fedavg(case.server_lr), case)\n"
        "def breaks(case):\n    return undefined\n"
    )
    drifts = alone(
        "theirs:drifts", "--only", "optimum: all", "--precision", "float32", cwd=tmp_path
    )
    assert drifts.returncode == 1
    assert "fails        optimum: all" in drifts.stdout
    breaks = alone("theirs:breaks", "--only", "start", cwd=tmp_path)
    assert breaks.returncode == 2
    assert (
        f"NameError: name 'undefined' is not defined ({tmp_path / 'theirs.py'}:6)" in breaks.stdout
    )


@pytest.mark.parametrize(
    "arguments", [["theirs:nothing"], ["--only", "nothing"], ["nobody:adapter"], ["theirs"]]
)
def test_a_wrong_question_gets_one_line(arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "theirs.py").write_text("number = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    sys.modules.pop("theirs", None)


@pytest.mark.process
def test_rows_are_pytest_items(tmp_path):
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent("""
        from fedscaffold.conformance import ours, run, Unsupported
        from fedscaffold.algorithms import fedavg
        from fedscaffold.conformance.pytest_plugin import conformance

        def breaks(case):
            if case.momentum:
                raise Unsupported("momentum")
            raise KeyError("c")

        rows = ["mean: all", "optimum: all", "large batch: momentum"]
        test_right = conformance(ours, only=rows)
        test_drifts = conformance(lambda case: run(fedavg(), case), only=rows)
        test_breaks = conformance(breaks, only=rows)
        """)
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "test_theirs.py",
    ]
    bare = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=bare)
    assert "4 failed, 4 passed, 1 skipped" in done.stdout
    assert "PASSED test_theirs.py::test_right[mean: all]" in done.stdout
    assert "FAILED test_theirs.py::test_drifts[optimum: all]" in done.stdout
    assert "error: With all clients in every round" in done.stdout
    assert "KeyError" in done.stdout


class Client:
    """A SCAFFOLD client as one writes it in torch: any optimiser, c_i the mean of the gradients it saw."""

    def __init__(self, case, i):
        self.case, self.i, self.model = case, i, Quadratic(case)
        self.c_i = [torch.zeros_like(p) for p in self.model.parameters()]

    def train(self, server, c):
        case, model = (
            self.case,
            copy.deepcopy(server),
        )  # a copy asks, and is counted by, the same case
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=case.lr[0], momentum=case.momentum)
        total = [torch.zeros_like(p) for p in parameters]
        for k in range(case.local_steps[self.i]):
            optimizer.param_groups[0]["lr"] = case.lr[k]
            optimizer.zero_grad()
            loss(model(batch(self.i))).backward()
            for p in parameters:
                p.grad /= case.loss_scale
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, case.clip)
            for p, seen, server_c, own in zip(parameters, total, c, self.c_i, strict=True):
                seen += p.grad
                p.grad += server_c - own
            if case.clip_corrected is not None:
                torch.nn.utils.clip_grad_norm_(parameters, case.clip_corrected)
            optimizer.step()
        return model, [seen / case.local_steps[self.i] for seen in total]


@offers("tensors", "buffers", "clipping", "loss scaling")
def in_torch(case):
    if case.option == 1 or case.frozen:
        raise Unsupported("option I, frozen control variates")
    server, c = Quadratic(case), [torch.zeros_like(p) for p in Quadratic(case).parameters()]
    clients = [Client(case, i) for i in range(case.num_clients)]
    buffers = [vector(server.buffers())] if case.buffers is not None else None
    states = [(vector(server.parameters()), vector(c), [vector(client.c_i) for client in clients])]
    for r, cohort in enumerate(case.cohorts):
        trained = {
            i: clients[i].train(server, c) for i in cohort
        }  # those who are lost train as well
        heard = case.heard(r)
        share = sum(case.weights[i] for i in heard)
        with torch.no_grad():
            for k, p in enumerate(list(server.parameters()) if heard else []):
                moves = [case.weights[i] * (list(trained[i][0].parameters())[k] - p) for i in heard]
                p += case.server_lr * sum(moves) / share
                c[k] = c[k] + sum(
                    case.weights[i] * (trained[i][1][k] - clients[i].c_i[k]) for i in heard
                )
        for i in heard:
            clients[i].c_i = trained[i][1]
        if buffers is not None:
            server.statistics = (
                sum(case.weights[i] * trained[i][0].statistics for i in heard) / share
            )
            buffers.append(vector(server.buffers()))
        states.append(
            (vector(server.parameters()), vector(c), [vector(client.c_i) for client in clients])
        )
    return Trace(*map(np.array, zip(*states, strict=True)), buffers and np.array(buffers))


ROWS = [
    "mean: sampling",
    "mean: lost replies",
    "moves: together",
    "gradients seen: momentum",
    "golden",
    "start",
]
FEATURES = [
    "tensors",
    "buffers",
    "loss scaling",
    "clipping",
    "clipping corrected: moves",
    "clipping corrected: mean",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "rows"),
    [
        ("float64", ROWS + FEATURES),
        ("float32", ["golden", "tensors"]),
        pytest.param("float32", ROWS + FEATURES, marks=pytest.mark.soak),
    ],
)
def test_a_torch_loop_is_judged_through_its_model(precision, rows):
    judged = conform(in_torch, select(rows), precision)
    assert {verdict.outcome for verdict in judged} == {"holds"}, table(judged)
    assert len(judged) >= len(rows)


@pytest.mark.slow
def test_a_bug_in_a_torch_loop_is_named(monkeypatch):
    def forgetful(self, server, c):
        model, mean = train(self, server, c)
        return model, [one + own - own for one, own in zip(mean, self.c_i, strict=True)]

    train = Client.train
    monkeypatch.setattr(Client, "train", forgetful)
    assert diagnose(judge(in_torch, select(["mean: sampling"]))) == []
    # The correction is written to copies: `.grad` of a detached tensor is another tensor.
    monkeypatch.setattr(
        Client, "train", lambda self, server, c: train(self, server, [0 * one for one in c])
    )
    said = diagnose(judge(in_torch, select(["moves: all", "moves: sampling", "mean: sampling"])))
    assert said[0].startswith("the correction is 0 c -1 c_i, not c - c_i"), said
