"""`deploy metrics`: the state of a server and of workers for Prometheus, read from their folder.

Their processes are not involved: what they write after each step is read anew for every scrape, so
that a server that died shows as one whose status grows old.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedscaffold.checks import InputError
from fedscaffold.deploy.host import read_host
from fedscaffold.deploy.processes import is_alive
from fedscaffold.deploy.worker import workers_of
from fedscaffold.parsing import record

__all__ = ["make_registry"]

PREFIX = "fedscaffold_"
ABOUT_THE_ROUND = {"round", "residual", "epsilon"}  # of the lines of metrics.jsonl


def make_registry(folder: Path) -> CollectorRegistry:
    """Return a registry of what the folder of a deployment says at each scrape.

    Args:
        folder: The `--out` folder of a deployment, `run` of a kit's server, or a site's folder.

    Raises:
        InputError: No server and no worker has run there.
    """
    home = next((one for one in (folder, folder / "server") if _status(one).is_file()), None)
    if home is None and not workers_of(folder):
        raise InputError(f"{folder} has no status.json: nothing was started there")
    registry = CollectorRegistry()
    if home is not None:
        registry.register(_FolderCollector(home))
    registry.register(_WorkersCollector(folder))
    return registry


class _WorkersCollector(Collector):
    """Collector of what the workers of sites have written.

    Args:
        folder: Folder of a site, or of a deployment on one machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        now, workers = time.time(), workers_of(self.folder)
        for name, text, value in (
            ("up", "Whether the worker runs.", lambda w: float(is_alive(w["pid"]))),
            ("busy", "Whether it is at work.", lambda w: float(w.get("busy_until") is not None)),
            ("requests", "Requests that workers here have answered.", lambda w: w["requests"]),
            ("starts", "Times that it was started.", lambda w: w["starts"]),
            ("silent_seconds", "Time since its last word.", lambda w: now - w["at"]),
            ("request_seconds", "Time that its last answer took.", lambda w: w.get("seconds")),
            ("peak_bytes", "Most memory that it has used.", lambda w: w.get("peak_bytes")),
        ):
            told = {site: value(worker) for site, worker in workers.items()}
            yield _by_site(
                f"worker_{name}", text, {site: v for site, v in told.items() if v is not None}
            )


class _FolderCollector(Collector):
    """Collector of the facts in a server's folder.

    Args:
        home: The folder with status.json.
    """

    def __init__(self, home: Path) -> None:
        self.home = home

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        now = record(_status(self.home), round=int, rounds=int, at=float, sites=dict)
        wall, sites = time.time(), now["sites"]
        yield _gauge("round", "Rounds that are committed.", now["round"])
        yield _gauge("rounds", "Rounds of the run.", now["rounds"])
        yield _gauge("attempt", "Tries of the round under way.", now.get("attempt"))
        yield _gauge("status_age_seconds", "Time since the server's last word.", wall - now["at"])
        yield _gauge("residual", "|c - sum p_i c_i|; rounding explains it.", now.get("residual"))
        yield _gauge("residual_explained", "What rounding explains.", now.get("explained"))
        phase = GaugeMetricFamily(f"{PREFIX}phase", "1 for what the server does.", labels=["phase"])
        phase.add_metric([str(now.get("phase"))], 1)
        yield phase
        seen = {site: facts.get("last_seen") for site, facts in sites.items()}
        yield _by_site(
            "site_silent_seconds",
            "Time since a site was heard.",
            {site: wall - at for site, at in seen.items() if at is not None},
        )
        waits = now.get("waiting_for", ())
        yield _by_site(
            "site_waited_for",
            "Whether the round waits for a site.",
            {site: float(site in waits) for site in sites},
        )
        absent = now.get("absent", ())
        yield _by_site("site_absent", "Sites that never joined.", dict.fromkeys(absent, 1.0))
        for name, of, text in (
            ("site_counted_round", "counted_in_round", "The last round in which a site counted."),
            ("site_share", "share", "Weight p_i of a site."),
            ("site_epsilon", "epsilon", "Privacy that a site's records have spent, by its word."),
        ):
            told = {site: facts.get(of) for site, facts in sites.items()}
            yield _by_site(name, text, {site: v for site, v in told.items() if v is not None})
        missed = {site: one.get("times") for site, one in now.get("missed", {}).items()}
        yield _by_site("site_missed_rounds", "Rounds in which a site did not count.", missed)
        host, opened = read_host(self.home), now.get("opened_at")
        open_for = None if opened is None else wall - opened
        yield _gauge("round_open_seconds", "Time that the round under way takes so far.", open_for)
        yield _gauge("disk_free_bytes", "Space for states.", host.disk_free)
        if host.certificate_days is not None:
            left = host.certificate_days
            yield _gauge("certificate_days", "Days that the server's certificate lasts.", left)
        yield from self._measured()

    def _measured(self) -> Iterator[Metric]:
        """Yield the metrics of the model that were measured last."""
        path = self.home / "metrics.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        last: dict[str, Any] = {}
        for line in lines[-2:]:
            with suppress(ValueError):  # the last line may be in the middle of being written
                last = json.loads(line)
        named = GaugeMetricFamily(
            f"{PREFIX}metric", "Metrics of the model, means over sites.", labels=["name"]
        )
        for name, value in last.items():
            if name not in ABOUT_THE_ROUND and isinstance(value, (int, float)):
                named.add_metric([name], value)
        yield named


def _status(home: Path) -> Path:
    return home / "status.json"


def _gauge(name: str, text: str, value: float | None) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text)
    if value is not None:
        gauge.add_metric([], value)
    return gauge


def _by_site(name: str, text: str, values: dict[str, Any]) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=["site"])
    for site, value in sorted(values.items()):
        gauge.add_metric([site], value)
    return gauge
