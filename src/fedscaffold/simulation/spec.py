"""The parts of a simulated federation: what the compiled program depends on, what it is given, what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fedscaffold.algorithms import Algorithm
from fedscaffold.problems.batches import Functions, Kinds
from fedscaffold.problems.layout import Layout
from fedscaffold.simulation.stale import Policy

if TYPE_CHECKING:
    from fedscaffold.simulation.compression import Compressor

__all__ = ["Draws", "Federation", "Settings", "Spec", "State"]

Array: TypeAlias = Any  # jax.Array inside the program, numpy.ndarray outside; None for what a run has no use for


class Spec(NamedTuple):
    """Everything a program is compiled for, apart from shapes. Equal specs share one compiled program."""

    algorithm: Algorithm
    functions: Functions
    layout: Layout
    metrics: tuple[str, ...]
    block: int
    """How many clients are run at once: as many as fit the cache."""
    max_steps: int
    """K, the largest number of local steps of any client."""
    max_rows: int
    """The largest number of records of any client."""
    optimizer: Any = None
    """An optax transformation, or None for SGD."""
    scheduled: bool = False
    """SGD has a step size of its own for every local step."""
    unequal: bool = False
    """Clients differ in their numbers of local steps."""
    full_batch: bool = False
    ragged_clients: bool = False
    """Clients differ in their numbers of records, so full batches carry record weights."""
    everyone: bool = False
    """All clients take part in every round, in order: the table of c_i is replaced as a whole."""
    side_by_side: bool = False
    """Several runs of a sweep are run at once, under vmap."""
    stop: str | None = None
    """The metric that ends the run, if any."""
    mean_steps: int | None = None
    """The mean number of local steps where a coin decides; `max_steps` is then the most that are drawn."""
    server_optimizer: Any = None
    """An optax transformation of what the server adds to x, or None."""
    policy: Policy = Policy()
    """What becomes of old control variates."""
    compressor: Compressor | None = None
    ages: bool = False
    """Keep the round in which each client was last heard."""
    silences: bool = False
    """There may be rounds in which nobody is heard: they change nothing."""
    mesh: Any = None
    """The devices that share the clients out among them; None for one device."""
    kinds: Kinds = Kinds()
    """How each of the functions is evaluated on records."""
    batch_sizes: tuple[int, ...] = ()
    """The sizes of batches, and of clients' whole data, where each needs a branch of its own; else empty."""
    client_sizes: tuple[int, ...] = ()

    @property
    def one_by_one(self) -> bool:
        """Whether a block's clients are run one after the other: side by side each would run every branch."""
        return bool(self.batch_sizes or self.client_sizes)

    @property
    def constant_step(self) -> bool:
        """Whether (x - y) / (K lr) is the mean direction."""
        return self.optimizer is None and not self.scheduled

    @property
    def keeps(self) -> bool:
        """Whether clients remember something from round to round."""
        return self.algorithm.remember is not None

    @property
    def travel_steps(self) -> int:
        """The K of d_i = (x - y) / (K lr), where it is the same for all clients."""
        return self.max_steps if self.mean_steps is None else self.mean_steps

    @property
    def sends_direction(self) -> bool:
        """Whether clients send d_i: only where their memory is made from it."""
        return self.keeps and not self.algorithm.by_move

    @property
    def sends_move(self) -> bool:
        """Whether clients send x - y: not where it is K_i lr d_i, as the server knows the steps of each."""
        return not (self.sends_direction and self.constant_step and not self.algorithm.at_x)

    @property
    def sums_moves(self) -> bool:
        """Whether the mean move is a sum of its own: not where it is K lr times that of the d_i."""
        return self.sends_move or self.unequal

    @property
    def vectors_up(self) -> int:
        """How many vectors a client sends at the round's end."""
        return self.sends_direction + self.sends_move

    @property
    def vectors_down(self) -> int:
        """How many vectors a client receives: x, and c where its steps need it and it cannot find it by itself."""
        algorithm = self.algorithm
        return 1 + (algorithm.shift is not None and not algorithm.by_move and not algorithm.everyone)


class Federation(NamedTuple):
    """What stays the same all run long."""

    records: Any
    """All clients' records, one after the other."""
    first: Array
    """(N,) where each client's records begin."""
    counts: Array
    """(N,) how many they are."""
    steps: Array
    """(N,) how many local steps they take."""
    weights: Array
    """(N,) the p_i, in the run's precision."""
    test: Any
    noise: Array
    optimum: Array
    controls: Array
    """(N, d) the ideal control variates, where a metric compares with them."""
    optimal_loss: Array
    record_weights: Array
    """(records,) p_i / n_i, where a metric is a mean over all records."""
    who: Array = None
    """The clients' numbers among all N, where only a cohort is here, or a device's share."""
    evaluation: Any = None
    """By kind of function, the batches that it is measured on, where it is no mean over records."""
    test_evaluation: Any = None
    """Those of the test data."""
    shares: Array = None
    """(N,) the p_i in double precision, where clients remember something."""


class Settings(NamedTuple):
    """What may differ between the runs of one sweep without compiling anew."""

    lr: Array
    """() or (K,): the step size, or one for every local step."""
    key: Array
    """Random key of the gradient noise."""
    target: Array
    """The value of the stop metric that ends the run."""


class State(NamedTuple):
    """What the next round needs."""

    x: Array
    c: Array
    """In double precision where clients remember something; they are sent it in the run's."""
    c_i: Array
    """(N, d) the clients' control variates."""
    mean: Array
    """sum p_i c_i in double precision, kept up from the changes stored in c_i: the gauge compares it with c."""
    scale: Array
    """The largest root mean square of |c_i| in any round's cohort."""
    round: Array
    done: Array
    optimizer: Any = None
    """What the server's optimiser keeps."""
    heard_at: Array = None
    """(N,) the round in which each client was last heard; 0 for never."""
    errors: Array = None
    """(N, d) what compression left out of each client's moves so far, where moves are sent."""

    @property
    def told(self) -> Array:
        """The c that clients receive."""
        return None if self.c is None else self.c.astype(self.x.dtype)


class Draws(NamedTuple):
    """The random choices of a few rounds, made on the host: who takes part, on which records."""

    cohort: Array
    """(R, S) client indices; N marks a ghost that fills up the last block."""
    rows: Array
    """(R, S, K, B) record indices; None for full batches."""
    row_weights: Array
    """(R, S, K, B) record weights where batches are ragged."""
    steps: Array = None
    """(R,) numbers of local steps where a coin decides."""
