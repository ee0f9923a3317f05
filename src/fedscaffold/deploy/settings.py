"""What a federation is told: one TOML with the simulator's keys for the algorithm, and a table for the deployment.

    seed = 0
    rounds = 20
    weights = "equal"            # or "records"
    precision = "float32"        # or "float64"
    [algorithm]
    name = "scaffold"            # and its own parameters: option, server_lr, mu ...
    [local]
    epochs = 1                   # or steps
    batch_size = 32
    lr = 0.1
    [cohort]
    size = 1.0
    [deploy]
    sites = ["north", "south"]

An unknown key is refused with the nearest known one. Standard library only: a client needs no more to read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, make
from fedscaffold.checks import InputError
from fedscaffold.deploy.schema import digest_of
from fedscaffold.parsing import toml

__all__ = ["Deploy", "Local", "Settings", "algorithm_of", "load", "parse"]

DEPLOYABLE = {"name", "direction", "server", "shift", "remember", "at_x", "one_step", "by_move", "normalised"}
MOST = 2**31 - 1  # rounds, steps and epochs are counted in 32 bits, as in the simulator
OPTIMIZERS = ("sgd", "momentum", "adam", "own")
RESERVED = {
    "app", "authority", "ca", "engine", "executor", "hub", "keys", "link", "logs", "run", "secrets", "server", "site",
    "sites", "state", "superexec",  # folders and files of a federation
    "aux", "con", "nul", "prn", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),  # devices of Windows
}  # fmt: skip


class Local(NamedTuple):
    """What a client does in a round."""

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | float | None = None
    lr: float = 0.1
    draw: str = "auto"
    optimizer: str = "sgd"
    """sgd, momentum, adam, or "own": the one that the app makes itself."""
    momentum: float = 0.9
    buffers: str = "average"
    """What becomes of BatchNorm's running means and the like: "average" over the clients, or "local" to each."""


class Deploy(NamedTuple):
    """How the federation is run."""

    sites: tuple[str, ...] = ()
    """Who may take part, by name."""
    state: str = "server"
    """Who keeps the c_i: "server", or "client" in a durable file."""
    deadline: float = 600.0
    """Seconds that a round may take."""
    quorum: float | int = 0.5
    """Share or number of the cohort that must be heard for a round to count."""
    retries: int = 10
    """Rounds in a row that may fail their quorum before the run stops."""
    wait: float = 300.0
    """Seconds to wait for the sites before the first round."""
    clip: float | None = None
    """Largest norm of a client's pair (move, change of c_i), in units of the model."""
    max_records: int = 10**9
    """Most records that a site may claim."""
    records: dict[str, int] = {}  # noqa: RUF012 (never changed)
    """The operator's word on sites' numbers of records; of others, their first word counts."""


class Settings(NamedTuple):
    """Everything that makes a deployment."""

    seed: int = 0
    rounds: int = 100
    weights: str = "equal"
    precision: str = "float32"
    evaluate_every: int = 1
    algorithm: dict[str, Any] = {"name": "scaffold"}  # noqa: RUF012 (never changed)
    local: Local = Local(epochs=1)
    cohort: float | int = 1.0
    deploy: Deploy = Deploy()

    @property
    def digest(self) -> str:
        """Fingerprint of what server and clients must agree on: all that changes the mathematics of a client."""
        return digest_of([self.seed, self.precision, self.algorithm, list(self.local), self.deploy.state])

    @property
    def plain(self) -> bool:
        """Whether (x - y) / (K lr) is the clients' mean direction."""
        return self.local.optimizer == "sgd"


