"""The budget of a run: the epsilon of each client by rounds, and how many rounds it allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.privacy.accounting import OVERFLOW, Charge, compose, describe_accountant, round_up
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.records import Records

__all__ = ["Budget", "Spent", "round_steps_up"]

Ints: TypeAlias = NDArray[np.int64]
Charges: TypeAlias = tuple[Charge, ...]
FINE = 128  # steps are rounded up by less than 1 / FINE
MOST_KINDS = 64  # kinds of clients for which a record asks the accountant, in a few seconds
MOST_LISTED = 1000  # clients that a record lists one by one
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Spent(NamedTuple):
    """What a run has spent."""

    def __repr__(self) -> str:
        return f"Spent(epsilon {round_up(self.epsilon)}, delta {self.delta:g})"

    epsilon: float
    """The largest epsilon of any client."""
    delta: float
    steps: Ints
    """(N,) steps that each client took."""
    rates: NDArray[np.float64]
    """(N,) sampling rates."""
    by_client: Callable[[], NDArray[np.float64]]
    """() -> the (N,) epsilons of all clients; takes the accountant a moment for each rate."""
    by_round: Callable[[], NDArray[np.float64]]
    """() -> the (rounds, N) epsilons of all clients after each round; takes the accountant a moment
    for each rate and number of steps."""
    kinds: int
    """Number of clients that differ in rate, steps or what they were charged with before."""
    accountant: str
    """Accountants and version."""
    settings: Records | Clients
    rounds: int
    """Number of rounds that are paid for."""
    before: float = 0.0
    """The largest epsilon that other runs had spent before; `epsilon` includes them."""
    ledger: bool = False
    """Whether it is entered on a ledger, beside what other runs have spent."""

    def to_pandas(self) -> Any:
        """Return the epsilons as a pandas DataFrame, one row per round and one column per client.

        >>> import fedscaffold as fs
        >>> problem = fs.problems.quadratic(num_clients=3, dim=2, mu=0.1)
        >>> private = fs.privacy.clients(clip=1.0, noise=5.0, delta=1e-5)
        >>> run = fs.simulate(
        ...     fs.scaffold(), problem, rounds=4, local_steps=2, lr=0.1, cohort=1, privacy=private
        ... )
        >>> run.privacy.to_pandas().shape
        (4, 3)
        """
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise InputError(
                "to_pandas() needs pandas: pip install pandas; by_round() has the same numbers"
            ) from None
        rounds = pd.RangeIndex(1, self.rounds + 1, name="round")
        return pd.DataFrame(self.by_round(), index=rounds).rename_axis(columns="client")

    def facts(self) -> dict[str, Any]:
        """Return what a run's record says of its privacy, as JSON.

        `quantiles` are the least, the quartiles and the largest of the clients' epsilons, and
        `by_client` lists them for up to 1000 clients; both are None if more than 64 clients differ.
        """
        asked = asdict(self.settings)
        every = self.by_client() if self.kinds <= MOST_KINDS else None
        return asked | {
            "unit": self.settings.unit,
            "epsilon": self.epsilon,
            "clients": len(self.rates),
            "by_client": None if every is None or len(every) > MOST_LISTED else every.tolist(),
            "quantiles": None if every is None else _quantiles(every),
            "before": self.before,
            "ledger": self.ledger,
            "rates": [float(self.rates.min()), float(self.rates.max())],
            "steps": [int(self.steps.min()), int(self.steps.max())],
            "rounds": self.rounds,
            "accountant": self.accountant,
        }


class Budget:
    """The steps that each client has taken, and their epsilon.

    A round is charged to the clients that attend it: each step that they take is a mechanism with
    the client's own sampling rate. Nothing is subtracted for the sampling of clients, as the server
    sees who takes part.

    Args:
        privacy: The settings.
        rates: (N,) sampling rates q_i.
        overflows: (N,) bounds on the probability that a batch exceeds its capacity.
        attended: (round, counted from 0) -> the clients of the round, and the steps of each.
        before: What the data of each client had been charged with before the first round; None for
            nothing.
    """

    def __init__(
        self,
        privacy: Records | Clients,
        rates: NDArray[np.float64],
        overflows: NDArray[np.float64],
        attended: Callable[[int], tuple[Ints, Ints]],
        before: list[Charges] | None = None,
    ) -> None:
        self.privacy, self.rates, self.overflows = privacy, rates, overflows
        self.attended = attended
        self.before: list[Charges] = [()] * len(rates) if before is None else before
        self.accountant = describe_accountant()  # without one nothing is trained
        self._taken = np.zeros(len(rates), np.int64)
        self._steps: tuple[int, Ints] = 0, self._taken.copy()
        self._column = [self.largest(self._taken)]
        self.epsilons(0, 1)  # nor if it has no number for the first round

    def steps(self, rounds: int) -> Ints:
        """Return the (N,) steps taken in the first rounds."""
        done, taken = self._steps if self._steps[0] <= rounds else (0, np.zeros_like(self._taken))
        taken = taken.copy()
        for round in range(done, rounds):
            clients, steps = self.attended(round)
            taken[clients] += steps
        self._steps = rounds, taken
        return taken.copy()

    def after(self, before: list[Charges]) -> Budget:
        """Return the budget of the same run on records that have been charged before."""
        return Budget(self.privacy, self.rates, self.overflows, self.attended, before)

    def epsilons(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the largest epsilon of any client after each of rounds start + 1 .. stop."""
        while len(self._column) <= stop:
            clients, steps = self.attended(len(self._column) - 1)
            self._taken[clients] += steps
            now = self.largest(self._taken, clients)
            self._column.append(max(self._column[-1], now))
        return np.array(self._column[start + 1 : stop + 1])

    def largest(self, taken: Ints, among: Iterable[Any] | None = None) -> float:
        """Return the largest epsilon of some clients.

        Epsilon grows with the rate and with the number of steps, so that of clients that were
        charged alike before only those count that none surpasses in both.
        """
        who = np.arange(len(taken)) if among is None else np.asarray(among, np.int64)
        most: dict[Charges, int] = {}
        found = 0.0
        for client in who[np.lexsort((-taken[who], -self.rates[who]))].tolist():
            before, steps = self.before[client], int(taken[client])
            if steps > most.get(before, -1):
                most[before] = steps
                found = max(found, self._epsilon(client, steps))
        return found

    def by_client(self, rounds: int) -> NDArray[np.float64]:
        """Return the (N,) epsilon of each client after some rounds."""
        return np.array([self._epsilon(i, n) for i, n in enumerate(self.steps(rounds).tolist())])

    def by_round(self, rounds: int) -> NDArray[np.float64]:
        """Return the (rounds, N) epsilons of all clients after each of the first rounds."""
        table = [self.by_client(round) for round in range(1, rounds + 1)]
        return np.array(table).reshape(rounds, len(self.rates))

    def spent(self, rounds: int) -> Spent:
        """Return what the first rounds cost."""
        steps = self.steps(rounds)
        kinds = set(zip(self.before, self.rates.tolist(), steps.tolist(), strict=True))
        return Spent(
            epsilon=float(self.epsilons(-1, rounds)[-1]),
            delta=self.privacy.delta,
            steps=steps,
            rates=self.rates,
            by_client=lambda: self.by_client(rounds),
            by_round=lambda: self.by_round(rounds),
            kinds=len(kinds),
            accountant=self.accountant,
            settings=self.privacy,
            rounds=rounds,
            before=float(self._column[0]),
        )

    def limit(self, rounds: int) -> int:
        """Return how many of `rounds` rounds keep every client within `stop_at_epsilon`.

        -1 if some client exceeds it before the first.
        """
        most = self.privacy.stop_at_epsilon
        if most is None:
            return rounds
        low, high = -1, rounds + 1
        while high - low > 1:
            middle = (low + high) // 2
            within = self.largest(self.steps(middle)) <= most
            low, high = (middle, high) if within else (low, middle)
        return low

    def refuse(self, charged: int = 0) -> None:
        """Raise an InputError if the budget does not allow the next round.

        Args:
            charged: Rounds that were charged before, which may be run again for nothing.
        """
        least = max(charged, 1)
        if self.limit(least) == least:
            return
        had, next_one = self.largest(self.steps(charged)), self.largest(self.steps(least))
        spent = f", of which {had:.4g} is spent" if had else ""
        raise InputError(
            f"stop_at_epsilon is {self.privacy.stop_at_epsilon:g}{spent}; after "
            f"{'these rounds' if charged else 'a round'} epsilon would be {next_one:.4g}: "
            "take more noise, smaller batches, fewer local steps, or a larger budget"
        )

    def _epsilon(self, client: int, steps: int) -> float:
        own = Charge(self.privacy.noise, float(self.rates[client]), round_steps_up(steps))
        before = self.before[client]
        overflow = OVERFLOW if before else float(self.overflows[client])  # theirs may have
        return compose((*before, own), self.privacy.delta, overflow)


def _quantiles(epsilons: NDArray[np.float64]) -> list[float]:
    """Return the least, the quartiles and the largest, each the epsilon of a client.

    >>> _quantiles(np.array([3.0, 1.0, 2.0, 4.0]))
    [1.0, 2.0, 3.0, 4.0, 4.0]
    """
    found: list[float] = np.quantile(epsilons, QUANTILES, method="higher").tolist()
    return found


def round_steps_up(steps: int) -> int:
    """Return a number of steps with eight significant bits, at least `steps`.

    Each number asks the accountant once, so that a long run asks a few hundred times.

    >>> round_steps_up(255), round_steps_up(1001)
    (255, 1004)
    """
    unit = 1 << max(0, steps.bit_length() - FINE.bit_length())
    return -(-steps // unit) * unit
