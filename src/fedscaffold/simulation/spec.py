"""Records of the compiled program: static spec, federation, state and draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import Exchange
from fedscaffold.attacks import Attack
from fedscaffold.metrics import Stop
from fedscaffold.privacy.gradients import Mechanism
from fedscaffold.privacy.messages import MessageMechanism
from fedscaffold.problems.batches import Functions, Kinds
from fedscaffold.problems.layout import Layout
from fedscaffold.robust import Filter
from fedscaffold.simulation.stale import KEEP, Policy

if TYPE_CHECKING:
    from fedscaffold.simulation.compression import Compressor

__all__ = ["ClientState", "Draws", "Federation", "Guard", "Measure", "Spec", "State", "Work"]

Array: TypeAlias = (
    Any  # jax.Array inside the program, numpy.ndarray outside; None for unused fields
)


class Spec(NamedTuple):
    """Static description of a program.

    Runs with equal specs and shapes share one compiled program.
    """

    algorithm: Algorithm
    exchange: Exchange
    """What the algorithm exchanges."""
    functions: Functions
    layout: Layout
    metrics: tuple[str, ...]
    block: int
    """Number of clients to vectorise over."""
    max_rows: int
    """Largest number of records of any client."""
    sent: tuple[str, ...] = ()
    """Names of the vectors that a client sends at the end of a round."""
    rebuilt: str | None = None
    """Field of the message that the server rebuilds from the mean direction."""
    errors: tuple[str, ...] = ()
    """Fields of the message that have error feedback."""
    noise_steps: int = 0
    """Largest number of local steps, for the shape of gradient noise; 0 without noise. Elsewhere
    the number of local steps is an input, so that runs with other numbers share a program."""
    many_steps: bool = False
    """Each client takes so many local steps that unrolling their loop may pay."""
    optimizer: Any = None
    """An optax transformation, or None for SGD."""
    clip_norm: float | None = None
    """Largest norm of the direction of a local step."""
    scheduled: bool = False
    """The step size varies over local steps."""
    unequal: bool = False
    """The number of local steps differs between clients."""
    full_batch: bool = False
    ragged_clients: bool = False
    """The number of records differs between clients, so full batches carry record weights."""
    everyone: bool = False
    """All clients take part in every round, so client tables are replaced as a whole."""
    side_by_side: bool = False
    """Several runs of a sweep are vectorised with vmap."""
    stop: Stop | None = None
    """The metric that ends the run, if any."""
    mean_steps: int | None = None
    """Mean of a geometric number of local steps."""
    server_optimizer: Any = None
    """An optax transformation of the server's update of x, or None."""
    policy: Policy = KEEP
    """Staleness policy."""
    compressor: Compressor | None = None
    ages: bool = False
    """Track the round in which each client was last heard."""
    mesh: Any = None
    """Device mesh over which clients are sharded; None for one device."""
    kinds: Kinds = Kinds()
    """How each of the functions is evaluated on records."""
    batch_sizes: tuple[int, ...] = ()
    """Sizes of batches (`client_sizes`: of full batches) that have a branch of their own: all that
    occur for a coupled loss, some to cut padding to where steps are heavy; else empty."""
    client_sizes: tuple[int, ...] = ()
    own: tuple[Measure, ...] = ()
    """The user's metrics."""
    privacy: Mechanism | None = None
    """How gradients are made private, where records are protected."""
    message_privacy: MessageMechanism | None = None
    """How messages are, where clients are protected."""
    heavy: bool = False
    """A local step of one client fills the cache."""
    by_blocks: bool = False
    """Each block of clients is a program of its own, so that several cores share them."""
    local_buffers: bool = False
    """Each client keeps the state that the loss updates; otherwise it is averaged like the model.
    """
    filter: Filter | None = None
    """Which clients of a cohort are counted."""
    attack: Attack | None = None
    """What dishonest clients send."""
    damped: bool = False
    """The moves of stale replies count less than others."""

    @property
    def own_columns(self) -> frozenset[str]:
        """Columns of the user's metrics."""
        return frozenset(column for measure in self.own for column in measure.columns)

    @property
    def moves_apart(self) -> bool:
        """Whether a client's move is rebuilt from its direction before the sum over clients."""
        return self.unequal or self.damped

    @property
    def one_by_one(self) -> bool:
        """Whether the clients of a block run in a loop: under vmap each would run every branch."""
        return bool(self.batch_sizes or self.client_sizes)

    @property
    def unrolls(self) -> bool:
        """Whether the loop over local steps is unrolled: they are light, and alike."""
        differ = self.unequal or self.mean_steps is not None or self.one_by_one
        return self.many_steps and not (differ or self.heavy or self.privacy is not None)

    @property
    def runs_on(self) -> bool:
        """Whether vectorised runs go on together after one has ended: the loop needs no select."""
        return self.side_by_side and self.stop is None

    @property
    def compares(self) -> bool:
        """Whether all messages of a round are needed before any is counted."""
        return self.filter is not None or self.attack is not None

    @property
    def constant_step(self) -> bool:
        """Whether (x - y) / (K lr) is the mean direction."""
        return self.optimizer is None and self.clip_norm is None and not self.scheduled

    @property
    def keeps(self) -> bool:
        """Whether the algorithm has client memory."""
        return self.algorithm.has_memory

    @property
    def widths(self) -> dict[str, int]:
        """Number of entries of each field of a client's memory: the model's, or one."""
        memory: Any = self.algorithm.memory(np.zeros(self.layout.size))
        fields = {} if memory is None else memory._asdict()
        return {name: np.size(value) for name, value in fields.items()}

    def travel_steps(self, taken: Array) -> Array | int:
        """Return K in d_i = (x - y) / (K lr): the steps taken, or their mean if they are drawn."""
        return taken if self.mean_steps is None else self.mean_steps


