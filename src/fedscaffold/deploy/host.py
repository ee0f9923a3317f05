"""What a deployed server needs of its machine: room on the disk, and a certificate that lasts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

__all__ = ["Host", "read_host"]


class Host(NamedTuple):
    """The machine of a server."""

    disk_free: int
    """Bytes that are free where states are written."""
    certificate_days: float | None
    """Days that the server's certificate lasts; None without one."""


def read_host(home: Path) -> Host:
    """Return what a server has left.

    Args:
        home: The server's folder; in a kit the certificate is beside it.

    >>> read_host(Path(".")).disk_free > 0
    True
    """
    certificate, days = home.absolute().parent / "server.crt", None
    if certificate.is_file():
        from fedscaffold.deploy.keys import days_left

        days = days_left(certificate)
    return Host(shutil.disk_usage(home).free, days)
