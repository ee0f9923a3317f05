"""`python -m tests.faults` prints the reliability scorecard; exit code 1 if a scenario loses points."""

from __future__ import annotations

import argparse
import json
import sys

from tests.faults import answer, lines, scorecard


def main() -> int:
    """Run all scenarios and print the scorecard, as text or as one JSON object."""
    parser = argparse.ArgumentParser(
        "python -m tests.faults", description="Run the faults of deployment."
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    as_json = parser.parse_args().json
    scores = scorecard()
    print(json.dumps(answer(scores)) if as_json else "\n".join(lines(scores)))
    return int(any(score.points < 2 for score in scores))


if __name__ == "__main__":
    sys.exit(main())
