"""The engine's process for a message (`flwr-clientapp`), without what only a SuperNode needs.

Flower starts the command anew for every message, and half of its start are imports of the
SuperNode's own modules (SQL, migrations), which stand in one package with it. Its executor looks
for the command on PATH, so a folder that comes first there can hold one that leaves them out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

__all__ = ["main", "write_command"]

NODE = "flwr.supernode.cli.flower_supernode"
# a shell script and a Python program in one: a path of Python may be too long for a first line
COMMAND = """\
#!/bin/sh
'''exec' python3 -P "$0" "$@"
'''
from fedscaffold.deploy.flower_process import main

main()
"""


def write_command(folder: Path) -> None:
    """Write the command into a folder, which must come before flwr's own on PATH."""
    from fedscaffold.state.files import make_folder, write_private  # not for every message

    make_folder(folder, private=True)
    write_private(folder / "flwr-clientapp", COMMAND)
    (folder / "flwr-clientapp").chmod(0o700)


def main() -> None:
    """Run flwr's own command."""
    unused = ModuleType(NODE)
    unused.flower_supernode = None  # type: ignore[attr-defined]
    sys.modules[NODE] = unused
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()
