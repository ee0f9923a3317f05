"""The bare `fedscaffold` command, `--version`, and `doctor`, which checks the installation.

Each finding of `doctor` is ok, warning or missing, with a remedy. It works when everything else is
missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import typer
from packaging.requirements import Requirement

import fedscaffold
from fedscaffold.cli.verbs import Json, app, print_answer
from fedscaffold.data.find_files import VARIABLE, exists
from fedscaffold.data.loaders import DEBIAN, HOSPITALS

__all__ = ["FILES", "Finding", "doctor", "examine", "usable", "welcome"]

State: TypeAlias = Literal["ok", "warning", "missing"]

PYTHON = (3, 11)
EXTRAS = {
    "sim": "to simulate, plan and compare",
    "cli": "for this command line",
    "report": "for pages and figures",
    "deploy": "for federations over a network",
    "torch": "for torch models in deployments",
    "log": "for TensorBoard event files",
}
NEEDED = ("sim", "cli")
MODULES = {"scikit-learn": "sklearn"}  # modules whose name differs from their package's
FILES = {
    "emnist": ("emnist", ["emnist_byclass62.npz"]),
    "emnist47": ("emnist", ["emnist_balanced47_small.npz"]),
    "emnist47-tiny": ("emnist", ["emnist_balanced47_tiny.npz"]),
    "heart": ("heart", [f"processed.{hospital}.data" for hospital in HOSPITALS]),
    "a9a": ("libsvm", ["a9a", "a9a.t"]),
    "mushrooms": ("libsvm", ["mushrooms"]),
    "fashion-mnist": (
        "fashion-mnist",
        [f"{p}-{k}-ubyte" for p in ("train", "t10k") for k in ("images-idx3", "labels-idx1")],
    ),
}
SPARE = 1 << 30  # bytes of disk below which a long run with checkpoints may not fit
TOOLS = ("flower-superlink", "flower-superexec", "flower-supernode", "flwr")
NEXT = {
    "demo": ("demo", "compare four algorithms on digits; a page to look at"),
    "theatre": ("theatre", "see clients drift, and how not to"),
    "run": ("run CONFIG.toml", "run one configuration; docs/command-line.md has one"),
    "compare": ("compare --help", "several algorithms, over seeds"),
    "plan": ("plan --help", "what theory says: step size, local steps, rounds"),
    "deploy": ("deploy new DIR", "a federation over a network, from one file"),
    "doctor": ("doctor", "check this installation"),
}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedscaffold {fedscaffold.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def welcome(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Say what this is and what to type next."""
    if context.invoked_subcommand is None:
        verbs = getattr(context.command, "commands", {})
        typed = [line for verb, line in NEXT.items() if verb in verbs]
        typer.echo(f"fedscaffold {fedscaffold.__version__}: {app.info.help}\n\nWhat to type next:")
        typer.echo("\n".join(f"  fedscaffold {words:<17}{purpose}" for words, purpose in typed))
        typer.echo(
            "\nAll verbs: fedscaffold --help. One of them, with an example: fedscaffold VERB --help"
        )


@app.command(epilog="Example: fedscaffold doctor --json")
def doctor(as_json: Json = False) -> int:
    """Check this installation: extras, versions, devices, data, cache, ports.

    Exit code 1 if it is not usable.
    """
    findings = examine()
    good = usable(findings)
    lines = [f"{finding.state:<8} {finding.what}: {finding.said}" for finding in findings]
    for j, finding in reversed(list(enumerate(findings))):
        lines[j + 1 : j + 1] = [f"{'':<8}   {finding.mend}"] if finding.mend else []
    print_answer(
        {"usable": good, "findings": [finding._asdict() for finding in findings]},
        [*lines, "", "usable" if good else "not usable: mend what is needed and missing"],
        as_json,
    )
    return 0 if good else 1


class Finding(NamedTuple):
    """Result of one check."""

    what: str
    state: State
    said: str
    mend: str = ""
    needed: bool = False
    """Whether it is required."""


def examine() -> list[Finding]:
    """Run all checks.

    >>> examine()[0].what
    'Python'
    """
    return [_python(), *_extras(), _jax(), _data(), _cache(), _disk(), _port(), *_tools(), _clock()]


def usable(findings: list[Finding]) -> bool:
    """Return whether everything that is required is present.

    >>> usable([Finding("extra torch", "missing", "torch")])
    True
    """
    return not any(finding.needed and finding.state == "missing" for finding in findings)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < PYTHON:
        return Finding(
            "Python",
            "missing",
            version,
            f"install Python {PYTHON[0]}.{PYTHON[1]} or later",
            needed=True,
        )
    return Finding(
        "Python", "ok", f"{version} on {platform.system()} {platform.machine()}", needed=True
    )


def _extras() -> Iterator[Finding]:
    """Yield one finding for the package and one for each extra, from the installed requirements."""
    try:
        wanted = metadata.requires("fedscaffold") or []
        yield Finding("fedscaffold", "ok", metadata.version("fedscaffold"))
    except metadata.PackageNotFoundError:
        yield Finding(
            "fedscaffold", "warning", "found, but not installed", "pip install 'fedscaffold[all]'"
        )
        return
    requirements = [Requirement(text) for text in wanted]
    for extra, purpose in EXTRAS.items():
        yield _extra(extra, purpose, [one for one in requirements if _belongs_to(extra, one)])


