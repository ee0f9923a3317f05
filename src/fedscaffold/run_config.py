"""`RunConfig`: the arguments of a run, with their defaults, checks, keys and descriptions.

`simulate`, `Simulator` and `sweep` take these arguments by name. Configuration files, the command
line, the estimators and the settings of a deployment are derived from the same tables, `RunConfig`
and `FILE_ARGUMENTS`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fedscaffold import checks, robust
from fedscaffold.attacks import Attack
from fedscaffold.brief import short
from fedscaffold.checks import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from fedscaffold.algorithms import Algorithm
    from fedscaffold.metrics import Metric
    from fedscaffold.privacy import Clients, Records
    from fedscaffold.problems.problem import Problem
    from fedscaffold.robust import Filter
    from fedscaffold.simulation.callbacks import Callback, Look
    from fedscaffold.simulation.compression import Compressor
    from fedscaffold.simulation.delays import Law
    from fedscaffold.simulation.stale import Policy

__all__ = [
    "KEYS",
    "MOST",
    "Argument",
    "RunConfig",
    "arguments",
    "document",
    "refuse_arguments",
    "takes",
]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
MOST = 2**31 - 1
"""Rounds, steps and records of a batch are counted in 32 bits."""
ROUNDS = 100
STORES = ("array", "auto", "file", "sparse")

Check = Callable[[str, Any], Any]
"""(name, value) -> the value as it is used; raises InputError with a sentence that begins with the
name."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a run."""

    default: Any
    sentence: str
    """Description, used in docstrings and in the reference of arguments."""
    check: Check | None = None
    """Check of values given in Python, if they can be checked without the problem."""
    key: str | None = None
    """Dotted key in configuration files; None if it cannot be set there."""
    written: Check | None = None
    """Check of values in files, if different."""
    file_sentence: str | None = None
    """Description of the key in files, if different."""
    bits: bool = True
    """Whether the results depend on it; if so, resuming with another value is refused."""

    def read(self, name: str, value: Any) -> Any:
        """Check a value read from a file."""
        check = self.written or self.check
        if check is None or (value is None and self.default is None):
            return value
        return check(name, value)


def _argument(default: Any, sentence: str, check: Check | None = None, **more: Any) -> Any:
    stated = Argument(default=default, sentence=sentence, check=check, **more)
    return field(default=default, metadata={"argument": stated})


def _choice(*allowed: str) -> Check:
    return lambda name, value: checks.choice(name, value, allowed)


def _step_size(name: str, value: Any) -> Any:
    if callable(value):
        return value
    return checks.number(name, value, above=0)


