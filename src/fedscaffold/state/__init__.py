"""HOW state is kept: durable, exact, as large as the disk.

`commit` makes arrays and facts durable in one atomic step; `latest` reads them back, and the generation before when a
file is damaged. The stores hold one vector for each of many clients, in memory or in files, and say what of them
belongs in a commit; `Records` are clients' data read by cohort. Needs NumPy only: the simulator and a deployed server
keep their state with this code.
"""

from __future__ import annotations

from fedscaffold.state.commit import JSON, Snapshot, commit, latest, load
from fedscaffold.state.files import StateError, locked
from fedscaffold.state.filestore import FileStore
from fedscaffold.state.prefetch import Prefetched
from fedscaffold.state.sources import Records, write_records
from fedscaffold.state.stores import ArrayStore, SparseStore, Store, choose, mean

__all__ = [
    "JSON", "ArrayStore", "FileStore", "Prefetched", "Records", "Snapshot", "SparseStore", "StateError", "Store",
    "choose", "commit", "latest", "load", "locked", "mean", "write_records",
]  # fmt: skip
