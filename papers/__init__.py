"""The papers' figures and tables, run again: `python -m papers --list`.

A package of the repository, not of the wheel. `claims.py` names the claims; each has a file with
its published numbers and its check. `as_printed.py` keeps formulas that are wrong in print, for the
errata. `exercises/` has the tutorial's exercises.
"""
