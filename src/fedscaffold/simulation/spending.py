"""What the rounds of a private run cost: epsilon by round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.privacy.accounting import capacity
from fedscaffold.privacy.budget import Budget, Spent
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.ledger import Ledger
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.sampling import Drawer, Streams, draw_local_steps

__all__ = ["Account", "budget_of", "open_account", "within_budget"]

LEDGER = "privacy.ledger"


def budget_of(config: RunConfig, drawer: Drawer) -> Budget | None:
    """Return the budget of a run; None if it is not private."""
    if config.privacy is None:
        return None
    streams, clients = Streams(config.seed), len(drawer.counts)
    rates, overflows = np.ones(clients), np.zeros(clients)
    if isinstance(config.privacy, Clients):  # a round is one step of each client that attends it

        def came(round: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            cohort = drawer.cohort(streams, round)
            return cohort, np.ones(len(cohort), np.int64)

        return Budget(config.privacy, rates, overflows, came)
    if drawer.rates is not None:
        rates = drawer.rates
        pairs = zip(drawer.counts.tolist(), rates.tolist(), strict=True)
        overflows = np.array([capacity(*pair)[1] for pair in pairs])

    def attended(round: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        cohort = drawer.cohort(streams, round)
        if drawer.mean_steps is None:
            return cohort, drawer.steps[cohort]
        return cohort, np.full(len(cohort), draw_local_steps(streams, round, drawer.mean_steps))

    return Budget(config.privacy, rates, overflows, attended)


class Account(NamedTuple):
    """The account of a run in the ledger of its folder."""

    ledger: Ledger
    run: str
    budget: Budget
    """The run's budget, after what all other runs have spent."""

    def charge(self, rounds: int) -> None:
        """Charge the run with its first rounds, before they are run."""
        if rounds > self.ledger.rounds(self.run):
            self.ledger.charge(self.run, rounds=rounds, steps=self.budget.steps(rounds))

    def spent(self, rounds: int) -> Spent:
        """Return what the run has spent: its first rounds, and others that it was charged with."""
        paid = max(rounds, self.ledger.rounds(self.run))
        return self.budget.spent(paid)._replace(ledger=True)


def within_budget(config: RunConfig, budget: Budget, account: Account | None) -> RunConfig:
    """Return a config with as many rounds as the budget allows.

    Raises:
        InputError: It allows none, or less than has been spent.
    """
    if budget.privacy.stop_at_epsilon is None:
        return config
    budget.refuse(0 if account is None else account.ledger.rounds(account.run))
    return replace(config, rounds=budget.limit(config.rounds))


def open_account(folder: Path, budget: Budget, identity: Mapping[str, Any]) -> Account:
    """Open the ledger of a checkpoint folder, and enter a run.

    Args:
        folder: The folder, held by this process.
        budget: The run's budget without earlier runs.
        identity: Everything the run's results depend on.
    """
    of_data = ("problem.records", "problem.counts")
    records = {name: fact for name, fact in identity.items() if name.startswith(of_data)}
    ledger = Ledger(folder / LEDGER, _digest(records), len(budget.rates))
    run = _digest(dict(identity))
    asked = budget.privacy
    ledger.begin(run, unit=asked.unit, seed=identity["seed"], noise=asked.noise, rates=budget.rates)
    ledger.refuse_others(run, budget.steps(ledger.rounds(run)))
    return Account(ledger, run, budget.after(ledger.charged(without=run)))


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
