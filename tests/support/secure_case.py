"""Secure sums of the small federation of `deploy_case`, exchange by exchange, with whatever goes wrong in between."""

import numpy as np
from deploy_case import SITES, answer, everybody, learner, server_of
from deploy_case import settings as plain_settings

from fedscaffold.deploy import client_state
from fedscaffold.deploy.aggregation import blank_memory, shares
from fedscaffold.deploy.schema import Packet, blob
from fedscaffold.deploy.secure_rules import provision
from fedscaffold.secure.transcript import EXCHANGES


def settings(deploy="", **more):
    return plain_settings(deploy=f"state = 'client'\nsecure = true\n{deploy}", **more)


class Case:
    """A server and its sites; `play` runs a round in which sites answer or not."""

    def __init__(self, folder, config=None, sites=SITES, **more):
        self.config, self.folder, self.more = config or settings(), folder, more
        provision(self.config, folder, folder / "sites")
        self.server = server_of(self.config, folder, **more)
        everybody(self.server, self.config, sites)
        self.seen = []
        """Every (site, exchange, request, reply)."""

    def restart(self):
        self.server = server_of(self.config, self.folder, **self.more)

    def ask(self, site, request, config=None):
        return answer(
            request,
            learner(self.config.precision),
            config or self.config,
            site,
            self.folder / "sites",
        )

    def exchange(self, requests, answers=lambda exchange, site: True, change=lambda *a: a[-1]):
        """One exchange: each site is asked, and its reply, changed by `change`, received if it `answers`."""
        for site, request in requests.items():
            step = request.facts["exchange"]
            if not answers(step, site):
                self.server.failed(site, "died")
                continue
            reply = change(step, site, self.ask(site, request))
            self.seen.append((site, step, request, reply))
            self.server.receive(site, reply)

    def play(
        self,
        present=SITES,
        answers=lambda exchange, site: True,
        change=lambda *a: a[-1],
        evaluate=False,
    ):
        requests = self.server.open(present, evaluate)
        while requests:
            self.exchange(requests, answers, change)
            requests = self.server.advance()
        return self.server.close()

    def play_until(self, exchange, present=SITES):
        """Open a round; return the requests of one of its exchanges."""
        requests = self.server.open(present)
        for step in EXCHANGES[: EXCHANGES.index(exchange)]:
            assert next(iter(requests.values())).facts["exchange"] == step
            self.exchange(requests)
            requests = self.server.advance()
        return requests

    def held(self, site):
        """The c_i that a site must hold, from its disk."""
        initial = blank_memory(self.server.algorithm, self.server.state.x)
        place = self.folder / "sites" / self.server.run / site
        return client_state.load_record(place, self.server.roster[site].digest, initial).c_i

    def gap(self):
        """|c - sum p_i c_i|, of what is on the disks."""
        p = shares(self.server.roster)
        return float(
            np.linalg.norm(self.server.state.server.c - sum(p[s] * self.held(s) for s in p))
        )


def with_blob(reply, name, array):
    return Packet(reply.facts, reply.blobs | {name: blob(array)})
