"""Settings of a deployment: TOML with the simulator's keys and a table `[deploy]`.

    seed = 0
    rounds = 20
    weights = "equal"            # or "records"
    precision = "float32"        # or "float64"
    robust = "krum:0.2"          # optional: a filter of dishonest sites, see fedscaffold.robust
    [algorithm]
    name = "scaffold"            # and its own parameters: option, server_lr, mu ...
    [local]
    epochs = 1                   # or steps
    batch_size = 32
    lr = 0.1                     # or by rounds: { 1 = 0.1, 50 = 0.01 }
    [cohort]
    size = 1.0
    [privacy]                    # optional: differential privacy of single records
    clip = 1.0
    noise = 1.1
    delta = 1e-5
    [deploy]
    sites = ["north", "south"]

`format` is the version of the file format, 1 by default. Unknown keys are refused with a
suggestion.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, make
from fedscaffold.algorithms.round import exchange, work_of
from fedscaffold.checks import InputError
from fedscaffold.deploy.asynchronous import refuse_settings
from fedscaffold.deploy.schema import digest_of
from fedscaffold.parsing import format_of, text_of, toml
from fedscaffold.privacy import Records
from fedscaffold.privacy.methods import refuse_algorithm
from fedscaffold.run_config import KEYS
from fedscaffold.secure.ring import Ring

__all__ = ["Deploy", "Local", "Settings", "load", "parse"]

DEPLOYABLE = {
    "name",
    "direction",
    "message",
    "update",
    "init",
    "memory",
    "shift",
    "remember",
    "means",
    "renew",
    "references",
    "work",
    "needs",
    "form",
    "own",
    "start",
    "keep",
    "personal",
    "fit",
    "private",
}
FORMAT = 1
KEYS_AT_FIRST = 8  # keys of [local] in version 0.1.0
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
REASONS = {
    "everyone": "it needs every client in every round, and sites may be absent",
    "equal steps": "it needs equal numbers of local steps, and sites may skip some",
    "prepare": "it needs a second exchange in every round, before the local steps",
    "finds": "its clients must receive every model, and sites may miss some",
}
PLAIN = ("sgd", "plain sgd")  # conditions of an algorithm that local.optimizer = "sgd" meets
OPTIMIZERS = ("sgd", "momentum", "adam", "own")
RESERVED = {
    "app",
    "authority",
    "ca",
    "engine",
    "executor",
    "hub",
    "keys",
    "link",
    "logs",
    "run",
    "secrets",
    "server",
    "site",
    "sites",
    "state",
    "superexec",  # folders and files of a federation
    # devices of Windows
    "aux",
    "con",
    "nul",
    "prn",
    *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
}


class Local(NamedTuple):
    """Local training of a client."""

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | float | None = None
    lr: float = 0.1
    draw: str = "auto"
    optimizer: str = "sgd"
    """sgd, momentum, adam, or "own" for the app's optimiser."""
    momentum: float = 0.9
    buffers: str = "average"
    """Buffers such as BatchNorm's running means: "average" over the clients, or "local" to each."""
    drop_last: bool = False
    """Whether an epoch's last batch is left out where it is incomplete."""
    clip_norm: float | None = None
    """Largest norm of the direction of a local step, which is scaled down to it."""
    schedule: tuple[tuple[int, float], ...] = ()
    """(round, lr) where local.lr is a table: the step size from that round on."""

    @property
    def plain(self) -> bool:
        """Whether steps are plain SGD of one size, so that the move gives the mean direction."""
        return self.optimizer == "sgd" and self.clip_norm is None

    def at(self, round: int) -> Local:
        """Return the settings of a round, counted from 1, with its step size.

        >>> Local(lr=0.1, schedule=((1, 0.1), (3, 0.02))).at(5).lr
        0.02
        """
        lrs = [lr for begin, lr in self.schedule if begin <= round]
        return self._replace(lr=lrs[-1]) if lrs else self

    def rows(self, records: int) -> int | None:
        """Return the number of records in a batch; None where the settings give no batch size.

        >>> Local(batch_size=0.25).rows(10), Local(batch_size=32).rows(10), Local().rows(10)
        (3, 32, None)
        """
        size = self.batch_size
        return max(1, math.ceil(size * records - 1e-9)) if isinstance(size, float) else size


