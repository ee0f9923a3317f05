"""The files of an app: all that lies beside `app.py`, as one package for the sites.

Left out are hidden files, tests, caches, virtual environments, the folders of runs and kits, and
what `deploy.exclude` names. Links to folders are not followed.

Flower distributes files of a few kinds only, up to 10 MiB in all, so a package is one JSON file
with the contents of all files. The largest ones stay behind where they do not fit: each site takes
them from the copy of the app in its kit, after comparing their digests.
`python3 -m fedscaffold.deploy.app_files APP PACKAGE` makes a package.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedscaffold.checks import InputError
from fedscaffold.deploy.packets import BUNDLE
from fedscaffold.deploy.settings import load
from fedscaffold.parsing import record
from fedscaffold.state.files import make_folder, write_private

__all__ = [
    "APP",
    "BUNDLE",
    "TOML",
    "app_files",
    "copy_app",
    "digest_package",
    "fingerprints",
    "pack_app",
    "unpack_app",
]

APP, TOML = "app.py", "federation.toml"
ROOM = 9 << 20  # compressed bytes of a package; Flower takes 10 MiB
MOST_TRIED = 8 * ROOM  # bytes; larger files are not compressed to see whether they fit
MOST = 4 << 30  # bytes of an app
PROJECT = "pyproject.toml"  # Flower's
CACHES = {"__pycache__", "node_modules"}
# in environments, runs, kits, and what a private site keeps for itself
OTHERS = ("pyvenv.cfg", "deployment.json", "run.json", "ca.crt", "privacy.toml")
TESTS = ("test_*.py", "*_test.py", "conftest.py", "*.pyc")
FLOWER = """\
[project]
name = "federation"
version = "1.0.0"
description = "A federation by fedscaffold"
dependencies = []

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "fedscaffold.deploy.flower_app:server_app"
clientapp = "fedscaffold.deploy.flower_client:client_app"

[tool.flwr.app.config]
home = ""
files = ""
"""


def app_files(folder: Path, exclude: Iterable[str] = ()) -> dict[str, Path]:
    """Return the files of an app, without its settings, by their paths within its folder.

    Args:
        folder: The app's folder.
        exclude: Patterns of files and folders to leave out, such as "data" or "*.csv".
    """
    patterns = [pattern.rstrip("/") for pattern in exclude]

    def wanted(path: str) -> bool:
        name = path.rpartition("/")[2]
        return not name.startswith(".") and not any(
            fnmatch.fnmatchcase(part, pattern) for pattern in patterns for part in (path, name)
        )

    found: dict[str, Path] = {}
    for here, folders, names in os.walk(folder):
        inside = Path(here).relative_to(folder)
        folders[:] = [
            one
            for one in folders
            if one not in CACHES
            and wanted((inside / one).as_posix())
            and not any((Path(here) / one / mark).exists() for mark in OTHERS)
        ]
        for name in names:
            path = (inside / name).as_posix()
            test = any(fnmatch.fnmatchcase(name, pattern) for pattern in TESTS)
            if path not in (TOML, PROJECT, BUNDLE) and not test and wanted(path):
                found[path] = Path(here) / name
    sizes = {path: place.stat().st_size for path, place in found.items() if place.is_file()}
    if sum(sizes.values()) > MOST:
        largest = max(sizes, key=lambda path: sizes[path])
        raise InputError(
            f"{folder} holds {sum(sizes.values()) >> 30} GiB, {largest} the largest, and all of it "
            "is part of the app: name what is not in deploy.exclude, such as data, or move it"
        )
    return dict(sorted(found.items()))


def fingerprints(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of the path and the content of each file."""
    prints = {}
    for path, place in files.items():
        try:
            with place.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"{place} belongs to the app and cannot be read: {error}") from None
        prints[path] = hashlib.sha256(f"{path}\0{content}".encode()).hexdigest()[:32]
    return prints


def copy_app(app: Path, target: Path) -> None:
    """Copy an app: its settings and files."""
    shutil.rmtree(target, ignore_errors=True)
    make_folder(target, private=True)
    files = app_files(app, load(app / TOML).deploy.exclude)
    for path, place in {TOML: app / TOML, **files}.items():
        _copy(place, target / path)


def pack_app(app: Path, target: Path) -> list[str]:
    """Write an app as a project that Flower distributes.

    Returns:
        The files that do not fit, which every site must have already.
    """
    shutil.rmtree(target, ignore_errors=True)
    make_folder(target, private=True)
    files = app_files(app, load(app / TOML).deploy.exclude)
    prints, room = fingerprints(files), ROOM
    data: dict[str, str | None] = dict.fromkeys(files)
    for path in sorted(files, key=lambda path: files[path].stat().st_size):
        if files[path].stat().st_size <= MOST_TRIED:
            packed = zlib.compress(files[path].read_bytes())
            if len(packed) <= room:
                room -= len(packed)
                data[path] = base64.b64encode(packed).decode()
    rows = {path: [prints[path], data[path]] for path in files}
    write_private(target / BUNDLE, json.dumps({"files": rows}))
    write_private(target / PROJECT, FLOWER)
    _copy(app / TOML, target / TOML)
    return [path for path, content in data.items() if content is None]


def digest_package(package: Path) -> str:
    """Return a digest of a packed app, its settings included."""
    text = (package / BUNDLE).read_bytes() + (package / TOML).read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


def unpack_app(package: Path, folder: Path, beside: Path | None) -> Path:
    """Unpack an app, unless that was done before, and return its folder.

    Args:
        package: The folder that `pack_app` wrote, as Flower unpacked it.
        folder: Where to keep unpacked apps.
        beside: A copy of the app, for files that did not fit into the package.

    Raises:
        InputError: If such a file is missing in the copy, or another one.
    """
    target = folder / digest_package(package)
    if target.is_dir():
        return target
    temporary = folder / f"{target.name}.{os.getpid()}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    for path, (print_, data) in record(package / BUNDLE, files=dict)["files"].items():
        place = temporary / path
        if data is not None:
            make_folder(place.parent, private=True)
            write_private(place, zlib.decompress(base64.b64decode(data)))
            continue
        source = None if beside is None else beside / path
        if source is None or not source.is_file() or fingerprints({path: source})[path] != print_:
            raise InputError(
                f"{path} of the app is too large to be sent, and "
                f"{'no copy' if source is None or not source.is_file() else 'another file'} is "
                f"here: put the server's at {source or path}"
            )
        _copy(source, place)
    _copy(package / TOML, temporary / TOML)
    try:
        temporary.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(temporary)
    return target


def _copy(source: Path, target: Path) -> None:
    """Copy a file of any size; only its owner can read the copy."""
    make_folder(target.parent, private=True)
    shutil.copyfile(source, target)
    target.chmod(0o600)


if __name__ == "__main__":
    import sys

    pack_app(Path(sys.argv[1]), Path(sys.argv[2]))
