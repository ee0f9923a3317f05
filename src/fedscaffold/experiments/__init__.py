"""Experiments from configuration files: problems, runs and comparisons."""
