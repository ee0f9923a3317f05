"""The bug museum: every mistake of the suite, run, drawn, and with the identity that catches it.

What catches a public mistake is read from the table of docs/conformance.md, which a test keeps
true; our own mutants
are judged here. Nothing is typed that can be computed: museum.toml has a sentence for each mistake,
    and no more.
"""

import ast
import importlib.util
import math
import re
import sys
import tomllib
from functools import cache
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import numpy as np
from curves import picture

from fedscaffold.algorithms import fedavg
from fedscaffold.conformance import IDENTITIES, conform, ours, run
from fedscaffold.conformance.federations import CONDITIONS, brief
from fedscaffold.conformance.mistakes import right

ROOT = Path(__file__).parents[2]
# where broken implementations are written down: public mistakes, and our own algorithm broken on
# purpose
TABLES = {
    "MISTAKES": ROOT / "src" / "fedscaffold" / "conformance" / "mistakes.py",
    "OUR_MUTANTS": ROOT / "tests" / "support" / "mutants.py",
}
BY_NAME = {identity.name: identity for identity in IDENTITIES}
TELLING = [
    "optimum",
    "mean",
    "first round",
    "gradients seen",
]  # the families whose conditions are pictures
ENOUGH = [  # to judge our own mutants by: each fails one of them
    *(
        "optimum: all",
        "optimum: sampling",
        "optimum: option I",
        "first round: all",
        "gradients seen: all",
    ),
    *("gradient at x", "server step"),
]


class Room(NamedTuple):
    """One kind of mistake: the number of public projects that made it, and what each one is."""

    seen: int
    mistakes: dict[str, str]


WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROOMS = {room["title"]: Room(room["seen"], room["mistakes"]) for room in WORDS["rooms"]}
OURS: dict[str, str] = WORDS["ours"]


@cache
def broken(table):
    """A table of broken implementations, fresh.

    Its random numbers are then the same at every build.
    """
    spec = importlib.util.spec_from_file_location(f"{table}_on_show", TABLES[table])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return getattr(module, table)


@cache
def in_code():
    """The text of every broken implementation, by its name."""
    texts = {}
    for table, path in TABLES.items():
        source = path.read_text(encoding="utf-8")
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
        (value,) = [node.value for node in nodes if node.target.id == table]
        for key, code in zip(value.keys, value.values, strict=True):
            texts[key.value] = dedent(" " * 4 + ast.get_source_segment(source, code))
    return texts


def caught_in_public():
    """The identities that fail for each public mistake, from the table of docs/conformance.md."""
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    table = page.partition("<!-- begin mistakes -->")[2].partition("<!-- end mistakes -->")[0]
    rows = re.findall(r"^\| (.+?) \| (\*\*.+?) \|$", table, re.M)
    cell = re.compile(r"\*\*(.+?)\*\*(?: \((.+?)\))?")
    return {
        name: [row for part in cell.findall(text) for row in rows_of(*part)] for name, text in rows
    }


def rows_of(family, conditions):
    """The identities that a cell of the table means.

    `mean` with `all, sampling`, `everywhere` or `all but restart`.
    """
    members = [name for name in BY_NAME if name.partition(": ")[0] == family]
    if not conditions or conditions == "everywhere":
        return members
    spared = conditions.startswith("all but ")
    named = conditions.removeprefix("all but ").split(", ")
    return [name for name in members if ((name.partition(": ")[2] or "plain") in named) != spared]


def telling(caught):
    """The identity to show a mistake by: the one whose federation makes the plainest picture."""
    for family in TELLING:
        if rows := [name for name in caught if name.partition(": ")[0] == family]:
            return rows[0]
    return caught[0]


def shown(name):
    """The federation of an identity, run for as long as it takes to end somewhere."""
    condition = CONDITIONS.get(name.partition(": ")[2])
    return condition.case if condition else BY_NAME[name].cases[-1]


def distances(adapter, case):
    """|x - x*| by round, and whether the implementation broke down."""
    weights = case.weights[:, None]
    best = np.linalg.solve(
        (weights[:, :, None] * case.hessians).sum(axis=0), (weights * case.linear).sum(axis=0)
    )
    try:
        with np.errstate(all="ignore"):
            x = adapter(case.copy()).x
    except ArithmeticError as error:
        return [float(np.linalg.norm(case.x0 - best))], type(error).__name__
    return [float(np.linalg.norm(one - best)) for one in x], None