class Deploy(NamedTuple):
    """Sites, protocol and limits of the federation."""

    sites: tuple[str, ...] = ()
    """Names of the sites that may take part."""
    state: str = "server"
    """Where the c_i are stored: "server", or "client" in a durable file."""
    deadline: float = 600.0
    """Time limit of a round in seconds."""
    quorum: float | int = 0.5
    """Share or number of the cohort that must reply for a round to count."""
    retries: int = 10
    """Consecutive rounds that may miss their quorum before the run stops."""
    wait: float = 300.0
    """Seconds to wait for the sites before the first round."""
    clip: float | None = None
    """Largest norm of a client's pair (move, change of c_i), in units of the model."""
    max_records: int = 10**9
    """Largest number of records that a site may register."""
    records: dict[str, int] = {}  # noqa: RUF012 (never changed)
    """Numbers of records confirmed by the operator; other sites are held to the first number they
    register."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders beside app.py that are not part of the app."""
    secure: bool = False
    """Whether the server learns only sums over the sites; needs `state = "client"`."""
    threshold: float | int = 0.5
    """Share or number of the cohort that must stay to the end of a secure sum; always more than
    half of it."""
    limit: float = 65536.0
    """Largest absolute value of a number in a secure sum."""
    alert: str = ""
    """Command that the server runs with an event as JSON on its input (`alerts.py`)."""
    alert_after: int = 3
    """Rounds in a row that a site may miss before `alert` is told."""
    mode: str = "sync"
    """"sync": a round ends when the cohort has replied; "async": when `buffer` sites have, while
    the others work on."""
    buffer: int | None = None
    """Replies that make a step of the server, with `mode = "async"`."""
    staleness: str = "none"
    """How the moves of replies to older models are damped: "none", or "polynomial:0.5"."""


class Settings(NamedTuple):
    """Settings of a deployment."""

    seed: int = 0
    rounds: int = 100
    weights: str = "equal"
    precision: str = "float32"
    evaluate_every: int = 1
    algorithm: dict[str, Any] = {"name": "scaffold"}  # noqa: RUF012 (never changed)
    local: Local = Local(epochs=1)
    cohort: float | int = 1.0
    deploy: Deploy = Deploy()
    privacy: Records | None = None
    """Differential privacy of the sites' records; None for none."""
    robust: str | None = None
    """Filter of dishonest sites by name; None for none."""
    app: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Digests of the app's files by path, which the server and all sites must share; not a key of
    the TOML, and {} without an app."""

    @property
    def ring(self) -> Ring:
        """The numbers of secure sums."""
        masses = (
            dict.fromkeys(self.deploy.sites, 1) if self.weights == "equal" else self.deploy.records
        )
        return Ring.fit(self.deploy.limit, sum(masses[site] for site in self.deploy.sites))

    @property
    def digest(self) -> str:
        """Digest of the settings that affect a client's computation, which all must share."""
        return self._digest(self.local)

    @property
    def digest_but_lr(self) -> str:
        """Digest of the same without the step size."""
        return self._digest(self.local._replace(lr=0.0, schedule=()))

    def _digest(self, local: Local) -> str:
        # keys that 0.1.0 did not have count where they are set, so that its states are read
        old, new = list(local)[:KEYS_AT_FIRST], dict(list(local._asdict().items())[KEYS_AT_FIRST:])
        set_ = {k: v for k, v in new.items() if v != Local._field_defaults[k]}
        words = [self.seed, self.precision, self.algorithm, old, self.deploy.state]
        if self.deploy.secure:
            set_["secure"] = [self.deploy.limit, self.deploy.clip]
        if self.privacy is not None:  # delta and the budget are a site's own
            set_["privacy"] = [self.privacy.clip, self.privacy.noise, self.privacy.sampling]
        return digest_of([*words, set_] if set_ else words)


