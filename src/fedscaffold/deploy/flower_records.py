"""Packets as Flower's records (flwr 1.41), which servers and sites exchange.

Arrays are sent as raw bytes under a type name of our own, so they are never decoded by code that
trusts their headers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedscaffold.deploy.packets import BUNDLE, Blob, Packet

__all__ = ["SPARE", "from_record", "package_folder", "to_record"]

RAW = "fedscaffold.raw"  # arrays are raw bytes, not .npy files as flwr's own
SPARE = 60.0
"""Seconds that a message lives beyond the time in which its answer is awaited."""


def to_record(packet: Packet) -> RecordDict:
    """Convert a packet to a Flower record.

    >>> from_record(to_record(Packet({"round": 1}, {"x": Blob("float32", (1,), b"1234")})))
    Packet(facts={'round': 1}, blobs={'x': Blob(dtype='float32', shape=(1,), data=b'1234')})
    """
    arrays = {name: FlowerArray(b.dtype, b.shape, RAW, b.data) for name, b in packet.blobs.items()}
    return RecordDict({"facts": ConfigRecord(dict(packet.facts)), "arrays": ArrayRecord(arrays)})


def from_record(record: RecordDict) -> Packet:
    """Convert a received record to a packet, without validation, which is left to `gate.py`."""
    facts: dict[str, Any] = {}
    blobs: dict[str, Any] = {}
    if set(record) <= {"facts", "arrays"}:
        config, arrays = record.get("facts"), record.get("arrays")
        if isinstance(config, ConfigRecord):
            facts = dict(config)
        if isinstance(arrays, ArrayRecord):
            blobs = {
                name: Blob(a.dtype, tuple(a.shape), a.data) if a.stype == RAW else None
                for name, a in arrays.items()
            }
    return Packet(facts, blobs)


def package_folder() -> Path:
    """Return the folder of the app's package, which Flower has put on the path of imports."""
    return next(Path(place) for place in sys.path if (Path(place) / BUNDLE).is_file())
