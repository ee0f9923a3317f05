"""Test bed for lies: the real server and ten clients in memory, two of which attack together."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from fedscaffold import attacks
from fedscaffold.deploy.aggregation import residual, shares
from fedscaffold.deploy.arrays_client import ArraysLearner, Batch, Params
from fedscaffold.deploy.client import answer, greeting
from fedscaffold.deploy.schema import Array, Packet, blob
from fedscaffold.deploy.server import Outcome, Server
from fedscaffold.deploy.settings import parse

__all__ = ["CENTRE", "CURVATURE", "LIARS", "SITES", "START", "Crowd"]

SITES = tuple(f"site{i}" for i in range(10))
LIARS = (3, 8)
START = np.array([3.0, -2.0, 1.0])
_random = np.random.default_rng(7)
CURVATURE = _random.uniform(0.8, 1.2, (10, 3))
CENTRE = np.array([1.0, 2.0, -1.0]) + 0.5 * _random.normal(size=(10, 3))
TOML = """
precision = "float64"
rounds = 60
{top}
[algorithm]
name = "scaffold"
option = {option}
[local]
steps = 3
lr = 0.3
[deploy]
sites = {sites}
quorum = 1.0
wait = 0
"""


class Crowd:
    """A federation of ten, of which LIARS send what an attack makes of their replies."""

    def __init__(self, robust: str | None, option: int = 2, folder: Path | None = None) -> None:
        top = "" if robust is None else f'robust = "{robust}"'
        self.settings = parse(TOML.format(top=top, option=option, sites=list(SITES)))
        self.folder = Path(tempfile.mkdtemp()) if folder is None else folder
        self.learner = ArraysLearner(_gradient, {"w": START}, _data, precision="float64")
        self.lives = 0
        self.server = self.reborn()
        for site in SITES:
            self.server.hello(site, greeting(self.learner, self.settings, site))

    def reborn(self) -> Server:
        """Restart the server from its files."""
        self.lives += 1
        schema, start = self.learner.schema, self.learner.start
        self.server = Server(
            self.settings, schema, start, self.folder, token=f"{self.folder.name}-{self.lives}"
        )
        return self.server

    def round(self, attack: attacks.Attack | None = None) -> Outcome:
        """Run one round; attackers know all replies of it."""
        requests = self.server.open(SITES)
        replies = {
            site: answer(request, self.learner, self.settings, site, self.folder / "sites")
            for site, request in requests.items()
        }
        if attack is not None:
            replies = _attacked(attack, replies)
        for site, reply in replies.items():
            self.server.receive(site, reply)
        return self.server.close()

    def rounds(self, number: int, attack: attacks.Attack | None = None) -> Crowd:
        """Run some rounds."""
        for _ in range(number):
            self.round(attack)
        return self

    @property
    def error(self) -> float:
        """Return the distance to the optimum of the honest, relative to that of the start."""
        honest = [i for i in range(10) if i not in LIARS]
        top, bottom = (CURVATURE * CENTRE)[honest].sum(axis=0), CURVATURE[honest].sum(axis=0)
        best = top / bottom
        return float(np.linalg.norm(self.server.state.x - best) / np.linalg.norm(START - best))

    @property
    def sound(self) -> bool:
        """Return whether c = sum p_i c_i at rounding."""
        return residual(self.server.algorithm, self.server.state) < 1e-12

    @property
    def lies(self) -> Array:
        """Return what the liars' c_i add to c."""
        p = shares(self.server.roster)
        held = self.server.state.memory
        parts = [p[SITES[i]] * held[SITES[i]].c_i for i in LIARS if SITES[i] in held]
        return np.sum(parts, axis=0) if parts else np.zeros(3)


def _attacked(attack: attacks.Attack, replies: dict[str, Packet]) -> dict[str, Packet]:
    """Return the replies of a round with those of the attackers replaced."""
    sites = list(replies)
    names = list(replies[sites[0]].blobs)
    vectors = {
        name: np.stack([np.frombuffer(replies[site].blobs[name].data) for site in sites])
        for name in names
    }
    bad = np.array([SITES.index(site) in attack.clients for site in sites])
    sent = attacks.apply(attack, vectors, "move", bad, np.ones(len(sites)), np)
    return {
        site: reply._replace(blobs={name: blob(sent[name][i]) for name in names})
        for i, (site, reply) in enumerate(replies.items())
    }


def _data(site: str) -> Batch:
    i = SITES.index(site)
    return np.tile(CURVATURE[i], (4, 1)), np.tile(CENTRE[i], (4, 1))


def _gradient(params: Params, batch: Batch) -> dict[str, Array]:
    a, b = batch
    gradient: Array = (a * (params["w"] - b)).mean(axis=0)
    return {"w": gradient}