def ending(values, broke):
    """In words, where a run ends."""
    if broke:
        return f"it stops with a {broke}"
    last = values[-1]
    if not math.isfinite(last) or last > 1e3:
        return "it diverges"
    return f"{last:.0e} from the optimum" if last < 1e-3 else f"{last:.2g} from the optimum"


@cache
def done_right(row):
    """The right curve on the federation of an identity: our own, or one that draws noise."""
    case = shown(row)
    return distances(ours if set(case.asks) <= ours.offers else right, case)[0]


def exhibit(name, sentence, adapter, caught, more=""):
    """One mistake: what it is, its curve beside the right one, and what catches it."""
    row = telling(caught)
    case, sound = shown(row), done_right(row)
    wrong = distances(adapter, case)
    ends = f"After {case.rounds} rounds: {ending(*wrong)}; done right, {ending(sound, None)}."
    drawn = picture(f"{name}. {ends}", case.rounds, right=sound, wrong=wrong[0])
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (
        f'<figure class="exhibit" id="{slug}">\n'
        f"<figcaption><strong>{escape(name)}</strong><br>{escape(sentence)}</figcaption>\n"
        f"{drawn}\n<p>{escape(ends)}</p>\n"
        f'<p class="caught">Caught by <strong>{escape(row)}</strong>{more}: '
        f"{escape(BY_NAME[row].statement)}</p>\n{judged(name)}"
        "<details data-search-exclude>\n<summary>In code</summary>\n"
        f"<pre><code>{escape(in_code()[name])}</code></pre>\n</details>\n</figure>"
    )


@cache
def recognised():
    """By mistake, how many of the projects judged have its numbers: docs/judged.md."""
    page = (ROOT / "docs" / "judged.md").read_text(encoding="utf-8").partition("## By mistake")[2]
    rows = re.findall(r"^\| (.+?) \| (\[.+\)) \|$", page, re.M)
    return {name: cell.count("](#") for name, cell in rows}


def judged(name):
    """A link to the judgement, where a project that was judged has the numbers of a mistake."""
    count = recognised().get(name, 0)
    some = f"{count} of the projects judged {'has' if count == 1 else 'have'} these numbers"
    return f'<p><a href="judged.html#by-mistake">{some}</a>.</p>\n' if count else ""


def gallery(exhibits):
    """Exhibits side by side, as many as the window is wide."""
    return '<div class="gallery">\n' + "\n".join(exhibits) + "\n</div>"


def public():
    """All public mistakes, room by room."""
    caught, rooms = caught_in_public(), []
    for title, (seen, mistakes) in ROOMS.items():
        made = [
            exhibit(name, text, broken("MISTAKES")[name], caught[name], others(caught[name]))
            for name, text in mistakes.items()
        ]
        rooms.append(
            f"## {title}\n\nSeen in {seen} public projects; {len(made)} "
            f"exhibits.\n\n{gallery(made)}\n"
        )
    return "\n".join(rooms)


def others(caught):
    """How many more identities catch it."""
    return (
        f", and by {len(caught) - 1} more of {len(BY_NAME)}"
        if len(caught) > 1
        else ", and by nothing else"
    )


def private():
    """Our own algorithm, broken in each of its functions, and judged."""
    made = []
    for name, text in OURS.items():
        adapter = broken("OUR_MUTANTS")[name]
        verdicts = conform(adapter, [BY_NAME[row] for row in ENOUGH])
        caught = [verdict.name for verdict in verdicts if verdict.outcome == "fails"]
        made.append(exhibit(name, text, adapter, caught))
    return gallery(made)


def first_picture():
    """FedAvg and SCAFFOLD on the same four clients."""
    case = brief(CONDITIONS["all"].case, rounds=60)
    drift = distances(lambda one: run(fedavg(), one), case)[0]
    exact = distances(ours, case)[0]
    said = f"Distance to the optimum by round: FedAvg stops {drift[-1]:.2f} away, SCAFFOLD arrives."
    return (
        f'<figure class="first">\n{picture(said, case.rounds, right=exact, wrong=drift)}\n'
        f"<figcaption>Distance to the optimum, four unlike clients, four local steps a round. "
        f'<span class="wrong">FedAvg</span> stops {drift[-1]:.2f} away; '
        '<span class="right">SCAFFOLD</span> arrives, '
        f"to {exact[-1]:.0e}. Computed when this page was built.</figcaption>\n</figure>"
    )
