"""Experiments: configurations, comparisons, and later the papers' figures and tables, one file each."""
