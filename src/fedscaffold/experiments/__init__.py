"""Experiments from configuration files: problems, runs, comparisons, and checks of the installation."""
