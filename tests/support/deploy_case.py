"""A small federation for the tests of the deployment: quadratics whose optimum is known, on the real server and client."""

import os
import tempfile
from pathlib import Path

import numpy as np

from fedscaffold.deploy import ArraysLearner, InProcess, Server, drive, parse
from fedscaffold.deploy.client import answer, greeting

SITES = ("ant", "bee", "cow", "dog", "elk")
CURVATURE = {site: np.array([1.0 + 0.2 * i, 2.0 - 0.2 * i]) for i, site in enumerate(SITES)}
CENTRE = {site: np.array([float(i), 1.0 - i * i]) for i, site in enumerate(SITES)}
START = np.array([3.0, -2.0])
RECORDS = {site: 2 + i for i, site in enumerate(SITES)}
# (present, lost): sites that are asked, and those of them whose replies do not arrive
ROUNDS = (
    (SITES, ()),
    (SITES[:3], ()),
    (SITES, ("bee", "elk")),
    (SITES[1:], ("dog",)),
    (("ant", "dog"), ()),
    (SITES, ()),
    (SITES[2:], ("cow",)),
    (("ant", "bee", "elk"), ("ant",)),
    (SITES, ("ant",)),
)
RESTARTS = (
    1,
    3,
    7,
)  # rounds after which the server is started anew; windows are of 5, 3 and 2 rounds


def settings(
    extra="", deploy="", local="steps = 3\nlr = 0.2", algorithm="name = 'scaffold'", top=""
):
    sites = list(SITES)
    return parse(
        f"precision = 'float64'\nrounds = 30\n{top}\n[algorithm]\n{algorithm}\n[local]\n{local}\n"
        f"[deploy]\nsites = {sites}\nwait = 0\n{deploy}\n{extra}"
    )


def gradient(params, batch):
    """f_i(w) = sum a (w - b)^2 / 2 + noise: every record is (a, b + offset), and the offsets of a site sum to 0."""
    a, b = batch
    return {"w": (a * (params["w"] - b)).mean(axis=0)}


def loss(params, batch):
    a, b = batch
    return float((a * (params["w"] - b) ** 2).sum(axis=1).mean() / 2)


def data(site):
    n = RECORDS[site]
    offsets = np.linspace(-1, 1, n)[:, None] * np.array([0.3, -0.1])
    return np.tile(CURVATURE[site], (n, 1)), CENTRE[site] + offsets


def learner(precision="float64", gradient=gradient, data=data):
    return ArraysLearner(gradient, {"w": START}, data, loss=loss, precision=precision)


def optimum(p):
    """Minimiser of sum p_i f_i."""
    top = sum(p[s] * CURVATURE[s] * CENTRE[s] for s in p)
    return top / sum(p[s] * CURVATURE[s] for s in p)


def memory_folder():
    """A folder in memory where there is one: these tests are about order, not about disks."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))


def server_of(config, folder, **more):
    one = learner(config.precision)
    return Server(config, one.schema, one.start, folder, **more)


def run_quietly(config, folder, rounds=None, **more):
    """The whole run in this process, nothing going wrong; returns the server and its summary."""
    server = server_of(config, folder, **more)
    summary = drive(
        server, InProcess(learner(config.precision), config, folder), rounds or config.rounds
    )
    return server, summary


def everybody(server, config, sites=SITES):
    for site in sites:
        server.hello(site, greeting(learner(config.precision), config, site))


def deployed_server(config, folder):
    """The server after `ROUNDS`: the replies of lost sites are made, and do not arrive."""
    server = server_of(config, folder)
    everybody(server, config)
    for number, (present, lost) in enumerate(ROUNDS):
        if number in RESTARTS:
            server = server_of(config, folder)
        for site, request in server.open(present).items():
            reply = answer(request, learner(config.precision), config, site, folder / "sites")
            if site in lost:
                server.failed(site, "lost on the way")
            else:
                assert server.receive(site, reply).counted, site
        assert server.close().committed
    return server


def play(server, config, folder, present=SITES):
    """One quiet round."""
    requests = server.open(present)
    for site, request in requests.items():
        server.receive(
            site, answer(request, learner(config.precision), config, site, folder / "sites")
        )
    return server.close()


def open_to_others(folder):
    """Files and folders that others than their owner can open, but for what is public anyway."""
    return {
        str(path.relative_to(folder)): oct(path.stat().st_mode & 0o777)
        for path in [folder, *folder.rglob("*")]
        if path.stat().st_mode & 0o077 and path.suffix not in (".crt", ".pub", ".py", ".toml")
    }


def crash_after(monkeypatch, calls):
    """os.fsync, os.write and rename fail for good after so many calls: the machine loses power there."""
    left = [calls]

    class Crash(BaseException):
        pass

    def dying(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "write", "rename", "replace"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    return Crash