def load(path: Path | str) -> Settings:
    """Read the settings of a deployment from a TOML file."""
    path = Path(path)
    try:
        return parse(text_of(path), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} not found; `fedscaffold deploy new DIR` writes one"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def parse(text: str, source: str = "settings") -> Settings:
    r"""Parse settings from TOML text.

    >>> parse("rounds = 5\n[local]\nsteps = 3\nlr = 0.2").local.lr
    0.2
    >>> parse("[deploy]\nquorm = 2")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: settings: unknown key 'deploy.quorm' (did you mean
        'deploy.quorum'?); known: ...
    """
    table = toml(text, source)
    format_of(table.pop("format", None), FORMAT, source)
    try:
        return _build_settings(table)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _why_not_deployed(algorithm: Algorithm) -> str | None:
    """Return why an algorithm cannot be deployed; None if it can."""
    for (
        condition,
        _,
    ) in algorithm.needs:  # sites may be absent or skip steps; messages are not compressed
        if condition not in (*PLAIN, "exact messages", "plain server step", "synchronous rounds"):
            return REASONS.get(
                condition, f"it needs {condition!r}, which no deployment can promise"
            )
    for field, value in algorithm._asdict().items():
        if field not in DEPLOYABLE and value != algorithm._field_defaults.get(field):
            return REASONS.get(field, f"it uses {field!r}, which deployment does not support")
    if work_of(algorithm, 1).geometric:
        return "it draws the number of local steps of a round"
    if any(algorithm.memory(1.0) or ()):
        return "what its clients remember does not begin at zero"
    known = exchange(algorithm)
    if known.numbers:
        return f"its messages hold numbers beside vectors ({', '.join(known.numbers)})"
    if known.sums:
        return "it sums over coordinates, of which a server has one block at a time"
    return None


def _build_settings(table: dict[str, Any]) -> Settings:
    """Build the settings from the tables of a file; raise `InputError` on the first mistake."""
    _check_keys(table, tuple(name for name in Settings._fields if name != "app"), "")
    local = _table(table, "local", tuple(n for n in Local._fields if n != "schedule"))
    deploy = _table(table, "deploy", Deploy._fields)
    cohort = _table(table, "cohort", ("size",))
    algorithm = {"name": "scaffold", **_table(table, "algorithm", None)}
    settings = Settings(
        **{
            name: _read(table, name)
            for name in ("seed", "rounds", "weights", "precision", "evaluate_every", "robust")
        },
        algorithm=algorithm,
        local=_local(local),
        cohort=_read(cohort, "cohort.size"),
        deploy=_deploy(deploy),
        privacy=_privacy(table),
    )
    method = make(**algorithm)
    if refused := _why_not_deployed(method):
        raise InputError(f"{method.name} cannot be deployed: {refused}; simulate it instead")
    for condition, why in method.needs:
        if condition in PLAIN and not settings.local.plain:
            needed = "no local.clip_norm" if settings.local.optimizer == "sgd" else "'sgd'"
            what = f"local.optimizer = {needed}" if needed == "'sgd'" else needed
            raise InputError(f"{method.name} needs {what}: it {why}")
    if settings.deploy.secure:
        _check_secure(settings, method)
    elif settings.deploy.clip is not None and settings.deploy.state == "client":
        raise InputError(
            'deploy.clip needs deploy.state = "server": a client that was clipped must know it'
        )
    if settings.robust is not None and settings.deploy.secure:
        raise InputError(
            "robust does not go with deploy.secure: it compares single updates, and secure sums "
            "hide them"
        )
    if settings.robust is not None and settings.deploy.state == "client":
        raise InputError(
            'robust needs deploy.state = "server": it compares what changes the c_i, and a site '
            "that is refused must go on from the c_i that counted"
        )
    refuse_settings(settings, method)
    if settings.privacy is not None:
        refuse_algorithm(method)
        _check_privacy(settings, settings.privacy, local)
    return settings


def _check_secure(settings: Settings, algorithm: Algorithm) -> None:
    """Raise `InputError` for what secure sums do not cover."""
    deploy, known = settings.deploy, exchange(algorithm)
    if deploy.state != "client":
        raise InputError(
            'deploy.secure needs deploy.state = "client": with "server" it knows every c_i'
        )
    if len(deploy.sites) < 3:
        raise InputError(
            "deploy.secure needs at least 3 sites: of a sum of two each knows the other's part"
        )
    missing = [site for site in deploy.sites if site not in deploy.records]
    if missing and settings.weights == "records":
        raise InputError(
            'deploy.secure with weights = "records" needs the weight of every site to be known '
            f"to all: write a number for {missing[0]} under [deploy.records]"
        )
    if deploy.clip is not None and known.travel and settings.local.steps is None:
        raise InputError(
            f"deploy.clip with deploy.secure and {algorithm.name} needs local.steps: a site does "
            "not know the others' numbers of steps"
        )
    _ = settings.ring  # raises if it is too coarse


