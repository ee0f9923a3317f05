"""The identities every SCAFFOLD must satisfy, runnable against any implementation.

Wrap yours as an adapter, a function from `Case` to `Trace`; then `conform(adapter)` says which of them hold.
"""

from fedscaffold.conformance.case import Adapter, Case, Trace, Unsupported, federation
from fedscaffold.conformance.identities import IDENTITIES, Identity
from fedscaffold.conformance.judge import Verdict, conform, load_target, table
from fedscaffold.conformance.plain import ours, run

__all__ = [
    "IDENTITIES",
    "Adapter",
    "Case",
    "Identity",
    "Trace",
    "Unsupported",
    "Verdict",
    "conform",
    "federation",
    "load_target",
    "ours",
    "run",
    "table",
]
