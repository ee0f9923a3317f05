"""Example apps for `deploy new`, in torch or JAX: heart disease at four hospitals, or digits."""

from __future__ import annotations

from pathlib import Path

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.deploy.apps import APP, TOML

__all__ = ["write_example"]

SETTINGS = """\
# The simulator's keys, and [deploy] beside them. Every key: fedscaffold docs/deploy.md
format = 1
seed = 0
rounds = 5
weights = "records"        # a hospital weighs as much as it has patients; or "equal"
precision = "float32"

[algorithm]
name = "scaffold"          # or fedavg, fedprox ...

[local]
epochs = 2
batch_size = 32
lr = 0.05

[cohort]
size = 1.0                 # a share, or a number of sites, in each round

[deploy]
sites = ["cleveland", "hungarian", "switzerland", "va"]
state = "server"           # who keeps the control variates: the server, or each "client" in a file
deadline = 120.0           # seconds a round may take
quorum = 0.5               # share of the cohort without which a round does not count

# Differential privacy of single patients (docs/privacy.md, "At sites"): with it take local.steps
# instead of epochs, and write down public numbers of records.
# [privacy]
# clip = 1.0
# noise = 1.1
# delta = 1e-5
# stop_at_epsilon = 8.0
# [deploy.records]
# cleveland = 200
"""

HEAD = '''\
"""One file for the whole federation: the model, the loss, the data of a site.

The same file runs everywhere.
"""

from functools import cache

{imports}
SITES = ["cleveland", "hungarian", "switzerland", "va"]


@cache
def records(site, test=False):
    """The site's own records: (features, labels). Put your own reading of local files here.

    Heart disease (UCI) where FEDSCAFFOLD_DATA names a folder with it; else digits, with other
    labels at each site.
    """
    from fedscaffold import data

    try:
        whole = data.load("heart")
        train = [(x, y) for x, y in data.federate(whole, "natural").clients]
    except FileNotFoundError:
        whole = data.load("digits")
        train = data.federate(whole, "similarity:0.1", len(SITES), seed=0).clients
    if test:
        return whole.x_test.astype(np.float32), whole.y_test.astype(np.int64)
    x, y = train[SITES.index(site)]
    return x.astype(np.float32), y.astype(np.int64)
'''

TORCH_IMPORTS = """\
import numpy as np
import torch
from torch import nn

from fedscaffold.deploy import TorchLearner
"""

TORCH = '''\
def model():
    x, y = records(SITES[0], test=True)
    classes = int(y.max()) + 1
    return nn.Sequential(nn.Linear(x.shape[1], 16), nn.ReLU(), nn.Linear(16, classes))


def loss(module, batch):
    x, y = batch
    return nn.functional.cross_entropy(module(x), y)


def metrics(module, batch):
    x, y = batch
    return {"accuracy": (module(x).argmax(dim=1) == y).float().mean().item()}


def tensors(site, test=False):
    x, y = records(site, test)
    return torch.from_numpy(x), torch.from_numpy(y)


def learner(settings):
    return TorchLearner(
        model,
        loss,
        tensors,
        metrics=metrics,
        test=lambda site: tensors(site, test=True),
        precision=settings.precision,
    )


def problem():
    """The same model, loss and data for fs.simulate(fs.scaffold(), problem(), ...)."""
    import fedscaffold as fs

    sites = [tensors(site) for site in SITES]
    return fs.problems.torch(model, loss, sites, test=tensors(SITES[0], test=True), metrics=metrics)
'''

JAX_IMPORTS = """\
import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.deploy import JaxLearner
"""

JAX = """\
def params():
    x, y = records(SITES[0], test=True)
    return {"w": np.zeros((x.shape[1], int(y.max()) + 1)), "b": np.zeros(int(y.max()) + 1)}


def loss(params, batch):
    x, y = batch
    scores = jax.nn.log_softmax(x @ params["w"] + params["b"])
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


def accuracy(params, batch):
    x, y = batch
    return jnp.mean(jnp.argmax(x @ params["w"] + params["b"], axis=1) == y)


def learner(settings):
    test = {"accuracy": accuracy}
    return JaxLearner(
        loss,
        params(),
        records,
        metrics=test,
        test=lambda site: records(site, test=True),
        precision=settings.precision,
    )
"""

TEST = '''\
"""The app works: run it with pytest before you deploy it."""

from pathlib import Path

from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.apps import open_app


def test_the_federation_learns(tmp_path):
    settings, learner = open_app(Path(__file__).parent)
    server = Server(settings, learner.schema, learner.start, tmp_path, buffers=learner.buffers)
    summary = drive(server, InProcess(learner, settings, tmp_path), rounds=5)
    assert server.fault is None  # c is the mean of the c_i, up to rounding
    assert summary.metrics["accuracy"] > 0.6
'''


def write_example(folder: Path, kind: str) -> list[Path]:
    """Write app.py, federation.toml and test_app.py to a new folder; return their paths."""
    checks.choice("kind of app", kind, ("jax", "torch"))
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    imports, body = (TORCH_IMPORTS, TORCH) if kind == "torch" else (JAX_IMPORTS, JAX)
    app = f"{HEAD.format(imports=imports)}\n\n{body}"
    texts = {APP: app, TOML: SETTINGS, "test_app.py": TEST}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
