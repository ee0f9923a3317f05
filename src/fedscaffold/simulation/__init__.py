"""Simulation of a federation.

One compiled program for all rounds, clients in cache-sized blocks.
"""

from fedscaffold.simulation import compression, delays, stale
from fedscaffold.simulation.callbacks import Callback, Look
from fedscaffold.simulation.canaries import Audit, audit_privacy
from fedscaffold.simulation.checkpoint import Interrupted
from fedscaffold.simulation.distributed import Lost, join
from fedscaffold.simulation.on_disk import problem_on_disk
from fedscaffold.simulation.result import Run
from fedscaffold.simulation.richardson_romberg import Richardson, richardson
from fedscaffold.simulation.simulator import Simulator, simulate
from fedscaffold.simulation.sweeps import Sweep, sweep

__all__ = [
    "Audit",
    "Callback",
    "Interrupted",
    "Look",
    "Lost",
    "Richardson",
    "Run",
    "Simulator",
    "Sweep",
    "audit_privacy",
    "compression",
    "delays",
    "join",
    "problem_on_disk",
    "richardson",
    "simulate",
    "stale",
    "sweep",
]
