"""Test bed for faults: the real server and five clients in memory, on quadratics with a known optimum."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from fedscaffold.deploy.aggregation import blank_memory, residual, shares
from fedscaffold.deploy.arrays_client import ArraysLearner, Batch, Params
from fedscaffold.deploy.client import answer, greeting
from fedscaffold.deploy.client_state import load_record
from fedscaffold.deploy.schema import Array, Packet
from fedscaffold.deploy.server import Outcome, Server
from fedscaffold.deploy.settings import Settings, parse

__all__ = ["SITES", "Lab"]

SITES = ("ash", "birch", "cedar", "elm", "fir")
TOML = """
precision = "float64"
rounds = 60
[local]
steps = 2
lr = 0.4
[deploy]
sites = ["ash", "birch", "cedar", "elm", "fir"]
deadline = 10.0
quorum = 2
retries = 3
wait = 0
"""
# step sizes and curvatures with which errors of the model and of the c_i shrink about as fast, by 4 a round
CURVATURE = {site: np.array([1.3 + 0.1 * i, 1.7 - 0.1 * i]) for i, site in enumerate(SITES)}
CENTRE = {site: np.array([float(i), 1.0 - i * i]) for i, site in enumerate(SITES)}
ENOUGH = 20  # quiet rounds after which the error is at rounding level


class Lab:
    """A federation in a folder of its own, with a manual clock."""

    def __init__(
        self,
        extra: str = "",
        sites: Iterable[str] = SITES,
        folder: Path | None = None,
        top: str = "",
    ) -> None:
        self.toml = TOML + extra
        self.settings: Settings = parse(top + self.toml)
        self.folder = Path(tempfile.mkdtemp()) if folder is None else folder
        self.now, self.lives = 0.0, 0
        self.learner = self.new_learner()
        self.server = self.reborn()
        for site in sites:
            self.join(site)

    def new_learner(self) -> ArraysLearner:
        """Return a learner, as of a client that has just been started."""
        return ArraysLearner(_gradient, {"w": np.array([3.0, -2.0])}, _data, precision="float64")

    def reborn(self) -> Server:
        """Restart the server from its files."""
        self.lives += 1
        one = self.learner
        clock, token = self.clock, f"{self.folder.name}-life-{self.lives}"
        self.server = Server(
            self.settings, one.schema, one.start, self.folder, clock=clock, token=token
        )
        return self.server

    def clock(self) -> float:
        """Return the time of the manual clock."""
        return self.now

    def join(self, site: str) -> None:
        """Register a site."""
        self.server.hello(site, greeting(self.learner, self.settings, site))

    def reply(self, site: str, request: Packet) -> Packet:
        """Return the site's reply to a request."""
        return answer(request, self.learner, self.settings, site, self.folder / "sites")

    def round(
        self,
        lost: Callable[[str], bool] = lambda site: False,
        change: Callable[[str, Packet], Packet] = lambda site, reply: reply,
        reverse: bool = False,
    ) -> Outcome:
        """Run one round: replies of `lost` sites are computed and dropped, the others modified by `change` and received."""
        requests = self.server.open(SITES)
        for site in sorted(requests, reverse=reverse):
            reply = self.reply(site, requests[site])
            if lost(site):
                self.server.failed(site, "lost on the way")
            else:
                self.server.receive(site, change(site, reply))
        return self.server.close()

    def quiet(self, rounds: int = ENOUGH) -> Lab:
        """Run rounds without faults."""
        for _ in range(rounds):
            self.round()
        return self

    @property
    def error(self) -> float:
        """Return the relative distance to the minimiser of sum p_i f_i over the roster."""
        p = shares(self.server.roster)
        top, bottom = (
            sum(p[s] * CURVATURE[s] * v[s] for s in p)
            for v in (CENTRE, dict.fromkeys(SITES, np.ones(2)))
        )
        best = np.asarray(top) / np.asarray(bottom)
        return float(np.linalg.norm(self.server.state.x - best) / np.linalg.norm(best))

    @property
    def mismatch(self) -> float:
        """Return |c - sum p_i c_i|, from the server's state or the clients' files."""
        state = self.server.state
        if self.server.server_keeps:
            return residual(self.server.algorithm, state)
        files, zeros = (
            self.folder / "sites" / self.server.run,
            blank_memory(self.server.algorithm, state.x),
        )
        own = {
            site: load_record(files / site, member.digest, zeros)
            for site, member in state.roster.items()
        }
        return residual(self.server.algorithm, state._replace(memory=own))

    @property
    def well(self) -> bool:
        """Return whether the run ended at the optimum with c = sum p_i c_i."""
        return self.error < 1e-8 and self.mismatch < 1e-12

    def site_folder(self, site: str) -> Path:
        """Return the folder of a site's c_i."""
        return self.folder / "sites" / self.server.run / site


def _data(site: str) -> Batch:
    return np.tile(CURVATURE[site], (4, 1)), np.tile(CENTRE[site], (4, 1))


def _gradient(params: Params, batch: Batch) -> dict[str, Array]:
    a, b = batch
    gradient: Array = (a * (params["w"] - b)).mean(axis=0)
    return {"w": gradient}
