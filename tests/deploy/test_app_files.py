"""What lies beside app.py is part of the app: imported, shipped, compared, and seen by no other app."""

import io
import json
import os
import sys
import zipfile

import numpy as np
import pytest

from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Refused, Server, drive
from fedscaffold.deploy import app_files as files
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.client import answer, greeting

APP = """
from pathlib import Path

import numpy as np

import mynet
import parts.deep.layer as layer
from mynet import centre
from parts import scale
from parts.deep.layer import HERE
from fedscaffold.deploy import ArraysLearner

START = np.load(Path(__file__).parent / "weights.npy")


def data(site):
    from lazily import records

    return records(site)


def gradient(params, batch):
    return {"w": scale() * (params["w"] - batch[0].mean(axis=0))}


def learner(settings):
    assert mynet.centre is centre and layer.HERE == HERE == "deep"
    return ArraysLearner(gradient, {"w": START}, data, precision=settings.precision)
"""
TOML = """
seed = 5
rounds = 3
precision = "float64"
[local]
steps = 3
lr = 0.2
[deploy]
sites = ["north", "south"]
wait = 0
"""


def write_app(folder, centre=1.0, toml=TOML):
    (folder / "parts" / "deep").mkdir(parents=True)
    texts = {
        "app.py": APP,
        "federation.toml": toml,
        "mynet.py": f"def centre():\n    return {centre}\n",
        "lazily.py": "import numpy as np\nfrom mynet import centre\n\n\n"
        "def records(site):\n    return (np.full((2, 2), centre()),)\n",
        "parts/__init__.py": "from .deep import half\n\n\ndef scale():\n    return 2 * half\n",
        "parts/deep/__init__.py": "half = 0.5\n",
        "parts/deep/layer.py": "from . import half\n\nHERE = 'deep' if half == 0.5 else ''\n",
    }
    for path, text in texts.items():
        (folder / path).write_text(text)
    np.save(folder / "weights.npy", np.array([3.0, -2.0]))
    return folder


def trained(app, folder):
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, folder)
    drive(server, InProcess(learner, settings, folder), settings.rounds)
    return server.state.x


def exact(centre):
    """Every site has the same quadratic, so SCAFFOLD is gradient descent."""
    return centre + (np.array([3.0, -2.0]) - centre) * 0.8**9


def test_modules_packages_and_files_beside_an_app_are_its_own(tmp_path):
    """Two apps with a sibling of the same name, opened together, imported lazily in turns."""
    path, before = list(sys.path), set(sys.modules)
    one, two = write_app(tmp_path / "one", 1.0), write_app(tmp_path / "two", -4.0)
    opened = [open_app(app) for app in (one, two)]
    found = []
    for i in (1, 0, 1):
        settings, learner = opened[i]
        server = Server(settings, learner.schema, learner.start, tmp_path / f"run{len(found)}")
        drive(server, InProcess(learner, settings, tmp_path / f"run{len(found)}"), settings.rounds)
        found.append(server.state.x)
    for x, centre in zip(found, (-4.0, 1.0, -4.0), strict=True):
        np.testing.assert_allclose(x, exact(centre), rtol=0, atol=1e-12)
    assert sys.path == path
    new = {name for name in set(sys.modules) - before if "mynet" in name or "parts" in name}
    assert all(name.startswith("fedscaffold_app_") for name in new)
    with pytest.raises(ModuleNotFoundError):
        __import__("mynet")


def test_an_app_opened_again_is_read_again(tmp_path):
    app = write_app(tmp_path / "app", 1.0)
    trained(app, tmp_path / "first")
    (app / "mynet.py").write_text("def centre():\n    return -4.5\n")
    os.utime(app / "mynet.py", (1e9, 1e9))  # not the time that the compiled file remembers
    np.testing.assert_allclose(trained(app, tmp_path / "second"), exact(-4.5), rtol=0, atol=1e-12)


def test_an_error_in_a_sibling_names_its_file(tmp_path):
    app = write_app(tmp_path / "app")
    (app / "mynet.py").write_text("\n\nraise ValueError('no weights')\n")
    with pytest.raises(InputError, match=r"ValueError in line 3 of mynet\.py: no weights"):
        open_app(app)
    (app / "mynet.py").write_text("def centre(:\n")
    with pytest.raises(InputError, match=r"SyntaxError in line 1 of mynet\.py"):
        open_app(app)


