"""`deploy bundle`: what support needs to know of a deployment, without data, keys or models.

Only files that are named here are taken. Texts of errors at sites, logs of sites and the engine's
database are left out, as they may hold records; so are apps, states and models.
"""

from __future__ import annotations

import hashlib
import json
import platform
import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold.checks import InputError
from fedscaffold.deploy.errors import FOLDER
from fedscaffold.state.files import write_private

__all__ = ["Bundle", "write_bundle"]

TAKEN = (
    "deployment.json",
    "status.json",
    "metrics.jsonl",
    "audit.jsonl",
    "outcome.json",
    "site.json",
    "federation.toml",
    "nginx.conf",
    "registered.json",
    "link.log",
    "executor.log",
    "keeper.log",
    "server.log",
)
MARKS = ("deployment.json", "status.json", "site.json", "start-link.sh")
"""Files of a deployment's folder, of a site's and of a server's in a kit: one of them is there."""
PASSED = ("engine", "package", "secrets", "state", ".venv")
"""Folders that are not searched."""
PACKAGES = ("fedscaffold", "flwr", "numpy", "torch", "jax", "cryptography")
MOST = 4 << 20  # bytes of the end of a file
FACTS = "facts.json"


class Bundle(NamedTuple):
    """What a bundle holds."""

    path: Path
    files: list[str]
    left_out: int
    """Number of files of the folder that are not in it."""


def write_bundle(folder: Path, out: Path) -> Bundle:
    """Write a zip file about the folder of a deployment, of a site or of a server.

    Args:
        folder: The `--out` folder of a deployment, or a folder of a kit.
        out: The zip file, which must not exist.

    Returns:
        Its contents.

    Raises:
        InputError: The folder is none of a deployment, or the file exists.
    """
    if out.exists():
        raise InputError(f"{out} exists: give another --out")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    inside = {path: path.relative_to(folder) for path in found}
    taken = [
        path
        for path, place in inside.items()
        if path.name in TAKEN and not {*place.parts[:-1]} & {*PASSED, FOLDER}
    ]
    if not any(path.name in MARKS for path in found):
        raise InputError(
            f"{folder} is not the folder of a deployment or of a kit: it has none of "
            f"{', '.join(MARKS)}"
        )
    texts = {inside[path].as_posix(): _end_of(path) for path in taken}
    for name, text in texts.items():
        if b"PRIVATE KEY" in text:
            raise InputError(f"{folder / name} holds a private key: nothing was written")
    errors = [path.stem for path in found if path.parent.name == FOLDER]
    texts[FACTS] = json.dumps(_facts(texts, errors, len(found)), indent=1).encode()
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(texts.items()):
            archive.writestr(name, text)
    write_private(out, packed.getvalue())
    return Bundle(out, sorted(texts), len(found) - len(taken))


def _end_of(path: Path) -> bytes:
    """Return the last bytes of a file, from the beginning of a line."""
    data = path.read_bytes()
    return data if len(data) <= MOST else data[-MOST:].partition(b"\n")[2]


def _facts(texts: dict[str, bytes], errors: list[str], files: int) -> dict[str, Any]:
    """Return the versions here, digests of the files taken, and references of errors at sites."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "files": {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
        "files_in_folder": files,
        "error_references": errors,
    }
