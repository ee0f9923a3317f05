"""The engine's link (`flower-superlink`), with the pieces of messages in files.

Flower's own link keeps the pieces that it cuts arrays into (5 MB each) in the database of its
state. There it takes tens of seconds to remove a message of a large model, and whatever else writes
fails after five, since SQLite has one writer: heartbeats, polls, and the executor, which ends with
the server app. Here the database holds the name of a file instead of a piece.

`python -m fedscaffold.deploy.flower_link` takes the arguments of `flower-superlink`.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from flwr.supercore import sql_mixin
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.objectstore_models import StoredObject
from sqlalchemy import event, func, select, update

from fedscaffold.state.files import make_folder

__all__ = ["FileObjectStore", "main"]

BUSY = 20.0  # seconds for which a writer waits for another; calls are repeated after 30
NAME = 32  # length of a file's name
BOOT = Path("/proc/sys/kernel/random/boot_id")


class FileObjectStore(SqlObjectStore):
    """Flower's object store with the objects in files, each of a name of its own.

    A file that is being removed is therefore never that of an object that comes again. Files are
    not flushed to the disk: those from before a restart of the machine are not trusted.

    Args:
        database: Path of the database; files are in a folder beside it.
    """

    def __init__(self, database: str) -> None:
        super().__init__(database, verify=False)
        self.folder = Path(database).with_suffix(".objects")

    def initialize(self, log_queries: bool = False, **more: Any) -> list[str]:
        """Open the database; objects without a file are asked for again, and the rest removed."""
        tables = super().initialize(log_queries, **more)
        make_folder(self.folder, private=True)
        boot, here = self.folder / "boot", BOOT.read_text("utf-8") if BOOT.exists() else ""
        files = {path.name for path in self.folder.iterdir()} - {boot.name}
        trusted = boot.exists() and here and boot.read_text("utf-8") == here
        with self.session() as session:
            named = select(StoredObject.object_id, StoredObject.content).where(
                func.length(StoredObject.content) == NAME
            )
            rows = {one: bytes(name).decode() for one, name in session.execute(named).all()}
            kept = {one: name for one, name in rows.items() if trusted and name in files}
            there = select(StoredObject.object_id).where(StoredObject.is_available == 1)
            for one in set(session.scalars(there).all()) - set(kept):
                which = update(StoredObject).where(StoredObject.object_id == one)
                session.execute(which.values(content=b"", is_available=0))
        for name in files - set(kept.values()):
            (self.folder / name).unlink()
        boot.write_text(here, "utf-8")
        return tables

    def put(self, object_id: str, object_content: bytes) -> None:
        """Store an object, unless it is there."""
        if object_id != get_object_id(object_content):
            raise ValueError(f"object {object_id} has other content")
        validate_object_content(content=object_content)
        name = uuid.uuid4().hex
        with self.session():
            super().put(object_id, name.encode())
            if super().get(object_id) == name.encode():
                with open(self.folder / name, "xb", opener=_open_private) as file:
                    file.write(object_content)

    def get(self, object_id: str) -> bytes | None:
        """Return an object; empty if it has not come yet, None if it is not expected."""
        name = super().get(object_id)
        if not name:
            return name
        try:
            return (self.folder / name.decode()).read_bytes()
        except FileNotFoundError:  # removed meanwhile
            return None

    def delete(self, object_id: str) -> None:
        """Remove an object and what only it refers to."""
        with self.session() as session:
            name = super().get(object_id)
            super().delete(object_id)
            if name and object_id not in self:
                path = self.folder / name.decode()
                event.listen(session, "after_commit", lambda _: path.unlink(missing_ok=True))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def main() -> None:
    """Run the link."""
    database: Any = sql_mixin
    factory: Any = object_store_factory
    database.SQLITE_PRAGMAS = tuple(
        (name, str(int(1000 * BUSY)) if name == "busy_timeout" else value)
        for name, value in database.SQLITE_PRAGMAS
    )
    factory.SqlObjectStore = FileObjectStore
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