def _check_privacy(settings: Settings, privacy: Records, given: dict[str, Any]) -> None:
    """Raise `InputError` for what the private gradient of a site does not cover."""
    local, deploy = settings.local, settings.deploy
    passes = ["epochs"] if local.steps is None else []
    passes += [
        name for name in ("draw", "drop_last") if given.get(name) not in (None, "auto", False)
    ]
    if passes:
        raise InputError(
            f"local.{passes[0]} passes over records in batches that are no Poisson samples, and "
            "their epsilon is another: with [privacy] give local.steps and local.batch_size"
        )
    for site in deploy.sites:
        if site not in deploy.records:
            raise InputError(
                "with [privacy] no site tells how many records it has: write a number for "
                f"{site} under [deploy.records], which is public"
            )
    most = max(deploy.records.values(), default=1)
    if most > 1 and privacy.delta * most >= 1:
        raise InputError(
            f"privacy.delta must be below 1 / {most}, got {privacy.delta:g}: to publish one of so "
            "many records at random would be private"
        )


def _read(table: dict[str, Any], key: str) -> Any:
    """Read a key that simulations have too, with the check and default of `run_config.KEYS`."""
    stated = KEYS[key]
    return stated.read(key, table.get(key.rpartition(".")[2], stated.default))


def _privacy(table: dict[str, Any]) -> Records | None:
    """Read the table `[privacy]`; None without one."""
    names = [key.removeprefix("privacy.") for key in KEYS if key.startswith("privacy.")]
    given = _table(table, "privacy", tuple(names))
    if not given:
        return None
    for name in ("clip", "noise", "delta"):
        if name not in given:
            raise InputError(f"privacy.{name} must be given: [privacy] takes clip, noise, delta")
    read = {name: _read(given, f"privacy.{name}") for name in names}
    if read.pop("unit") != "records":
        raise InputError(
            'a deployment protects single records: leave out privacy.unit ("clients" is simulated)'
        )
    return Records(**read)


def _local(table: dict[str, Any]) -> Local:
    """Read the table `[local]`."""
    schedule = _schedule(table["lr"]) if isinstance(table.get("lr"), dict) else ()
    table = table | {"lr": schedule[0][1]} if schedule else table
    shared = ("steps", "epochs", "batch_size", "lr", "draw", "momentum", "drop_last", "clip_norm")
    given = {name: _read(table, f"local.{name}") for name in shared}
    if given["steps"] is not None and given["epochs"] is not None:
        raise InputError("give either local.steps or local.epochs, one of the two")
    if given["steps"] is None and given["epochs"] is None:
        given["epochs"] = 1
    if isinstance(given["steps"], list):
        raise InputError(
            "a deployment does not take local.steps by client; give one number, or local.epochs"
        )
    if isinstance(given["lr"], str):
        raise InputError(
            f"a deployment does not take local.lr = {given['lr']!r}; give a number above 0"
        )
    optimizer = table.get("optimizer", KEYS["local.optimizer"].default)
    if given["drop_last"] and given["batch_size"] is None:
        raise InputError("local.drop_last needs local.batch_size; a DataLoader has its own")
    return Local(
        **given,
        optimizer=checks.choice("local.optimizer", optimizer, OPTIMIZERS),
        buffers=checks.choice(
            "local.buffers", table.get("buffers", "average"), ("average", "local")
        ),
        schedule=schedule,
    )


