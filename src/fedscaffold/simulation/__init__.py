"""HOW a federation is simulated: one compiled program for all rounds, clients in cache-sized blocks."""

from fedscaffold.simulation import compression, stale
from fedscaffold.simulation.extrapolation import Richardson, richardson
from fedscaffold.simulation.run import Run, simulate
from fedscaffold.simulation.sweeps import Sweep, sweep

__all__ = ["Richardson", "Run", "Sweep", "compression", "richardson", "simulate", "stale", "sweep"]