@pytest.mark.parametrize("change", ["mynet.py", "weights.npy", "more.txt", "parts/deep/layer.py"])
def test_a_site_with_another_file_is_told_which(change, tmp_path):
    one, two = write_app(tmp_path / "one"), write_app(tmp_path / "two")
    if change == "weights.npy":
        np.save(two / change, np.array([3.0, -2.5]))
    else:
        with (two / change).open("a") as file:
            file.write("\n")
    settings, learner = open_app(one)
    other, theirs = open_app(two)
    server = Server(settings, learner.schema, learner.start, tmp_path / "run")
    server.hello("north", greeting(learner, settings, "north"))
    said = "files that the server's has not" if change == "more.txt" else f"server's: {change}"
    with pytest.raises(Refused, match=said):
        server.hello("south", greeting(theirs, other, "south"))
    assert change == "more.txt" or change in server.missed["south"]["sentence"]
    request = server.open(["north"])["north"]
    reply = answer(request, theirs, other, "north", tmp_path / "sites")
    assert "the app here differ" in reply.facts["reason"]


def test_what_is_no_part_of_the_app_is_left_out(tmp_path):
    app = write_app(tmp_path / "app", toml=TOML + 'exclude = ["data", "*.csv"]\n')
    before = open_app(app)[0].app
    for path in (
        "data/patients.txt", "notes.csv", "deep/er.csv", ".git/config", "test_app.py",
        "__pycache__/app.pyc", "run/deployment.json", "run/state/x", "runs/latest/run.json", "venv/pyvenv.cfg",
        "venv/lib/torch.py", "kits/authority/ca.crt", "kits/authority/ca.key", "pyproject.toml",
    ):  # fmt: skip
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).write_text("x")
    assert open_app(app)[0].app == before
    assert set(before) == {
        "app.py", "lazily.py", "mynet.py", "parts/__init__.py", "parts/deep/__init__.py",
        "parts/deep/layer.py", "weights.npy",
    }  # fmt: skip


def test_an_app_beside_much_data_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST", 10_000)
    app = write_app(tmp_path / "app")
    (app / "scans.bin").write_bytes(bytes(20_000))
    with pytest.raises(InputError, match=r"scans\.bin the largest.*deploy\.exclude"):
        open_app(app)
    (app / "federation.toml").write_text(TOML + 'exclude = ["scans.bin"]\n')
    assert "scans.bin" not in open_app(app)[0].app


def test_a_package_is_the_app(tmp_path):
    app = write_app(tmp_path / "app")
    assert files.pack_app(app, tmp_path / "package") == []
    assert {path.name for path in (tmp_path / "package").iterdir()} == {
        "bundle.json", "federation.toml", "pyproject.toml",
    }  # fmt: skip
    place = files.unpack_app(tmp_path / "package", tmp_path / "site", None)
    assert open_app(place)[0] == open_app(app)[0]
    assert place == files.unpack_app(tmp_path / "package", tmp_path / "site", None)
    np.testing.assert_allclose(trained(place, tmp_path / "run"), exact(1.0), rtol=0, atol=1e-12)


def test_a_file_that_does_not_fit_comes_from_the_sites_copy(tmp_path, monkeypatch):
    app = write_app(tmp_path / "app")
    np.save(app / "weights.npy", np.random.default_rng(0).normal(size=(400, 2)))
    monkeypatch.setattr(files, "ROOM", 6000)
    assert files.pack_app(app, tmp_path / "package") == ["weights.npy"]
    for beside, said in ((None, "no copy is here"), (write_app(tmp_path / "old"), "another file")):
        with pytest.raises(InputError, match=f"weights.npy of the app is too large.*{said}"):
            files.unpack_app(tmp_path / "package", tmp_path / "site", beside)
    files.copy_app(app, tmp_path / "copy")
    place = files.unpack_app(tmp_path / "package", tmp_path / "site", tmp_path / "copy")
    assert open_app(place)[0].app == open_app(app)[0].app == open_app(tmp_path / "copy")[0].app


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_flower_takes_the_package(tmp_path):
    """All that is in the package, and nothing else, is in what Flower builds of it."""
    pytest.importorskip("flwr")
    from flwr.cli.build import build_fab_from_files

    files.pack_app(write_app(tmp_path / "app"), tmp_path / "package")
    content = {path.name: path for path in (tmp_path / "package").iterdir()}
    built, _ = build_fab_from_files(content)
    with zipfile.ZipFile(io.BytesIO(built)) as package:
        assert set(content) <= set(package.namelist())
        rows = json.loads(package.read("bundle.json"))["files"]
    assert "weights.npy" in rows
