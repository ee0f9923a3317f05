"""Other projects' SCAFFOLD, judged by the conformance suite: `python -m papers.peers --list`.

`catalogue.py` names the projects, their versions and what was found in them, `adapters/` drives
each project's own classes, `judge.py` makes an environment for each and runs the suite there,
`page.py` writes docs/judged.md from the verdicts in `verdicts/`.
"""
