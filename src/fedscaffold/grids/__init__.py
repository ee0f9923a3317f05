"""Grids of runs over all cores, or over any `concurrent.futures` executor."""

from fedscaffold.grids.cells import Cell, expand
from fedscaffold.grids.execute import run_cells
from fedscaffold.grids.grid import grid
from fedscaffold.grids.grid_run import Grid, GridRun

__all__ = ["Cell", "Grid", "GridRun", "expand", "grid", "run_cells"]
