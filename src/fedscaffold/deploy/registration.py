"""Register the keys of sites with the link, and unregister those that were revoked.

`register-sites.sh` of a kit runs this on the server:

    python3 -m fedscaffold.deploy.registration KEYS LINK

KEYS has a file SITE.pub for each site, and in `revoked/` the keys that are not valid any more. LINK
is the name of the link in Flower's configuration. Which node has which key is noted in
`KEYS/registered.json`, as the link does not tell, so that it can be run at any time and does only
what is missing.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.state.files import write_private

__all__ = ["register_keys"]

NOTE = "registered.json"
KNOWN, UNKNOWN = "[code: 23]", "[code: 24]"  # Flower's: a key that is in use, no such node


def register_keys(keys: Path, link: str) -> list[str]:
    """Bring the link's register up to date with a folder of keys.

    Args:
        keys: The folder.
        link: Name of the link in Flower's configuration.

    Returns:
        What was done, a line for each key that was not as it should be.

    Raises:
        InputError: The link did not do it, or does not say which node a revoked key belongs to.
    """
    note = keys / NOTE
    nodes: dict[str, str | None] = json.loads(note.read_text("utf-8")) if note.exists() else {}
    revoked = {_digest(path): path for path in sorted((keys / "revoked").glob("*.pub"))}
    done = []
    for key, path in revoked.items():
        if key in nodes:
            _unregister(path.stem, nodes[key], link)
            del nodes[key]
            write_private(note, json.dumps(nodes, indent=1) + "\n")
            done.append(f"{path.stem}: unregistered")
    for path in sorted(keys.glob("*.pub")):
        # where a kit was copied over an older one, a revoked key may still lie here
        if (key := _digest(path)) not in {*nodes, *revoked}:
            nodes[key] = _register(path, link)
            write_private(note, json.dumps(nodes, indent=1) + "\n")
            number = "known to the link before" if nodes[key] is None else f"node {nodes[key]}"
            done.append(f"{path.stem}: registered, {number}")
    return done


def _register(key: Path, link: str) -> str | None:
    """Register a key and return its node; None if the link has it already, and does not tell."""
    answer = _call_flower("register", str(key), link, "--name", key.stem)
    if answer.get("success"):
        return str(answer["node-id"])
    if KNOWN in (said := str(answer.get("error-message", answer))):
        return None
    raise InputError(f"the key of {key.stem} could not be registered: {said.splitlines()[-1]}")


def _unregister(name: str, node: str | None, link: str) -> None:
    if node is None:
        raise InputError(
            f"which node has the key {name} is not known here: find it by its times with "
            f"`flwr supernode list {link}`, then `flwr supernode unregister NODE {link}`, and "
            f"remove {name}.pub from revoked"
        )
    answer = _call_flower("unregister", node, link)
    said = str(answer.get("error-message", answer))
    if not answer.get("success") and UNKNOWN not in said:
        raise InputError(f"{name} could not be unregistered: {said.splitlines()[-1]}")


def _call_flower(*words: str) -> dict[str, Any]:
    """Call `flwr supernode` and return its answer."""
    command = ["flwr", "supernode", *words, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise InputError(f"`{' '.join(command[:3])}` failed and said: {said[-1]}") from None
    return answer


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    try:
        for line in register_keys(Path(sys.argv[1]), sys.argv[2]) or ["nothing to do"]:
            sys.stdout.write(f"{line}\n")
    except InputError as error:
        sys.exit(f"error: {error}")