def load(path: Path | str) -> Settings:
    """Read the settings of a deployment from a TOML file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; `fedscaffold deploy new DIR` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, source: str = "settings") -> Settings:
    r"""Make settings from TOML text.

    >>> parse("rounds = 5\n[local]\nsteps = 3\nlr = 0.2").local.lr
    0.2
    >>> parse("[deploy]\nquorm = 2")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: settings: unknown key 'deploy.quorm' (did you mean 'deploy.quorum'?); known: ...
    """
    table = toml(text, source)
    try:
        return _checked(table)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def algorithm_of(settings: Settings) -> Algorithm:
    r"""The algorithm that the settings name; refused where a client or the gate could not follow it.

    >>> algorithm_of(parse("[algorithm]\nname = 'fedprox'\nmu = 0.5")).name
    'fedprox'
    """
    parameters = {key: value for key, value in settings.algorithm.items() if key != "name"}
    algorithm = make(settings.algorithm["name"], **parameters)
    for field, value in algorithm._asdict().items():
        if field not in DEPLOYABLE and value != algorithm._field_defaults.get(field):
            raise InputError(f"{algorithm.name} cannot be deployed yet, as it uses {field!r}; simulate it instead")
    return algorithm


def _checked(table: dict[str, Any]) -> Settings:
    _known(table, (*Settings._fields,), "")
    local = _table(table, "local", Local._fields)
    deploy = _table(table, "deploy", Deploy._fields)
    cohort = _table(table, "cohort", ("size",))
    algorithm = {"name": "scaffold", **_table(table, "algorithm", None)}
    settings = Settings(
        checks.whole("seed", table.get("seed", 0), at_least=0, at_most=2**63 - 1),
        checks.whole("rounds", table.get("rounds", 100), at_most=MOST),
        checks.choice("weights", table.get("weights", "equal"), ("equal", "records")),
        checks.choice("precision", table.get("precision", "float32"), ("float32", "float64")),
        checks.whole("evaluate_every", table.get("evaluate_every", 1)),
        algorithm,
        _local(local),
        checks.share("cohort.size", cohort.get("size", 1.0), "sites"),
        _deploy(deploy),
    )
    if algorithm_of(settings).normalised and not settings.plain:
        raise InputError(f"{algorithm['name']} needs local.optimizer = 'sgd': it divides by the distance travelled")
    if settings.deploy.clip is not None and settings.deploy.state == "client":
        raise InputError('deploy.clip needs deploy.state = "server": a client that was clipped must know it')
    return settings


def _local(table: dict[str, Any]) -> Local:
    steps, epochs = table.get("steps"), table.get("epochs")
    if steps is None and epochs is None:
        epochs = 1
    if steps is not None and epochs is not None:
        raise InputError("give either local.steps or local.epochs, one of the two")
    batch = table.get("batch_size")
    return Local(
        None if steps is None else checks.whole("local.steps", steps, at_most=MOST),
        None if epochs is None else checks.whole("local.epochs", epochs, at_most=MOST),
        None if batch is None else checks.share("local.batch_size", batch, "records"),
        checks.number("local.lr", table.get("lr", 0.1), above=0),
        checks.choice("local.draw", table.get("draw", "auto"), ("auto", "replacement", "shuffle")),
        checks.choice("local.optimizer", table.get("optimizer", "sgd"), OPTIMIZERS),
        checks.number("local.momentum", table.get("momentum", 0.9), at_least=0),
        checks.choice("local.buffers", table.get("buffers", "average"), ("average", "local")),
    )


def _deploy(table: dict[str, Any]) -> Deploy:
    sites = table.get("sites", [])
    if not isinstance(sites, list) or not all(isinstance(s, str) and _is_name(s) for s in sites):
        allowed = "names of at most 64 letters (a to z), digits, - and _, which begin with a letter or digit"
        raise InputError(f"deploy.sites must be a list of {allowed}, got {checks.shown(sites)}")
    plain = [site.lower() for site in sites]  # as file systems see them that do not tell A from a
    if len(set(plain)) != len(sites):
        raise InputError(f"deploy.sites must name each site once, and not by capitals alone, got {checks.shown(sites)}")
    if taken := [site for site in sites if site.lower() in RESERVED]:
        raise InputError(f"deploy.sites: {taken[0]!r} is a name of the kit or the system; call the site otherwise")
    clip, records = table.get("clip"), table.get("records", {})
    if not isinstance(records, dict):
        raise InputError(f"deploy.records must be a table, written [deploy.records], got {checks.shown(records)}")
    for site in records:
        checks.choice("site in [deploy.records]", site, sites)
    return Deploy(
        tuple(sites),
        checks.choice("deploy.state", table.get("state", "server"), ("server", "client")),
        checks.number("deploy.deadline", table.get("deadline", 600.0), above=0),
        checks.share("deploy.quorum", table.get("quorum", 0.5), "sites"),
        checks.whole("deploy.retries", table.get("retries", 10), at_least=0),
        checks.number("deploy.wait", table.get("wait", 300.0), at_least=0),
        None if clip is None else checks.number("deploy.clip", clip, above=0),
        checks.whole("deploy.max_records", table.get("max_records", 10**9)),
        {site: checks.whole(f"deploy.records.{site}", number) for site, number in records.items()},
    )


def _is_name(text: str) -> bool:
    known = all(c.isascii() and (c.isalnum() or c in "-_") for c in text)
    return 0 < len(text) <= 64 and known and text[0].isalnum()


def _table(table: dict[str, Any], name: str, known: tuple[str, ...] | None) -> dict[str, Any]:
    part = table.get(name, {})
    if not isinstance(part, dict):
        raise InputError(f"{name} must be a table, written [{name}], got {checks.shown(part)}")
    if known is not None:
        _known(part, known, f"{name}.")
    return part


def _known(table: dict[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in table:
        checks.choice("key", prefix + key, [prefix + name for name in known])
