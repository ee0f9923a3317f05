"""Judge a peer: an environment of its own, the suite in a process of it, the verdicts as a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.state.files import write_whole
from papers.peers.catalogue import Peer

__all__ = [
    "VERDICTS",
    "find_checkout",
    "judge",
    "load_verdicts",
    "prepare_environment",
    "save_verdicts",
]

ROOT = Path(__file__).parents[2]
VERDICTS = Path(__file__).parent / "verdicts"
READY = "ready"  # marks an environment whose installation was completed
VERSIONS = ("numpy", "torch")  # recorded of every environment
NAME = re.compile(r"[\w.-]+")  # of the package that a requirement is about
PLACE = re.compile(r"/[^\s()]*/([^\s()/]+)")  # a path of this machine; its last part is kept


def prepare_environment(peer: Peer, folder: Path) -> Path:
    """Return the Python of an environment with the peer's packages, made on first use.

    Args:
        peer: The peer.
        folder: Folder of the environments.

    Raises:
        InputError: If the packages cannot be installed.
    """
    place = folder / peer.environment
    python = place / "bin" / "python"
    if (place / READY).exists():
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(place)], f"{peer.name}: no environment")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, *peer.requirements], f"{peer.name}: its packages cannot be installed")
    if peer.alone:
        _run([*install, "--no-deps", *peer.alone], f"{peer.name} cannot be installed")
    (place / READY).touch()
    return python


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise InputError(f"{failure}: {' '.join(last)}")


def judge(peer: Peer, python: Path, checkouts: Path | None = None) -> dict[str, Any]:
    """Run the whole suite on a peer.

    Args:
        peer: The peer.
        python: The Python of its environment.
        checkouts: Folder that holds the checkouts of projects without a package.

    Returns:
        The verdicts, with versions and the date. The version of a checkout is the commit that it
        is at, which need not be the one that was recorded.

    Raises:
        InputError: If a checkout is missing, or the adapter cannot be run.
    """
    paths, version = [ROOT / "src", ROOT], peer.version
    if checkout := find_checkout(peer, checkouts):
        paths.append(checkout / peer.root)
        version = _commit(checkout)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    suite = [str(python), "-m", "fedscaffold.conformance", peer.target, "--json"]
    began = time.monotonic()
    done = subprocess.run(suite, capture_output=True, text=True, env=environment, check=False)
    try:
        said = json.loads(done.stdout[done.stdout.index('{\n  "target"') :])
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:]
        raise InputError(f"{peer.name}: the suite could not be run: {' '.join(last)}") from None
    rows = {
        row["name"]: [
            row["outcome"],
            _rounded(row["violation"]),
            _rounded(row["tolerance"]),
            PLACE.sub(r"\1", row["note"]),
        ]
        for row in said["verdicts"]
    }
    return {
        "peer": peer.name,
        "version": version,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "versions": _versions(python, peer),
        "c": said["c"],
        "diagnosis": said["diagnosis"],
        "rows": rows,
    }


def _rounded(value: float | None) -> float | None:
    """Return a number with two digits, as many as the verdicts show."""
    return None if value is None else float(f"{value:.1e}")


def find_checkout(peer: Peer, checkouts: Path | None) -> Path | None:
    """Return the folder of a peer's checkout; None for a package.

    Raises:
        InputError: If there is no such folder.
    """
    if not peer.repository:
        return None
    get = (
        f"git clone https://github.com/{peer.repository}, git checkout {peer.version}, and give "
        "--checkouts the folder that holds it"
    )
    if checkouts is None:
        raise InputError(f"{peer.name} has no package: {get}")
    checkout = checkouts / peer.repository.split("/")[1]
    if not (checkout / peer.root).is_dir():
        raise InputError(f"{peer.name}: there is no {checkout / peer.root}: {get}")
    return checkout.resolve()


def _commit(checkout: Path) -> str:
    """Return the commit of a checkout, with `-dirty` if files were changed."""
    ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    done = subprocess.run(ask, cwd=checkout, env=alone, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown, as it is no checkout of git"


def _versions(python: Path, peer: Peer) -> dict[str, str]:
    """Return the versions of Python and of the packages that the peer asks for."""
    asked = [NAME.match(one) for one in (*VERSIONS, *peer.requirements, *peer.alone)]
    names = list(dict.fromkeys(found[0] for found in asked if found))
    ask = (
        "import json, platform, importlib.metadata as m\n"
        f"print(json.dumps({{'Python': platform.python_version(), "
        f"**{{name: m.version(name) for name in {names}}}}}))"
    )
    done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def save_verdicts(verdicts: dict[str, Any], folder: Path) -> Path:
    """Write a peer's verdicts to a file of the folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{verdicts['peer']}.json"
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in verdicts["rows"].items()
    )
    facts = json.dumps({k: v for k, v in verdicts.items() if k != "rows"}, indent=1)
    write_whole(path, f'{facts[:-2]},\n "rows": {{\n{rows}\n }}\n}}\n')
    return path


def load_verdicts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the verdicts of a folder, by peer."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {one["peer"]: one for one in found}
