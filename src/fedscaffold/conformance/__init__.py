"""The identities every SCAFFOLD must satisfy, runnable against any implementation.

Wrap yours as an adapter, a function from `Case` to `Trace`; then `conform(adapter)` says which of them hold. An
`Algorithm`, or a function that makes one, needs no adapter.
"""

from fedscaffold.conformance.case import Adapter, Case, Trace, Unsupported, federation, offers
from fedscaffold.conformance.diagnosis import diagnose
from fedscaffold.conformance.identities import IDENTITIES, Identity, select
from fedscaffold.conformance.judge import Judgement, Verdict, conform, judge, load_target, table
from fedscaffold.conformance.plain import ours, run
from fedscaffold.conformance.targets import Target, adapter_of

__all__ = [
    "IDENTITIES",
    "Adapter",
    "Case",
    "Identity",
    "Judgement",
    "Target",
    "Trace",
    "Unsupported",
    "Verdict",
    "adapter_of",
    "conform",
    "diagnose",
    "federation",
    "judge",
    "load_target",
    "offers",
    "ours",
    "run",
    "select",
    "table",
]
