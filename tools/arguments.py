"""Write docs/configuration.md, the reference of a run's arguments, from `fedscaffold.run_config`.

`python tools/arguments.py` writes the page, `--check` exits with 1 if it is out of date.
"""

import inspect
import sys
from pathlib import Path

from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.cli.verbs import compare
from fedscaffold.run_config import ARGUMENTS, FILE_ARGUMENTS, KEYS, PROBLEM_ARGUMENTS

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by tools/arguments.py from src/fedscaffold/run_config.py; do not edit. -->

Every argument of a run is defined once, in `fedscaffold.run_config`. `fs.simulate`,
`fs.Simulator` and `fs.RunConfig` take all of them by name,
after the algorithm and the problem; `fs.sweep` and the [estimators](estimator.md) take
those that their reference lists, and refuse the others by name.

Configuration files for `fedscaffold run` have the keys below: `local.steps` is the key `steps` of
the table `[local]`. Each key can be overridden on the command line, as in `--set local.steps=10`;
for the most common ones `fedscaffold compare` has an option.

[The simulator](simulator.md) explains metrics, schedules and sampling with examples, and
[the command line](command-line.md) shows a whole file.
"""

RUN = """\
## Arguments of a run

A dash means that files cannot express the argument, or that `compare` has no option for it.
"""

FILES = """\
## Keys that only files have

In Python, `local_optimizer` and `server_optimizer` are optax transformations; files name them.
"""

PROBLEM = """\
## The table `[problem]`

In Python, the problem is an `fs.Problem`. Files describe a data set, how it is split
among clients, and a model, or a synthetic problem.
"""

ALGORITHM = """\
## The table `[algorithm]`

`name` is one of the names below, by default `scaffold`. The other keys of the table are the
parameters of that algorithm.
"""


def table(*rows):
    """Rows of Markdown, the first of which is the head."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    head, *body = [f"| {' | '.join(row)} |" for row in escaped]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body, ""])


def code(value):
    """A default as it is written in Python."""
    return f"`{value!r}`"


def option(flag, key):
    """The option of `compare` that sets a key; a dash where there is none."""
    parameter = inspect.signature(compare).parameters.get(flag)
    described = "" if parameter is None else parameter.annotation.__metadata__[0].help or ""
    # server.lr would have the flag of local.lr: the description says whose option it is
    same = described[1:].startswith(KEYS[key].sentence[1:])
    return f"`--{flag.replace('_', '-')}`" if same else "-"


def of_a_run(name, stated):
    """The row of an argument of a run."""
    if stated.key is None:
        return f"`{name}`", "-", "-", code(stated.default), stated.sentence
    filed = KEYS[stated.key]
    default, meaning = code(stated.default), stated.sentence
    if filed.default != stated.default:
        default += f"; in files {code(filed.default)}"
    if not stated.sentence.startswith(filed.sentence):
        meaning += f". In files: {filed.sentence}"
    return f"`{name}`", f"`{stated.key}`", option(name, stated.key), default, meaning


def of_a_file(key, stated):
    """The row of a key that only files have."""
    return f"`{key}`", option(key.rpartition(".")[2], key), code(stated.default), stated.sentence


def of_an_algorithm(name, make):
    """The row of an algorithm."""
    known = inspect.signature(make).parameters.values()
    shown = [f"`{one.name} = {one.default!r}`" for one in known]
    summary = inspect.getdoc(make).split("\n\n")[0].replace("\n", " ")
    return f"`{name}`", ", ".join(shown) or "none", summary


def page():
    """The whole page."""
    run = table(
        ("in Python", "key in files", "option of compare", "default", "meaning"),
        *(of_a_run(*one) for one in ARGUMENTS.items()),
    )
    head = ("key in files", "option of compare", "default", "meaning")
    files = table(head, *(of_a_file(*one) for one in FILE_ARGUMENTS.items()))
    problem = table(head, *(of_a_file(*one) for one in PROBLEM_ARGUMENTS.items()))
    algorithm = table(
        ("name", "parameters", "what it is"), *(of_an_algorithm(*one) for one in ALGORITHMS.items())
    )
    return "\n".join([HEAD, RUN, run, FILES, files, PROBLEM, problem, ALGORITHM, algorithm])


def main():
    """Write the page, or check it."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit(
            "docs/configuration.md is out of date: run `make arguments`, look, and commit"
        )


if __name__ == "__main__":
    main()