def _schedule(table: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Read a table of step sizes by the round from which on they are used."""
    rows = []
    for begin, lr in table.items():
        if not begin.isascii() or not begin.isdigit():
            raise InputError(
                "local.lr must be a number, or a table of rounds such as { 1 = 0.1, 50 = 0.01 }, "
                f"got {begin!r} for a round"
            )
        rows.append((int(begin), checks.number(f"local.lr of round {begin}", lr, above=0)))
    rows.sort()
    if not rows or rows[0][0] != 1 or len({begin for begin, _ in rows}) < len(rows):
        raise InputError(
            "local.lr as a table of rounds must name each once and begin with round 1, as in "
            f"{{ 1 = 0.1, 50 = 0.01 }}, got {checks.shown(table)}"
        )
    return tuple(rows)


def _deploy(table: dict[str, Any]) -> Deploy:
    """Read the table `[deploy]`."""
    sites = table.get("sites", [])
    if not isinstance(sites, list) or not all(
        isinstance(s, str) and NAME.fullmatch(s) for s in sites
    ):
        allowed = (
            "names of at most 64 letters (a to z), digits, - and _, which begin with a letter or "
            "digit"
        )
        raise InputError(f"deploy.sites must be a list of {allowed}, got {checks.shown(sites)}")
    plain = [site.lower() for site in sites]  # for case-insensitive file systems
    if len(set(plain)) != len(sites):
        raise InputError(
            "deploy.sites must name each site once, and not by capitals alone, got "
            f"{checks.shown(sites)}"
        )
    if taken := [site for site in sites if site.lower() in RESERVED]:
        raise InputError(
            f"deploy.sites: {taken[0]!r} is a name of the kit or the system; call the site "
            "otherwise"
        )
    given = Deploy()._asdict() | table
    clip, records, exclude = given["clip"], given["records"], given["exclude"]
    if not isinstance(exclude, (list, tuple)) or not all(isinstance(e, str) for e in exclude):
        raise InputError(
            f'deploy.exclude must be a list of patterns such as ["data"], got '
            f"{checks.shown(exclude)}"
        )
    if not isinstance(records, dict):
        raise InputError(
            f"deploy.records must be a table, written [deploy.records], got {checks.shown(records)}"
        )
    for site in records:
        checks.choice("site in [deploy.records]", site, sites)
    if not isinstance(given["secure"], bool):
        raise InputError(
            f"deploy.secure must be true or false, got {checks.shown(given['secure'])}"
        )
    return Deploy(
        sites=tuple(sites),
        state=checks.choice("deploy.state", given["state"], ("server", "client")),
        deadline=checks.number("deploy.deadline", given["deadline"], above=0),
        quorum=checks.share("deploy.quorum", given["quorum"], "sites"),
        retries=checks.whole("deploy.retries", given["retries"], at_least=0),
        wait=checks.number("deploy.wait", given["wait"], at_least=0),
        clip=None if clip is None else checks.number("deploy.clip", clip, above=0),
        max_records=checks.whole("deploy.max_records", given["max_records"]),
        records={
            site: checks.whole(f"deploy.records.{site}", number) for site, number in records.items()
        },
        exclude=tuple(exclude),
        secure=given["secure"],
        threshold=checks.share("deploy.threshold", given["threshold"], "sites"),
        limit=checks.number("deploy.limit", given["limit"], above=0),
        alert=_command("deploy.alert", given["alert"]),
        alert_after=checks.whole("deploy.alert_after", given["alert_after"]),
        mode=checks.choice("deploy.mode", given["mode"], ("sync", "async")),
        buffer=KEYS["cohort.buffer"].read("deploy.buffer", given["buffer"]),
        staleness=KEYS["cohort.staleness"].read("deploy.staleness", given["staleness"]),
    )


def _command(name: str, value: Any) -> str:
    """Return a command that can be split into words."""
    try:
        if isinstance(value, str):
            shlex.split(value)
            return value
    except ValueError:  # a quotation that does not end
        pass
    raise InputError(f"{name} must be a command and its arguments, got {checks.shown(value)}")


def _table(table: dict[str, Any], name: str, known: tuple[str, ...] | None) -> dict[str, Any]:
    """Return a table of the file, whose keys must be `known`; None allows any."""
    part = table.get(name, {})
    if not isinstance(part, dict):
        raise InputError(f"{name} must be a table, written [{name}], got {checks.shown(part)}")
    if known is not None:
        _check_keys(part, known, f"{name}.")
    return part


def _check_keys(table: dict[str, Any], known: tuple[str, ...], prefix: str) -> None:
    """Raise `InputError` at an unknown key, or one that only simulations take."""
    for key in table:
        if prefix + key in KEYS and key not in known:
            raise InputError(
                f"a deployment does not take {prefix + key}: it is for simulations; leave it out"
            )
        checks.choice("key", prefix + key, [prefix + name for name in known])
