"""The ledger: what the records of clients have been charged with, on disk.

A ledger is a chain of lines (`chain`). A run is charged before its rounds are run: a line is
written and synced, and only then are the rounds computed. A crash can therefore leave rounds
charged that were not run, never the reverse. The charges stay when checkpoints are removed,
replaced by older ones, or of another run.

    {"kind": "ledger", "format": 1, "data": ..., "clients": N}
    {"kind": "run", "run": ..., "unit": "record", "seed": 0, "noise": 1.1, "rates": [...]}
    {"kind": "charge", "run": ..., "rounds": 12, "steps": [...]}

A charge holds the totals of its run. A run that is repeated with the same settings draws the same
noise and releases the same values, so its rounds are charged once; a run with another seed is
charged on top of all others. A run with other settings and the seed of another is refused: the two
draw the same noise, which cancels in the difference of what they release.

Where a line does not fit, nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedscaffold.privacy.accounting import Charge
from fedscaffold.privacy.chain import Chain, Head
from fedscaffold.state.files import StateError

__all__ = ["Head", "Ledger"]

FORMAT = 1
MOST_CLIENTS = 100_000  # a charge is a line with a number for each


class _Run:
    """What a run has been charged with."""

    def __init__(self, unit: str, seed: int, noise: float, rates: Sequence[float]) -> None:
        self.unit, self.seed, self.noise, self.rates = unit, seed, noise, list(rates)
        self.rounds, self.steps = 0, [0] * len(self.rates)


class Ledger(Chain):
    """The ledger of some clients' records. Its folder must be held by one process.

    Args:
        path: The file; created if missing.
        data: Digest of the records: a ledger of others is refused.
        clients: Number of clients.

    Raises:
        StateError: The file is damaged, or of other records.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "privacy.ledger")
    >>> ledger = Ledger(path, data="ab12", clients=2)
    >>> ledger.begin("first", unit="record", seed=0, noise=1.1, rates=[0.1, 0.2])
    >>> ledger.charge("first", rounds=3, steps=[15, 10])
    >>> Ledger(path, data="ab12", clients=2).charged(without="second")[0]
    (Charge(noise=1.1, rate=0.1, steps=15),)
    """

    def __init__(self, path: Path, data: str, clients: int) -> None:
        if clients > MOST_CLIENTS:
            raise StateError(
                f"a ledger holds up to {MOST_CLIENTS} clients, and there are {clients}"
            )
        self.data, self.clients = data, clients
        self._runs: dict[str, _Run] = {}
        super().__init__(path)
        if not self._hashes:
            self._append({"kind": "ledger", "format": FORMAT, "data": data, "clients": clients})

    def rounds(self, run: str) -> int:
        """Return how many rounds of a run have been charged."""
        return self._runs[run].rounds if run in self._runs else 0

    def refuse_others(self, run: str, steps: Iterable[int]) -> None:
        """Raise StateError unless the rounds of a run were charged to those who come in them."""
        if run in self._runs and self._runs[run].steps != [int(one) for one in steps]:
            self._fail("its rounds were charged to other clients than would come now")

    def charged(self, *, without: str) -> list[tuple[Charge, ...]]:
        """Return what each client's records have been charged with by all runs but one."""
        found: list[list[Charge]] = [[] for _ in range(self.clients)]
        for name, run in self._runs.items():
            for client, (rate, steps) in enumerate(zip(run.rates, run.steps, strict=True)):
                if steps and name != without:
                    found[client].append(Charge(run.noise, rate, steps))
        return [tuple(charges) for charges in found]

    def begin(
        self, run: str, *, unit: str, seed: int, noise: float, rates: Iterable[float]
    ) -> None:
        """Enter a run, if it is not there yet.

        Raises:
            StateError: Another run with this seed has been charged, or one that protects another
                unit: a run that protects records spends far more of a client's budget.
        """
        for name, other in self._runs.items():
            if other.unit != unit and other.rounds:
                self._fail(
                    f"it holds runs that protect single {other.unit}s, whose epsilon is not that "
                    f"of a {unit}; take another folder, and add up by hand"
                )
            if other.seed == seed and other.rounds and name != run:
                self._fail(
                    f"a run with other settings has drawn the noise of seed {seed}, which would "
                    "cancel in the difference of the two; take another seed"
                )
        if run not in self._runs:
            fact = {"kind": "run", "run": run, "unit": unit, "seed": int(seed)}
            listed = [float(rate) for rate in rates]
            self._append(fact | {"noise": float(noise), "rates": listed})

    def charge(self, run: str, *, rounds: int, steps: Iterable[int]) -> None:
        """Charge a run with its first rounds, durably, before they are run.

        Args:
            run: The run.
            rounds: Number of rounds, the earlier ones included.
            steps: Steps that each client takes in them.
        """
        if rounds > self._runs[run].rounds:
            listed = [int(one) for one in steps]
            self._append({"kind": "charge", "run": run, "rounds": int(rounds), "steps": listed})

    def _enter(self, fact: dict[str, Any], digest: str) -> None:
        kind = fact["kind"]
        if (kind == "ledger") != (not self._hashes):
            raise ValueError
        if kind == "ledger":
            if fact["format"] != FORMAT:
                self._fail(f"it has format {fact['format']}, and this version reads {FORMAT}")
            if (fact["data"], fact["clients"]) != (self.data, self.clients):
                self._fail("it is of other records; take another folder for these")
        elif kind == "run":
            if fact["run"] in self._runs:
                raise ValueError
            rates = self._one_each(fact["rates"])
            about = str(fact["unit"]), int(fact["seed"]), float(fact["noise"])
            self._runs[fact["run"]] = _Run(*about, rates)
        elif kind == "charge":
            run = self._runs[fact["run"]]
            if fact["rounds"] <= run.rounds:
                raise ValueError
            run.rounds, run.steps = int(fact["rounds"]), self._one_each(fact["steps"])
        else:
            raise ValueError

    def _one_each(self, values: Any) -> list[Any]:
        if len(values) != self.clients or any(value < 0 for value in values):
            raise ValueError
        return list(values)
