"""Faults of privacy: a server that lies to private sites, budgets, replays and ledgers that are put back."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np

from fedscaffold.deploy.arrays_client import ArraysLearner, Batch, Params
from fedscaffold.deploy.schema import Blob, Packet
from fedscaffold.privacy.site_ledger import SiteLedger
from tests.faults.lab import SITES, Lab

__all__ = ["SCENARIOS"]

LIED_TO = SITES[0]
PRIVATE = """
[deploy.records]
ash = 4
birch = 4
cedar = 4
elm = 4
fir = 4
[privacy]
clip = 1.0
noise = 0.3
delta = 1e-3
stop_at_epsilon = 150.0
"""


class PrivateLab(Lab):
    """A federation of private sites."""

    def new_learner(self) -> ArraysLearner:
        """Return a learner that has the gradients of single records."""
        one = super().new_learner()

        def each(params: Params, batch: Batch) -> Params:
            rows = [
                one.gradient(params, tuple(a[i : i + 1] for a in batch))
                for i in range(len(batch[0]))
            ]
            return {name: np.stack([row[name] for row in rows]) for name in params}

        one.record_gradients = each
        return one

    def ledger(self, site: str) -> SiteLedger:
        """Return a site's ledger."""
        return SiteLedger(self.folder / "sites" / "privacy" / site / "privacy.ledger", site)


def overspent() -> bool:
    """Sites end the run at their own budget, replay what comes again, and refuse metrics, settings and old ledgers."""
    lab = PrivateLab(PRIVATE)
    lab.round()
    old = lab.folder / "old"
    shutil.copytree(lab.folder / "sites" / "privacy", old)
    requests = lab.server.open(set(SITES))
    request = requests[LIED_TO]
    first, again = (lab.reply(LIED_TO, request), lab.reply(LIED_TO, request))
    other = Packet(request.facts, {**request.blobs, "x": _moved(request.blobs["x"])})
    replayed = first.blobs == again.blobs and len(lab.ledger(LIED_TO).charges) == 2
    charged = (
        lab.reply(LIED_TO, other).blobs != first.blobs and len(lab.ledger(LIED_TO).charges) == 3
    )
    measured = lab.reply(LIED_TO, Packet({**request.facts, "evaluate": True}, request.blobs))
    refused = "not noised" in str(measured.facts.get("reason"))
    spent = ""
    for round in range(3, 60):
        asked = Packet({**request.facts, "round": round}, request.blobs)
        spent = str(lab.reply(LIED_TO, asked).facts.get("reason", ""))
        if spent:
            break
    kept = lab.ledger(LIED_TO).epsilon(1e-3) <= 150.0 and spent.startswith("budget")
    shutil.rmtree(lab.folder / "sites" / "privacy")
    old.rename(lab.folder / "sites" / "privacy")
    back = "charging its privacy ledger failed" in str(
        lab.reply(LIED_TO, request).facts.get("reason")
    )
    return replayed and charged and refused and kept and back


def _moved(held: Blob) -> Blob:
    return held._replace(data=(np.frombuffer(held.data) + 1e-9).tobytes())


SCENARIOS: dict[int, tuple[str, Callable[[], bool]]] = {
    27: ("a server that lies to private sites", overspent),
}
