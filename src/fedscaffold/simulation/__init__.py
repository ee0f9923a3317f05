"""HOW a federation is simulated: one compiled program for all rounds, clients in cache-sized blocks."""

from fedscaffold.simulation import compression, stale
from fedscaffold.simulation.checkpoint import Interrupted
from fedscaffold.simulation.extrapolation import Richardson, richardson
from fedscaffold.simulation.follow import Stretch
from fedscaffold.simulation.hosts import Lost, join
from fedscaffold.simulation.run import Run, simulate
from fedscaffold.simulation.sources import problem_on_disk
from fedscaffold.simulation.sweeps import Sweep, sweep

__all__ = [
    "Interrupted",
    "Lost",
    "Richardson",
    "Run",
    "Stretch",
    "Sweep",
    "compression",
    "join",
    "problem_on_disk",
    "richardson",
    "simulate",
    "stale",
    "sweep",
]