def _belongs_to(extra: str, requirement: Requirement) -> bool:
    """Return whether a requirement belongs to an extra; unconditional ones count for `sim`."""
    if requirement.marker is None:
        return extra == "sim"
    return requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate(
        {"extra": ""}
    )


def _extra(extra: str, purpose: str, wanted: list[Requirement]) -> Finding:
    what, mend = f"extra {extra}", f"pip install 'fedscaffold[{extra}]'  ({purpose})"
    needed = extra in NEEDED
    versions = {one.name: _version(one.name) for one in wanted}
    absent = [package for package, version in versions.items() if version is None]
    if not wanted:
        return Finding(what, "warning", "unknown to the version that was installed", mend, needed)
    if absent:
        return Finding(what, "missing", f"{', '.join(absent)} not installed", mend, needed)
    strange = [
        f"{one.name} {versions[one.name]} ({one.specifier})"
        for one in wanted
        if not one.specifier.contains(versions[one.name] or "", prereleases=True)
    ]
    if strange:
        return Finding(
            what, "warning", f"not a version we support: {', '.join(strange)}", mend, needed
        )
    return Finding(
        what,
        "ok",
        ", ".join(f"{package} {version}" for package, version in versions.items()),
        "",
        needed,
    )


def _version(package: str) -> str | None:
    module = MODULES.get(package, package.replace("-", "_"))
    try:
        return metadata.version(package) if util.find_spec(module) else None
    except metadata.PackageNotFoundError:
        return None


def _jax() -> Finding:
    """Check that JAX computes; report devices and threads."""
    try:
        import jax

        right = float(jax.numpy.arange(4.0).sum()) == 6.0
        devices = ", ".join(f"{device.platform} {device.id}" for device in jax.devices())
    except Exception as error:  # any failure is the finding
        reason = (str(error).splitlines() or [""])[0]
        return Finding(
            "JAX",
            "missing",
            f"does not start: {reason}",
            "pip install --upgrade 'fedscaffold[sim]'",
            True,
        )
    if not right:
        return Finding(
            "JAX", "missing", "computes 0 + 1 + 2 + 3 wrong", "reinstall jax and jaxlib", True
        )
    from fedscaffold.simulation.threads import threads

    cores = f"{threads()} for large local steps, 1 for small ones"
    return Finding("JAX", "ok", f"devices: {devices}; cores of a run: {cores}", "", True)


def _data() -> Finding:
    """Check which data sets are available; digits always is."""
    root = os.environ.get(VARIABLE, "")
    mend = (
        f"set {VARIABLE} to the folder with your copies; docs/data.md says where they are to be had"
    )
    if root and not Path(root).expanduser().is_dir():
        return Finding("data", "warning", f"{VARIABLE} names {root}, which is no folder", mend)
    places = [Path(root).expanduser()] if root else []
    here = [name for name, (within, files) in FILES.items() if _is_available(places, within, files)]
    absent = [name for name in FILES if name not in here]
    said = f"{', '.join(['digits', *here])}" + (
        f"; not at hand: {', '.join(absent)}" if absent else ""
    )
    return Finding("data", "ok" if here else "warning", said, mend if absent else "")


def _is_available(roots: list[Path], within: str, files: list[str]) -> bool:
    places = [place for root in roots for place in (root / within, root)] + [DEBIAN]
    return all(
        any(exists(place / (file + end)) for place in places for end in ("", ".gz"))
        for file in files
    )


def _cache() -> Finding:
    """Check that the folder of compiled programs can be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or home / "fedscaffold" / "jax")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("cache", "ok", f"{folder} can be written")
    except OSError as error:
        mend = (
            "set JAX_COMPILATION_CACHE_DIR to a folder that can be; without one every process "
            "compiles anew"
        )
        return Finding(
            "cache", "warning", f"{folder} cannot be written ({type(error).__name__})", mend
        )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    said = f"{free / 1e9:.1f} GB free here"
    if free < SPARE:
        return Finding(
            "disk", "warning", said, "free some, or send runs elsewhere: --set output.dir=DIR"
        )
    return Finding("disk", "ok", said)


def _port() -> Finding:
    """Check that a loopback port can be bound, which local federations and live pages need."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding(
                "loopback", "ok", f"127.0.0.1 lends ports, such as {server.getsockname()[1]}"
            )
    except OSError as error:
        mend = "allow 127.0.0.1 in the sandbox or firewall; `deploy local` and live pages need it"
        return Finding("loopback", "warning", f"no port on 127.0.0.1 ({error.strerror})", mend)


def _tools() -> Iterator[Finding]:
    """Check for Flower's programs, if Flower is installed."""
    if util.find_spec("flwr") is None:
        return
    beside = Path(sys.executable).parent
    absent = [tool for tool in TOOLS if not (shutil.which(tool) or (beside / tool).exists())]
    if absent:
        mend = "pip install --force-reinstall 'fedscaffold[deploy]', and its bin folder on the PATH"
        yield Finding("Flower's programs", "warning", f"{', '.join(absent)} not found", mend)
    else:
        yield Finding("Flower's programs", "ok", ", ".join(TOOLS))


def _clock() -> Finding:
    """Check the clock against our own files.

    If it is behind, certificates will seem not yet valid.
    """
    now, installed = time.time(), Path(__file__).stat().st_mtime
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed - 60:
        return Finding(
            "clock",
            "warning",
            f"{said} is before this was installed",
            "set it; certificates depend on it",
        )
    return Finding("clock", "ok", said)
