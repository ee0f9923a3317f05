"""HOW a federation is simulated: one compiled program for all rounds, clients in cache-sized blocks."""

from fedscaffold.simulation.run import Run, simulate
from fedscaffold.simulation.sweeps import Sweep, sweep

__all__ = ["Run", "Sweep", "simulate", "sweep"]
