"""The description of a run: every argument once, with its default, its check, its key in files and its sentence.

`simulate`, `Simulator` and `sweep` take these arguments by name; configuration files, the command line, the estimators
and the settings of a deployment are made from the same table, `RunConfig` and `FILE_ARGUMENTS`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fedscaffold import checks
from fedscaffold.brief import short
from fedscaffold.checks import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from fedscaffold.algorithms import Algorithm
    from fedscaffold.metrics import Metric
    from fedscaffold.problems.problem import Problem
    from fedscaffold.simulation.callbacks import Callback, Look
    from fedscaffold.simulation.compression import Compressor
    from fedscaffold.simulation.stale import Policy

__all__ = ["KEYS", "MOST", "Argument", "RunConfig", "argument_of", "arguments", "document", "refuse_arguments", "takes"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
MOST = 2**31 - 1
"""Rounds, steps and records of a batch are counted in 32 bits."""
ROUNDS = 100
STORES = ("array", "auto", "file", "sparse")

Check = Callable[[str, Any], Any]
"""(name, value) -> the value as it is used; raises InputError with a sentence that begins with the name."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a run."""

    default: Any
    sentence: str
    """What it means: one line of every reference."""
    check: Check | None = None
    """For values given in Python, where they can be checked without the problem."""
    key: str | None = None
    """Its dotted key in configuration files; None where files have none."""
    written: Check | None = None
    """The check of a value in a file, where that is another one."""
    file_sentence: str | None = None
    """What it means in a file, where that is another thing."""
    bits: bool = True
    """Whether the run's bits depend on it: resuming with another value is refused."""

    def read(self, name: str, value: Any) -> Any:
        """Check a value that stands in a file."""
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
    return value if isinstance(value, str) and value == "tuned" else checks.number(name, value, above=0)


def _steps(name: str, value: Any) -> int | list[int]:
    return [checks.whole(name, one) for one in value] if isinstance(value, list) else checks.whole(name, value)


