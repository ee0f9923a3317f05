"""Conformance suite: identities that every SCAFFOLD must satisfy, for any implementation.

Wrap an implementation as an adapter, a function from `Case` to `Trace`, and call
`conform(adapter)`. An `Algorithm`, or a function that returns one, needs no adapter.
"""

from fedscaffold.conformance.case import Adapter, Case, Trace, Unsupported, federation, offers
from fedscaffold.conformance.diagnosis import diagnose
from fedscaffold.conformance.identities import IDENTITIES, Identity, select
from fedscaffold.conformance.judge import Judgement, Verdict, conform, judge, load_target, table
from fedscaffold.conformance.reference_target import ours, run
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
