"""Durable state: atomic commits, stores of client vectors, client records on disk.

`commit` writes arrays and facts in one atomic step; `latest` reads them back, or the previous
generation if a file is damaged. The stores hold one vector per client, in memory or in files, and
provide the arrays that belong in a commit. `Records` are clients' data, read per cohort. Needs
NumPy only; the simulator and the deployed server share it.
"""

from __future__ import annotations

from fedscaffold.state.commit import JSON, Snapshot, commit, latest, load
from fedscaffold.state.files import StateError, locked
from fedscaffold.state.filestore import FileStore
from fedscaffold.state.prefetch import Prefetched
from fedscaffold.state.sources import Records, write_records
from fedscaffold.state.stores import SparseStore, Store, choose, mean

__all__ = [
    "JSON",
    "FileStore",
    "Prefetched",
    "Records",
    "Snapshot",
    "SparseStore",
    "StateError",
    "Store",
    "choose",
    "commit",
    "latest",
    "load",
    "locked",
    "mean",
    "write_records",
]