def _step_size_or_tuned(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value == "tuned":
        return value
    return checks.number(name, value, above=0)


def _steps(name: str, value: Any) -> int | list[int]:
    if isinstance(value, list):
        return [checks.whole(name, one) for one in value]
    return checks.whole(name, value)


def _names(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise InputError(
            f"{name} must be a list of names such as ['loss'], got {checks.shown(value)}"
        )
    return [checks.text(name, one) for one in value]


def _metrics(name: str, value: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise InputError(
            f"{name} must be a list of names such as ['loss'], or of functions, got "
            f"{checks.shown(value)}"
        )
    return value


def _flag(name: str, value: Any, words: str = "True or False") -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be {words}, got {checks.shown(value)}")
    return value


def _optimizer(name: str, value: Any) -> Any:
    if not all(callable(getattr(value, method, None)) for method in ("init", "update")):
        raise InputError(f"{name} must be an optax transformation, got {checks.shown(value)}")
    return value


def _callbacks(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{name} must be a list, got {checks.shown(value)}")
    for one in value:
        if not hasattr(one, "after") and not callable(one):
            raise InputError(
                f"{name} must be fs.Callback objects or functions of a Look, got "
                f"{checks.shown(one)}"
            )
        if getattr(one, "every", None) is not None:
            checks.whole(f"every of the callback {type(one).__name__}", one.every)
    return tuple(value)


def _privacy(name: str, value: Any) -> Any:
    from fedscaffold.privacy import Clients, Records

    if not isinstance(value, (Records, Clients)):
        raise InputError(
            f"{name} must be fs.privacy.records(...) or fs.privacy.clients(...), got "
            f"{checks.shown(value)}"
        )
    return value


def _filter(name: str, value: Any) -> Filter | None:
    return None if value is None else robust.of(value)


def _filter_name(name: str, value: Any) -> str | None:
    found = robust.of(checks.text(name, value))
    return None if found is None else found.name


def _attack(name: str, value: Any) -> Any:
    if not isinstance(value, Attack):
        raise InputError(
            f"{name} must be one such as fs.attacks.sign_flip([0]), got {checks.shown(value)}"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Arguments of a run. Frozen; use `dataclasses.replace` to change one.

    >>> from fedscaffold.algorithms import scaffold
    >>> RunConfig(scaffold(), None, rounds=0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: rounds must be a whole number of at least 1 and at most
        2147483647, got 0
    """

    algorithm: Algorithm = field(kw_only=False)
    problem: Problem = field(kw_only=False)
    rounds: int = _argument(
        None,
        "maximum number of communication rounds; default: the length of `cohorts`, or 100",
        partial(checks.whole, at_most=MOST),
        key="rounds",
        file_sentence="maximum number of communication rounds",
        bits=False,
    )
    local_steps: int | Sequence[int] | NDArray[Any] | None = _argument(
        None,
        "local steps per round: one number, or one per client",
        key="local.steps",
        written=_steps,
    )
    local_epochs: int | None = _argument(
        None,
        "local epochs per round, instead of `local_steps`; each is a pass over the client's "
        "records in a new order",
        partial(checks.whole, at_most=MOST),
        key="local.epochs",
    )
    lr: float | Callable[..., float] | None = _argument(
        None,
        "local step size, or a schedule: a function of `round` (from 1), of `step` (the local "
        "step within a round, from 0), or of both, matched by name; a single argument with "
        "another name is taken as `step`",
        _step_size,
        key="local.lr",
        written=_step_size_or_tuned,
        file_sentence='local step size, or "tuned"',
        bits=False,
    )
    cohort: float | int = _argument(
        1.0,
        "clients per round: a fraction (float) or a number (int)",
        partial(checks.share, of="clients"),
        key="cohort.size",
    )
    sampling: str | ArrayLike | Callable[[int, np.random.Generator], ArrayLike] = _argument(
        "uniform",
        'how clients are drawn, without replacement: "uniform"; one weight per client; or a '
        "function (round, rng) that returns at most `cohort` client indices, where rounds count "
        "from 1 and rng is a NumPy Generator with a separate stream for each round",
    )
    cohorts: Sequence[Sequence[int]] | None = _argument(
        None, "explicit client indices for each round, instead of sampling; sizes may differ"
    )
    batch_size: float | int | None = _argument(
        None,
        "records per batch: a number (int), a fraction of the client's records (float), or None "
        "for all of them",
        partial(checks.share, of="records", at_most=MOST),
        key="local.batch_size",
    )
    draw: str = _argument(
        "auto",
        'how batches are drawn: "replacement", "shuffle" (reshuffled every epoch), or "auto": '
        '"shuffle" with `local_epochs`, "replacement" with `local_steps`',
        _choice("auto", "replacement", "shuffle"),
        key="local.draw",
    )
    drop_last: bool = _argument(
        False,
        "leave out the last batch of an epoch where it is incomplete",
        _flag,
        key="local.drop_last",
        written=partial(_flag, words="true or false"),
    )
    accumulate: int = _argument(
        1,
        "batches of a local step, whose gradient is the mean over their records; an epoch's last "
        "step may have fewer",
        partial(checks.whole, at_most=MOST),
    )
    clip_norm: float | None = _argument(
        None,
        "largest norm of the direction of a local step, gradient and correction together, which is "
        "scaled down to it",
        partial(checks.number, above=0),
        key="local.clip_norm",
    )
    weights: str | ArrayLike = _argument(
        "equal",
        'weights p_i of the objective sum p_i f_i: "equal", "records" (proportional to the number '
        "of records), or one number per client",
        key="weights",
        written=_choice("equal", "records"),
        file_sentence='weights p_i of the objective sum p_i f_i: "equal" or "records"',
    )
    local_optimizer: Any = _argument(
        None,
        "an optax optimiser for the local steps, instead of `lr`; its state is reset every round",
        _optimizer,
    )
    x0: Any = _argument(
        None,
        "initial model, as a pytree like the problem's params or a flat vector; default: the "
        "problem's params",
    )
    seed: int = _argument(
        0,
        "seed of cohorts, batches and gradient noise; the same seed and settings give the same "
        "bits",
        partial(checks.whole, at_least=0, at_most=2**63 - 1),
        key="seed",
    )
    stop_at: str | tuple[str, float] | tuple[str, str, float] | Mapping[str, float] | None = (
        _argument(
            None,
            (
                'stop when a metric reaches a target: ("accuracy", 0.9), or with a direction '
                '("f1", ">=", 0.9)'
            ),
            key="stop_at",
            written=checks.text,
            file_sentence='stop when a metric reaches a target: "accuracy:0.9"',
        )
    )
    metrics: Sequence[str | Metric | Callable[[Any, Any], Any]] | None = _argument(
        None,
        "metrics to record every `evaluate_every` rounds: names (see `fedscaffold.metrics`), "
        "functions of (params, data), or results of `fs.metric`",
        _metrics,
        key="metrics",
        written=_names,
    )
    evaluate_every: int = _argument(
        1,
        "rounds between two evaluations of the metrics; other rounds are NaN",
        partial(checks.whole, at_most=MOST),
        key="evaluate_every",
    )
    precision: str = _argument(
        "float32",
        'precision of the run: "float32" or "float64"',
        _choice("float32", "float64"),
        key="precision",
    )
    block: int | None = _argument(
        None,
        "clients that run at the same time; default: as many as fit the cache",
        checks.whole,
        key="block",
        bits=False,
    )
    availability: ArrayLike | Callable[[int], ArrayLike] | None = _argument(
        None,
        "clients that can be drawn: rows of N zeros and ones, one per round, repeated; or a "
        "function (round) that returns N zeros and ones",
        key="cohort.availability",
        written=checks.text,
        file_sentence="clients that can be drawn: a CSV file of zeros and ones, with one line per "
        "round, repeated, and one column per client",
    )
    server_optimizer: Any = _argument(
        None,
        "an optax transformation of the server's step, such as `optax.sgd(1.0, momentum=0.9)`",
        _optimizer,
    )
    stale: str | Policy = _argument(
        "keep",
        (
            'policy for stale control variates: "keep", "decay:0.9", "drop:20", "refresh:5" (see '
            "`fs.stale`)"
        ),
        key="stale",
        written=checks.text,
    )
    compression: str | Compressor | None = _argument(
        "none",
        (
            'compression of messages: "none", "top_k:0.1", "random_k:0.1", "quantise:4" (see '
            "`fs.compression`)"
        ),
        key="compression",
        written=checks.text,
    )
    delays: str | Law | ArrayLike | None = _argument(
        None,
        "virtual seconds that a client takes for its local work: a law such as "
        '"pareto:1:1.5" (see `fs.delays`), or rows of seconds, one per task, repeated, and one '
        "column per client; the history then has a column `time`",
        key="cohort.delays",
        written=checks.text,
        file_sentence="virtual seconds that a client takes for its local work: a law such as "
        '"pareto:1:1.5", or a CSV file of seconds, with one line per task, repeated, and one '
        "column per client",
    )
    buffer: int | None = _argument(
        None,
        "asynchronous rounds: number of replies that make a server step, while `cohort` clients "
        "are at work; needs `delays`",
        partial(checks.whole, at_most=MOST),
        key="cohort.buffer",
    )
    staleness: str = _argument(
        "none",
        "how the moves of replies to older models are damped in asynchronous rounds: "
        '"none", or "polynomial:0.5" for (1 + server steps since)^-0.5',
        checks.text,
        key="cohort.staleness",
    )
    client_state: str = _argument(
        "array",
        'where control variates are stored: "array" (in memory, all N), "sparse" (in memory, only '
        'of clients heard so far), "file" (in the checkpoint folder), or "auto" (by size); all '
        'but "array" load only the cohort of a round',
        _choice(*STORES),
        key="client_state",
    )
    buffers: str = _argument(
        "average",
        'what becomes of the state that a loss updates, such as running statistics: "average" '
        '(over the clients heard, with their weights) or "local" (each client keeps its own)',
        _choice("average", "local"),
    )
    privacy: Records | Clients | None = _argument(
        None,
        "differential privacy: of records, `fs.privacy.records(...)`, where batches are Poisson "
        "samples of expected size `batch_size`; or of whole clients, `fs.privacy.clients(...)`",
        _privacy,
    )
    robust: str | Filter | None = _argument(
        None,
        'filter of dishonest clients: "krum:0.2", "geometric_median:3", "norm_bound:3" (see '
        "`fs.robust`); default: all clients count",
        _filter,
        key="robust",
        written=_filter_name,
    )
    attack: Attack | None = _argument(
        None,
        "what some clients send instead of their messages, to try filters with (see `fs.attacks`)",
        _attack,
    )
    checkpoint: Path | str | None = _argument(
        None,
        "folder for checkpoints. Repeating the call resumes an interrupted run, with the same "
        "bits; SIGINT and SIGTERM write a checkpoint before the run ends",
        checks.path,
        bits=False,
    )
    every: int | None = _argument(
        None,
        "rounds between two checkpoints; default: time-based, with at most 2 % overhead",
        checks.whole,
        key="output.checkpoint_every",
        bits=False,
    )
    progress: bool | None = _argument(
        None, "show a progress line; default: on a terminal and in notebooks", _flag, bits=False
    )
    callbacks: Sequence[Callback | Callable[[Look], bool | None]] = _argument(
        (),
        "`fs.Callback` objects that observe the run and may stop it, or functions of a `Look`",
        _callbacks,
        bits=False,
    )
    devices: int | None = _argument(
        None,
        "number of JAX devices among which clients are distributed, over all processes; results "
        "agree with those of one device up to rounding",
        checks.whole,
        bits=False,
    )

    def __post_init__(self) -> None:
        given: Any = self.rounds
        if given is None:
            rounds = len(self.cohorts) if isinstance(self.cohorts, Sized) else ROUNDS
            object.__setattr__(self, "rounds", rounds)
        for name, stated in ARGUMENTS.items():
            value = getattr(self, name)
            if stated.check is not None and not (value is None and stated.default is None):
                object.__setattr__(self, name, stated.check(name, value))
        if self.every is not None and self.checkpoint is None:
            raise InputError(
                "every says how often to write a checkpoint: give its folder, checkpoint=..."
            )

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name, stated in ARGUMENTS.items()}
        said = [
            f"{name}={short(value)}"
            for name, value in given.items()
            if value is not ARGUMENTS[name].default
        ]
        return f"RunConfig({', '.join([self.algorithm.name, repr(self.problem), *said])})"


ARGUMENTS: dict[str, Argument] = {
    one.name: one.metadata["argument"]
    for one in dataclasses.fields(RunConfig)
    if "argument" in one.metadata
}

FILE_ARGUMENTS: dict[str, Argument] = {
    "local.optimizer": Argument(
        default="sgd",
        sentence="the local optimiser by name",
        check=_choice("sgd", "momentum", "adam"),
    ),
    "local.momentum": Argument(
        default=0.9,
        sentence="momentum of the local optimiser",
        check=partial(checks.number, at_least=0),
    ),
    "server.optimizer": Argument(
        default="none",
        sentence="the server's optimiser by name",
        check=_choice("none", "momentum", "nesterov", "adam", "yogi", "adagrad"),
    ),
    "server.lr": Argument(
        default=1.0,
        sentence="step size of the server's optimiser",
        check=partial(checks.number, above=0),
    ),
    "server.momentum": Argument(
        default=0.9,
        sentence="momentum of the server's optimiser",
        check=partial(checks.number, at_least=0),
    ),
    "privacy.unit": Argument(
        default="records",
        sentence="what is protected: single records, or whole clients",
        check=_choice("records", "clients"),
    ),
    "privacy.clip": Argument(
        default=None,
        sentence="largest norm of a record's gradient, or of a client's message",
        check=partial(checks.number, above=0),
    ),
    "privacy.noise": Argument(
        default=None,
        sentence="the noise multiplier",
        check=partial(checks.number, above=0),
    ),
    "privacy.delta": Argument(
        default=None,
        sentence="the delta at which epsilon is meant",
        check=partial(checks.number, above=0),
    ),
    "privacy.sampling": Argument(
        default="poisson",
        sentence="how batches of records are drawn, as the accountant assumes",
        check=_choice("poisson"),
    ),
    "privacy.stop_at_epsilon": Argument(
        default=None,
        sentence="end the run before a client's epsilon exceeds this",
        check=partial(checks.number, above=0),
    ),
    "output.dir": Argument(default="runs/latest", sentence="the run's folder", check=checks.text),
}
"""Keys of configuration files without an argument of the same name in Python."""

_count = checks.whole
_size = partial(checks.number, at_least=0)
_positive = partial(checks.number, above=0)
PROBLEM_ARGUMENTS: dict[str, Argument] = {
    "problem.dataset": Argument(
        default="digits",
        sentence="data set, or quadratic, synthetic-linear, synthetic-logistic",
        check=checks.text,
    ),
    "problem.split": Argument(
        default="similarity:0",
        sentence="similarity:S, dirichlet:A, shards:K, iid or natural",
        check=checks.text,
    ),
    "problem.clients": Argument(default=None, sentence="number of clients", check=_count),
    "problem.model": Argument(
        default="softmax", sentence="softmax, mlp:WIDTH, logistic or linear", check=checks.text
    ),
    "problem.l2": Argument(default=0.0, sentence="the penalty l2/2 |params|^2", check=_size),
    "problem.dim": Argument(
        default=20, sentence="dimension of a quadratic or synthetic problem", check=_count
    ),
    "problem.mu": Argument(
        default=0.01, sentence="smallest curvature of the quadratics", check=_positive
    ),
    "problem.smoothness": Argument(
        default=1.0, sentence="largest curvature of the quadratics", check=_positive
    ),
    "problem.noise": Argument(
        default=0.0, sentence="variance of the gradient noise of quadratics", check=_size
    ),
    "problem.seed": Argument(
        default=0,
        sentence="seed of the split, or of the generated problem",
        check=partial(_count, at_least=0),
    ),
    "problem.data": Argument(
        default=None, sentence="folder with the data files (or FEDSCAFFOLD_DATA)", check=checks.text
    ),
}
"""Keys of configuration files that describe the problem."""

FILE_DEFAULTS = {"rounds": ROUNDS, "local.lr": 0.1}
"""Defaults in files of arguments without a default in Python."""


def _keyed() -> dict[str, Argument]:
    known = {
        stated.key: dataclasses.replace(stated, sentence=stated.file_sentence or stated.sentence)
        for stated in ARGUMENTS.values()
        if stated.key is not None
    }
    for key, default in FILE_DEFAULTS.items():
        known[key] = dataclasses.replace(known[key], default=default)
    return known | FILE_ARGUMENTS | PROBLEM_ARGUMENTS


KEYS: dict[str, Argument] = _keyed()
"""All dotted keys of configuration files that describe a run."""


def arguments(*, without: Iterable[str] = ()) -> list[inspect.Parameter]:
    """Return the arguments as keyword-only parameters of a signature.

    >>> [one.name for one in arguments()][:3]
    ['rounds', 'local_steps', 'local_epochs']
    """
    kept = [
        one
        for one in dataclasses.fields(RunConfig)
        if one.name in ARGUMENTS and one.name not in set(without)
    ]
    return [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
        )
        for one in kept
    ]


def document(*, without: Sequence[str] = ()) -> Callable[[F], F]:
    """Decorate a function that takes `**arguments` of a run: set its signature and docstring.

    The line ARGUMENTS of the docstring is replaced by one line per argument.

    Args:
        without: Arguments that the function does not take.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [
            one
            for one in signature.parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        rest = [one for one in arguments(without=without) if one.name not in signature.parameters]
        function.__signature__ = signature.replace(parameters=[*own, *rest])  # type: ignore[attr-defined]
        lines = [f"        {one.name}: {ARGUMENTS[one.name].sentence}." for one in rest]
        if function.__doc__:
            function.__doc__ = function.__doc__.replace("        ARGUMENTS", "\n".join(lines))
        return function

    return decorate


def takes(stated: Callable[P, RunConfig]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that takes exactly the arguments of a run, as `document` does.

    Type checkers see the signature too.
    """
    return document()


def refuse_arguments(
    driver: str, given: Iterable[str], refused: Mapping[str, str] | Iterable[str] = ()
) -> None:
    """Raise an InputError for unknown arguments, and for those that a function refuses.

    >>> refuse_arguments("sweep", ["roundz"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown argument of sweep 'roundz' (did you mean 'rounds'?);
        known: ...
    >>> refuse_arguments("sweep", ["devices"], {"devices": "it runs on one device"})
    Traceback (most recent call last):
    fedscaffold.checks.InputError: sweep does not take devices: it runs on one device
    """
    reasons = dict(refused) if isinstance(refused, Mapping) else dict.fromkeys(refused, "")
    for name in given:
        if name in reasons:
            raise InputError(
                f"{driver} does not take {name}" + (f": {reasons[name]}" if reasons[name] else "")
            )
        checks.choice(
            f"argument of {driver}", name, [one for one in ARGUMENTS if one not in reasons]
        )