def _names(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list of names such as ['loss'], got {checks.shown(value)}")
    return [checks.text(name, one) for one in value]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {checks.shown(value)}")
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
            raise InputError(f"{name} must be fs.Callback objects or functions of a Look, got {checks.shown(one)}")
        if getattr(one, "every", None) is not None:
            checks.whole(f"every of the callback {type(one).__name__}", one.every)
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that makes a run. Frozen; `dataclasses.replace` makes another one.

    >>> from fedscaffold.algorithms import scaffold
    >>> RunConfig(scaffold(), None, rounds=0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: rounds must be a whole number of at least 1 and at most 2147483647, got 0
    """

    algorithm: Algorithm = field(kw_only=False)
    problem: Problem = field(kw_only=False)
    rounds: int = _argument(
        None,
        "communication rounds at most; by default as many as `cohorts` has, or 100",
        partial(checks.whole, at_most=MOST),
        key="rounds",
        file_sentence="communication rounds at most",
        bits=False,
    )
    local_steps: int | Sequence[int] | NDArray[Any] | None = _argument(
        None, "steps a client takes in a round: one number, or one for each client", key="local.steps", written=_steps
    )
    local_epochs: int | None = _argument(
        None,
        "instead of steps, passes over the client's own records, in a fresh order each",
        partial(checks.whole, at_most=MOST),
        key="local.epochs",
    )
    lr: float | Callable[..., float] | None = _argument(
        None,
        "local step size, or a schedule: a function of `round` (from 1), of `step` (the local steps of a round, from "
        "0), or of both, by these names; a function of one argument of any other name is one of the step",
        _step_size,
        key="local.lr",
        written=_step_size_or_tuned,
        file_sentence='local step size, or "tuned"',
        bits=False,
    )
    cohort: float | int = _argument(
        1.0,
        "how many clients take part in a round: a share (float) or a number (int)",
        partial(checks.share, of="clients"),
        key="cohort.size",
    )
    sampling: str | ArrayLike | Callable[[int, np.random.Generator], ArrayLike] = _argument(
        "uniform",
        'how they are drawn, without replacement: "uniform"; by one weight for each client; or by a function '
        "(round, rng) -> client indices, at most `cohort` of them, with rounds from 1 and a NumPy Generator that has a "
        "stream of its own for each round",
    )
    cohorts: Sequence[Sequence[int]] | None = _argument(
        None, "instead, the user's own list of client indices for each round; sizes may differ"
    )
    batch_size: float | int | None = _argument(
        None,
        "records in a batch: a number (int), a share of the client's own (float), or None for all",
        partial(checks.share, of="records", at_most=MOST),
        key="local.batch_size",
    )
    draw: str = _argument(
        "auto",
        '"replacement", "shuffle" (epoch by epoch), or "auto": shuffled for epochs, replaced for steps',
        _choice("auto", "replacement", "shuffle"),
        key="local.draw",
    )
    weights: str | ArrayLike = _argument(
        "equal",
        'the p_i of the objective sum p_i f_i: "equal", "records", or one number for each client',
        key="weights",
        written=_choice("equal", "records"),
        file_sentence='the p_i of the objective sum p_i f_i: "equal" or "records"',
    )
    local_optimizer: Any = _argument(
        None, "an optax transformation with its own step size, given instead of `lr`; fresh every round", _optimizer
    )
    x0: Any = _argument(None, "starting model, in the problem's structure or flat; the problem's own unless given")
    seed: int = _argument(
        0,
        "of cohorts, batches and gradient noise; same seed and settings, same bits",
        partial(checks.whole, at_least=0, at_most=2**63 - 1),
        key="seed",
    )
    stop_at: str | tuple[str, float] | tuple[str, str, float] | Mapping[str, float] | None = _argument(
        None,
        'end the run once a metric reaches a target: ("accuracy", 0.9), or with a direction ("f1", ">=", 0.9)',
        key="stop_at",
        written=checks.text,
        file_sentence='end the run once a metric reaches a target: "accuracy:0.9"',
    )
    metrics: Sequence[str | Metric | Callable[[Any, Any], Any]] | None = _argument(
        None,
        "columns to measure, see `fedscaffold.metrics`: names, and functions of (params, data) as they are or as made "
        "by `fs.metric`; measured every `evaluate_every` rounds",
        key="metrics",
        written=_names,
    )
    evaluate_every: int = _argument(
        1,
        "rounds between two measurements; rounds between hold NaN",
        partial(checks.whole, at_most=MOST),
        key="evaluate_every",
    )
    precision: str = _argument("float32", '"float32" or "float64"', _choice("float32", "float64"), key="precision")
    block: int | None = _argument(
        None, "clients run at once; by default as many as fit the cache", checks.whole, key="block", bits=False
    )
    availability: ArrayLike | Callable[[int], ArrayLike] | None = _argument(
        None,
        "who can be reached: rows of zeros and ones, one for each round, over and over, or a function (round) -> N "
        "zeros and ones; cohorts are drawn among those who can",
        key="cohort.availability",
        written=checks.text,
        file_sentence="who can be reached: a CSV file of zeros and ones, a line for each round, over and over, a "
        "column for each client",
    )
    server_optimizer: Any = _argument(
        None, "an optax transformation of the server's step, such as `optax.sgd(1.0, momentum=0.9)`", _optimizer
    )
    stale: str | Policy = _argument(
        "keep",
        'what becomes of old control variates: "keep", "decay:0.9", "drop:20", "refresh:5" (see `fs.stale`)',
        key="stale",
        written=checks.text,
    )
    compression: str | Compressor | None = _argument(
        "none",
        'of what clients send: "none", "top_k:0.1", "random_k:0.1", "quantise:4" (see `fs.compression`)',
        key="compression",
        written=checks.text,
    )
    client_state: str = _argument(
        "array",
        'where the clients\' control variates are: "array" (in memory, all N), "sparse" (in memory, those of clients '
        'ever heard), "file" (in the checkpoint folder), or "auto" by size; all but the first see only the cohort of a '
        "round, records included",
        _choice(*STORES),
        key="client_state",
    )
    buffers: str = _argument(
        "average",
        'what becomes of the state that a loss updates, such as running statistics: "average" (over the clients heard, '
        'with their weights) or "local" (each client keeps its own)',
        _choice("average", "local"),
    )
    checkpoint: Path | str | None = _argument(
        None,
        "a folder to keep the whole state in. A run that was ended, however, goes on there when it is asked for again, "
        "with the same bits; SIGINT and SIGTERM end it with a checkpoint",
        checks.path,
        bits=False,
    )
    every: int | None = _argument(
        None,
        "rounds between two checkpoints; by default time-based, with at most 2 % overhead",
        checks.whole,
        key="output.checkpoint_every",
        bits=False,
    )
    progress: bool | None = _argument(
        None, "show a line with the time left; by default on a terminal only", _flag, bits=False
    )
    callbacks: Sequence[Callback | Callable[[Look], bool | None]] = _argument(
        (),
        "look at the run while it goes on (see `fs.Callback`): record, log, stop early; a function is called with "
        "every `Look`",
        _callbacks,
        bits=False,
    )
    devices: int | None = _argument(
        None,
        "how many of JAX's devices share the clients out among them, those of all processes together; the result "
        "agrees with the run on one device to rounding",
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
            raise InputError("every says how often to write a checkpoint: give its folder, checkpoint=...")

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name, stated in ARGUMENTS.items()}
        said = [f"{name}={short(value)}" for name, value in given.items() if value is not ARGUMENTS[name].default]
        return f"RunConfig({', '.join([self.algorithm.name, repr(self.problem), *said])})"


ARGUMENTS: dict[str, Argument] = {
    one.name: one.metadata["argument"] for one in dataclasses.fields(RunConfig) if "argument" in one.metadata
}

FILE_ARGUMENTS: dict[str, Argument] = {
    "local.optimizer": Argument(
        default="sgd", sentence="the local optimiser by name", check=_choice("sgd", "momentum", "adam")
    ),
    "local.momentum": Argument(
        default=0.9, sentence="of the local optimiser momentum", check=partial(checks.number, at_least=0)
    ),
    "server.optimizer": Argument(
        default="none",
        sentence="the server's optimiser by name",
        check=_choice("none", "momentum", "nesterov", "adam", "yogi", "adagrad"),
    ),
    "server.lr": Argument(
        default=1.0, sentence="step size of the server's optimiser", check=partial(checks.number, above=0)
    ),
    "server.momentum": Argument(
        default=0.9, sentence="of the server's optimiser", check=partial(checks.number, at_least=0)
    ),
    "output.dir": Argument(default="runs/latest", sentence="the run's folder", check=checks.text),
}
"""What only configuration files say: `local_optimizer` and `server_optimizer` are objects in Python."""

_count = checks.whole
_size = partial(checks.number, at_least=0)
_positive = partial(checks.number, above=0)
PROBLEM_ARGUMENTS: dict[str, Argument] = {
    "problem.dataset": Argument(
        default="digits", sentence="data set, or quadratic, synthetic-linear, synthetic-logistic", check=checks.text
    ),
    "problem.split": Argument(
        default="similarity:0", sentence="similarity:S, dirichlet:A, shards:K, iid or natural", check=checks.text
    ),
    "problem.clients": Argument(default=None, sentence="number of clients", check=_count),
    "problem.model": Argument(default="softmax", sentence="softmax, mlp:WIDTH, logistic or linear", check=checks.text),
    "problem.l2": Argument(default=0.0, sentence="the penalty l2/2 |params|^2", check=_size),
    "problem.dim": Argument(default=20, sentence="dimension of a quadratic or synthetic problem", check=_count),
    "problem.mu": Argument(default=0.01, sentence="least curvature of the quadratics", check=_positive),
    "problem.smoothness": Argument(default=1.0, sentence="largest curvature of the quadratics", check=_positive),
    "problem.noise": Argument(default=0.0, sentence="size of the quadratics' gradient noise", check=_size),
    "problem.seed": Argument(
        default=0, sentence="seed of the split, or of the problem that is made", check=partial(_count, at_least=0)
    ),
    "problem.data": Argument(
        default=None, sentence="folder with the data files (or FEDSCAFFOLD_DATA)", check=checks.text
    ),
}
"""What is minimised, where a configuration file says it: a data set split among clients and a model, or quadratics."""

FILE_DEFAULTS = {"rounds": ROUNDS, "local.lr": 0.1}
"""Defaults of files, where Python has none."""


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
"""All keys of configuration files that describe a run, dotted."""


def argument_of(key: str) -> Argument:
    """The argument that stands under a key of configuration files.

    >>> argument_of("local.steps").sentence
    'steps a client takes in a round: one number, or one for each client'
    """
    return KEYS[key]


def arguments(*, without: Iterable[str] = ()) -> list[inspect.Parameter]:
    """The arguments as keyword-only parameters of a signature.

    >>> [one.name for one in arguments()][:3]
    ['rounds', 'local_steps', 'local_epochs']
    """
    kept = [one for one in dataclasses.fields(RunConfig) if one.name in ARGUMENTS and one.name not in set(without)]
    return [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in kept
    ]


def document(*, without: Sequence[str] = ()) -> Callable[[F], F]:
    """Decorate a function that takes the arguments of a run as `**arguments`: it gets their signature and sentences.

    The line ARGUMENTS of its docstring is replaced by a line for each.

    Args:
        without: arguments that the function does not take.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [one for one in arguments(without=without) if one.name not in signature.parameters]
        function.__signature__ = signature.replace(parameters=[*own, *rest])  # type: ignore[attr-defined]
        lines = [f"        {one.name}: {ARGUMENTS[one.name].sentence}." for one in rest]
        if function.__doc__:
            function.__doc__ = function.__doc__.replace("        ARGUMENTS", "\n".join(lines))
        return function

    return decorate


def takes(stated: Callable[P, RunConfig]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """`document` for a function that takes all arguments, and nothing else: type checkers see them too."""
    return document()


def refuse_arguments(driver: str, given: Iterable[str], refused: Mapping[str, str] | Iterable[str] = ()) -> None:
    """Refuse arguments that there are not, and those that a driver does not support, by name.

    >>> refuse_arguments("sweep", ["roundz"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown argument of sweep 'roundz' (did you mean 'rounds'?); known: ...
    >>> refuse_arguments("sweep", ["devices"], {"devices": "it runs on one device"})
    Traceback (most recent call last):
    fedscaffold.checks.InputError: sweep does not take devices: it runs on one device
    """
    reasons = dict(refused) if isinstance(refused, Mapping) else dict.fromkeys(refused, "")
    for name in given:
        if name in reasons:
            raise InputError(f"{driver} does not take {name}" + (f": {reasons[name]}" if reasons[name] else ""))
        checks.choice(f"argument of {driver}", name, [one for one in ARGUMENTS if one not in reasons])
