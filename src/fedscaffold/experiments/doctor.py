"""Is this installation fit for use? Every line says ok, warning or missing, and how to mend what is not ok.

Only the standard library and NumPy are needed to ask, so that the answer comes also where everything else is missing.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from fedscaffold.data.files import VARIABLE, exists
from fedscaffold.data.loaders import DEBIAN, HOSPITALS

__all__ = ["FILES", "Finding", "examine", "usable"]

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
MODULES = {"scikit-learn": "sklearn"}  # where the module is called otherwise than its package
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


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    state: State
    said: str
    mend: str = ""
    needed: bool = False
    """Whether nothing works without it."""


def examine() -> list[Finding]:
    """Look at everything.

    >>> examine()[0].what
    'Python'
    """
    return [_python(), *_extras(), _jax(), _data(), _cache(), _disk(), _port(), *_tools(), _clock()]


def usable(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is missing.

    >>> usable([Finding("extra torch", "missing", "torch")])
    True
    """
    return not any(finding.needed and finding.state == "missing" for finding in findings)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < PYTHON:
        return Finding("Python", "missing", version, f"install Python {PYTHON[0]}.{PYTHON[1]} or later", needed=True)
    return Finding("Python", "ok", f"{version} on {platform.system()} {platform.machine()}", needed=True)


def _extras() -> Iterator[Finding]:
    """One finding for what is always needed, one for each extra; by the requirements we were installed with."""
    try:
        wanted = metadata.requires("fedscaffold") or []
        yield Finding("fedscaffold", "ok", metadata.version("fedscaffold"))
    except metadata.PackageNotFoundError:
        yield Finding("fedscaffold", "warning", "found, but not installed", "pip install 'fedscaffold[all]'")
        return
    for extra, purpose in EXTRAS.items():
        mine = [r.partition(";")[0] for r in wanted if re.search(rf"extra == ['\"]{extra}['\"]", r)]
        base = [r for r in wanted if ";" not in r] if extra == "sim" else []
        yield _extra(extra, purpose, [*base, *mine])


def _extra(extra: str, purpose: str, wanted: list[str]) -> Finding:
    what, mend = f"extra {extra}", f"pip install 'fedscaffold[{extra}]'  ({purpose})"
    needed = extra in NEEDED
    name = re.compile(r"[\w.-]+")
    pairs = [(found.group(), text[found.end() :].strip()) for text in wanted if (found := name.match(text))]
    versions = {package: _version(package) for package, _ in pairs}
    absent = [package for package, version in versions.items() if version is None]
    if not pairs:
        return Finding(what, "warning", "unknown to the version that was installed", mend, needed)
    if absent:
        return Finding(what, "missing", f"{', '.join(absent)} not installed", mend, needed)
    strange = [
        f"{package} {versions[package]} ({bounds})"
        for package, bounds in pairs
        if not within(versions[package] or "", bounds)
    ]
    if strange:
        return Finding(what, "warning", f"not a version we support: {', '.join(strange)}", mend, needed)
    return Finding(what, "ok", ", ".join(f"{package} {version}" for package, version in versions.items()), "", needed)


def _version(package: str) -> str | None:
    module = MODULES.get(package, package.replace("-", "_"))
    try:
        return metadata.version(package) if util.find_spec(module) else None
    except metadata.PackageNotFoundError:
        return None


def within(version: str, bounds: str) -> bool:
    """Whether a version keeps bounds such as ">=0.10,<0.11"; >=, < and == are used, and only numbers count.

    >>> within("0.10.2", "<0.11,>=0.10"), within("0.11.0", "<0.11,>=0.10"), within("2.0", ">=2")
    (True, False, True)
    """

    def key(text: str) -> list[int]:
        numbers = [int(part) for part in re.findall(r"\d+", text)[:3]]
        return numbers + [0] * (3 - len(numbers))

    least = [key(text) for text in re.findall(r">=([\d.]+)", bounds)]
    below = [key(text) for text in re.findall(r"<([\d.]+)", bounds)]
    same = [key(text) for text in re.findall(r"==([\d.]+)", bounds)]
    mine = key(version)
    return all(mine >= b for b in least) and all(mine < b for b in below) and all(mine == b for b in same)


def _jax() -> Finding:
    """Whether JAX computes, on what, and with how many threads."""
    try:
        import jax

        right = float(jax.numpy.arange(4.0).sum()) == 6.0
        devices = ", ".join(f"{device.platform} {device.id}" for device in jax.devices())
    except Exception as error:  # whatever stands in its way is the finding
        reason = (str(error).splitlines() or [""])[0]
        return Finding("JAX", "missing", f"does not start: {reason}", "pip install --upgrade 'fedscaffold[sim]'", True)
    if not right:
        return Finding("JAX", "missing", "computes 0 + 1 + 2 + 3 wrong", "reinstall jax and jaxlib", True)
    threads = os.environ.get("PJRT_NPROC") or f"{os.cpu_count()}, or 1 for small steps"
    return Finding("JAX", "ok", f"devices: {devices}; threads: {threads}", "", True)


def _data() -> Finding:
    """Which data sets are at hand; digits always are."""
    root = os.environ.get(VARIABLE, "")
    mend = f"set {VARIABLE} to the folder with your copies; docs/data.md says where they are to be had"
    if root and not Path(root).expanduser().is_dir():
        return Finding("data", "warning", f"{VARIABLE} names {root}, which is no folder", mend)
    places = [Path(root).expanduser()] if root else []
    here = [name for name, (within, files) in FILES.items() if _at_hand(places, within, files)]
    absent = [name for name in FILES if name not in here]
    said = f"{', '.join(['digits', *here])}" + (f"; not at hand: {', '.join(absent)}" if absent else "")
    return Finding("data", "ok" if here else "warning", said, mend if absent else "")


def _at_hand(roots: list[Path], within: str, files: list[str]) -> bool:
    places = [place for root in roots for place in (root / within, root)] + [DEBIAN]
    return all(any(exists(place / (file + end)) for place in places for end in ("", ".gz")) for file in files)


def _cache() -> Finding:
    """The folder of compiled programs."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or home / "fedscaffold" / "jax")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("cache", "ok", f"{folder} can be written")
    except OSError as error:
        mend = "set JAX_COMPILATION_CACHE_DIR to a folder that can be; without one every process compiles anew"
        return Finding("cache", "warning", f"{folder} cannot be written ({type(error).__name__})", mend)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    said = f"{free / 1e9:.1f} GB free here"
    if free < SPARE:
        return Finding("disk", "warning", said, "free some, or send runs elsewhere: --set output.dir=DIR")
    return Finding("disk", "ok", said)


def _port() -> Finding:
    """Whether a loopback port can be bound: federations on this machine and live pages need one."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding("loopback", "ok", f"127.0.0.1 lends ports, such as {server.getsockname()[1]}")
    except OSError as error:
        mend = "allow 127.0.0.1 in the sandbox or firewall; `deploy local` and live pages need it"
        return Finding("loopback", "warning", f"no port on 127.0.0.1 ({error.strerror})", mend)


def _tools() -> Iterator[Finding]:
    """Flower's programs, where Flower is."""
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
    """A clock that is behind our own files is wrong, and certificates will seem not yet valid."""
    now, installed = time.time(), Path(__file__).stat().st_mtime
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed - 60:
        return Finding("clock", "warning", f"{said} is before this was installed", "set it; certificates depend on it")
    return Finding("clock", "ok", said)