class Measure(NamedTuple):
    """A user-defined metric, without its data."""

    name: str
    function: Callable[[Any, Any], Any]
    columns: tuple[str, ...]
    summary: tuple[str | float, ...] = ()
    """For each column, the statistic of the clients' values; empty for a metric that is not by
    client."""
    personal: bool = False
    """Measured on each client's personal model."""
    compiled: bool = True
    """Part of the compiled program; otherwise it is called on the host."""
    said: str = ""
    """Description of the data it is measured on."""


class Federation(NamedTuple):
    """Inputs of the program that are constant over a run."""

    records: Any
    """All clients' records, concatenated."""
    first: Array
    """(N,) index of each client's first record."""
    counts: Array
    """(N,) number of records."""
    steps: Array
    """(N,) number of local steps."""
    weights: Array
    """(N,) weights p_i, in the run's precision."""
    test: Any
    noise: Array
    optimum: Array
    controls: Array
    """(N, d) ideal control variates, for the metric `control_error`."""
    optimal_loss: Array
    record_weights: Array
    """(records,) p_i / n_i, for metrics that are means over records."""
    who: Array = None
    """Client numbers among all N, if only a cohort or a device's shard is here."""
    evaluation: Any = None
    """Evaluation batches by kind of function, for functions that are not means over records."""
    test_evaluation: Any = None
    """Evaluation batches of the test data."""
    shares: Array = None
    """(N,) p_i in float64, for algorithms with client memory."""
    measured: Any = ()
    """Data of each compiled user-defined metric."""
    target: Array = None
    """Value of the stop metric that ends the run, if any."""


class Guard(NamedTuple):
    """What the server knows of each client, for its filter."""

    norms: Array
    """(N, P) norms of the parts of its message that counted last; NaN if none has."""
    refused: Array
    """(N,) number of rounds in which it was refused."""


class ClientState(NamedTuple):
    """The fields of a `State` that a client keeps between rounds; unused fields are None."""

    memory: Any
    own: Any
    errors: Any
    """Error feedback of compression, by field of the message."""
    own_buffers: Any = None
    """The state that the loss updates, where each client keeps its own."""
    guard: Any = None
    """What the server knows of the client, with a filter."""


class State(NamedTuple):
    """State of a federation between rounds."""

    server: Any
    """The algorithm's server record; means over clients are float64, other fields of the run's
    precision."""
    memory: Any
    """The algorithm's memory record, each field with one row per client."""
    mean: tuple[Array, ...]
    """For each pair of the algorithm's `means`, the running sum p_i of the memory field in float64,
    updated from the stored changes; the residual compares it with the server's field."""
    scale: Array
    """Largest root mean square of the memories in any round's cohort."""
    round: Array
    done: Array
    optimizer: Any = None
    """State of the server optimizer."""
    heard_at: Array = None
    """(N,) round in which each client was last heard; 0 for never."""
    errors: Any = None
    """(N, d) error feedback of compression, by field of the message."""
    own: Any = None
    """The algorithm's record of private client state, each field with one row per client."""
    buffers: Any = None
    """State that the loss updates, such as running statistics, averaged over clients; None if there
    is none."""
    own_buffers: Any = None
    """The same, one row per client, where each client keeps its own."""
    guard: Any = None
    """A `Guard`, with a filter."""
    sent: Any = None
    """The server's record as each task at work was sent it, one row per slot; None in synchronous
    rounds."""

    @property
    def x(self) -> Array:
        """The model as a flat vector."""
        return self.server.x

    @property
    def clients(self) -> ClientState:
        """What clients keep between rounds, one row per client."""
        return ClientState(*(getattr(self, name) for name in ClientState._fields))

    @property
    def told(self) -> Any:
        """The server's record as broadcast to clients, in the run's precision."""
        dtype = self.x.dtype
        return type(self.server)(*(field.astype(dtype) for field in self.server))


class Draws(NamedTuple):
    """Inputs of R rounds, prepared on the host; they may differ between the runs of a sweep."""

    cohort: Array
    """(R, S) client indices; N marks padding of the last block."""
    rows: Array
    """(R, S, K, B) record indices, with room for K local steps; None for full batches."""
    row_weights: Array
    """(R, S, K, B) record weights, if batch sizes differ."""
    steps: Array
    """(R,) geometric numbers of local steps, if the algorithm draws them."""
    lr: Array
    """(R,) step sizes, or (R, K) if they vary over local steps."""
    key: Array
    """(R, 2) random key of the run, the same in all rounds."""
    slot: Array = None
    """(R, S) slots of the tasks, in asynchronous rounds; their number marks padding."""
    damping: Array = None
    """(R, S) by how much the moves of stale replies count, if they count less."""


class Work(NamedTuple):
    """The work of one client in a round."""

    client: Array
    p: Array
    """Its weight; float64 for algorithms with client memory, and so are all sums over clients."""
    steps: Array
    key: Array
    """Random key of its gradient noise, its compressor, and its loss if that takes one."""
    rows: Array
    row_weights: Array
    returns: Array = None
    """Whether the `refresh` policy renews its memory."""
    sent: Any = None
    """The server's record that its task was sent, in asynchronous rounds."""
    damping: Array = None
    """By how much its move counts."""
