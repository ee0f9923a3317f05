"""The generated part of docs/judged.md: a table of all peers, and a section on each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from fedscaffold.state.files import write_whole
from papers.peers.catalogue import PEERS, Finding, Peer

__all__ = [
    "BEGIN",
    "END",
    "PAGE",
    "changes",
    "count",
    "failing",
    "generate",
    "right_with",
    "write_page",
]

PAGE = Path("docs/judged.md")
MISTAKE = re.compile(r"""the mistake (['"])(.+?)\1, in""")
NO_CONDITION = ("", "option II")  # what follows the colon is no condition of a federation
BEGIN, END = "<!-- begin judged -->", "<!-- end judged -->"


def count(verdicts: dict[str, Any]) -> str:
    """Return how many rows hold, fail and are not offered.

    >>> count({"rows": {"a": ["holds", 0.0, 1.0, ""], "b": ["not offered", None, None, "x"]}})
    '1 hold, 0 fail, 1 not offered'
    """
    outcomes = [row[0] for row in verdicts["rows"].values()]
    fails = len(failing(verdicts))
    return (
        f"{outcomes.count('holds')} hold, {fails} fail, {outcomes.count('not offered')} not offered"
    )


def failing(verdicts: dict[str, Any]) -> list[str]:
    """Return the names of the rows that fail or end in an error."""
    return [name for name, row in verdicts["rows"].items() if row[0] in ("fails", "error")]


def right_with(verdicts: dict[str, Any]) -> list[str]:
    """Return the conditions in which every row that a peer offers holds.

    >>> rows = {"mean: all": ["holds"], "moves: all": ["holds"], "mean: momentum": ["fails"]}
    >>> right_with({"rows": rows})
    ['all']
    """
    found: dict[str, set[str]] = {}
    for name, row in verdicts["rows"].items():
        condition = name.partition(": ")[2]
        found.setdefault(condition, set()).add(row[0])
    return [
        condition
        for condition, outcomes in found.items()
        if condition not in NO_CONDITION and "holds" in outcomes <= {"holds", "not offered"}
    ]


def changes(verdicts: dict[str, Any], recorded: dict[str, Any] | None) -> str:
    """Return how verdicts differ from those that were recorded, in a line.

    >>> one = {"version": "1", "date": "2026-11-17", "rows": {"a": ["holds", 0.0, 1.0, ""]}}
    >>> changes(one, one)
    'as recorded on 2026-11-17'
    >>> changes(one, one | {"rows": {"a": ["fails", 2.0, 1.0, ""]}})
    'recorded on 2026-11-17 otherwise: a (fails)'
    """
    if recorded is None:
        return "nothing is recorded of it"
    if recorded["version"] != verdicts["version"]:
        return f"recorded of another version, {recorded['version']}"
    old = {name: row[0] for name, row in recorded["rows"].items()}
    new = {name: row[0] for name, row in verdicts["rows"].items()}
    unlike = [f"{name} ({old.get(name)})" for name in new if old.get(name) != new[name]]
    if not unlike and old.keys() == new.keys():
        return f"as recorded on {recorded['date']}"
    gone = [f"{name} (no longer a row)" for name in old if name not in new]
    return f"recorded on {recorded['date']} otherwise: {', '.join(unlike + gone)}"


def generate(verdicts: dict[str, dict[str, Any]]) -> str:
    """Return the generated part of the page: those that are right in all they offer come first."""
    judged = [(PEERS[name], one) for name, one in verdicts.items()]
    judged.sort(key=lambda both: (len(failing(both[1])), both[0].project.lower()))
    lines = ["| project | version | rows | right with | verdict |", "|---|---|---|---|---|"]
    for peer, one in judged:
        right = ", ".join(right_with(one)) or "-"
        cells = [_link(peer), peer.version[:10], count(one), right, _verdict(one)]
        lines.append(f"| {' | '.join(cells)} |")
    for peer, one in judged:
        lines += ["", *_section(peer, one)]
    return "\n".join([*lines, "", *_by_mistake(judged)])


def _by_mistake(judged: list[tuple[Peer, dict[str, Any]]]) -> list[str]:
    """Return the table of the museum's mistakes and where their numbers were recognised."""
    found: dict[str, list[str]] = {}
    for peer, one in judged:
        for sentence in one["diagnosis"]:
            for _, name in MISTAKE.findall(sentence):
                found.setdefault(name, []).append(_link(peer))
    lines = [
        "## By mistake",
        "",
        "Where the numbers of a federation that goes wrong are exactly those of a mistake of the "
        "[museum](museum.md). A federation in which several mistakes act at once matches none. Nor "
        "is a mistake named where the federations that are right differ from it: hence FLARE "
        "(Lightning) is not in the row of the server that it shares. The suite's schedule repeats "
        "in every round, so that fluke's step size of the next epoch shows as the first.",
        "",
        "| mistake | recognised in |",
        "|---|---|",
    ]
    return lines + [f"| {name} | {', '.join(found[name])} |" for name in sorted(found)]


def _heading(peer: Peer) -> str:
    return f"{peer.project} {peer.version[:10]}"


def _link(peer: Peer) -> str:
    """Return a link to the section on a peer."""
    anchor = _heading(peer).lower().replace(" ", "-")
    anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
    return f"[{peer.project}](#{anchor})"


def _verdict(verdicts: dict[str, Any]) -> str:
    """Return the verdict in a few words."""
    if not failing(verdicts):
        return "right in all it offers"
    if raising := _errors(verdicts):
        return f"{_first_wrong(verdicts)}; ends with an error ({_conditions(raising)})"
    return _first_wrong(verdicts)


def _first_wrong(verdicts: dict[str, Any]) -> str:
    """Return the first sentence on what is wrong, or the conditions in which something is."""
    sentences = [s for s in verdicts["diagnosis"] if not s.startswith(("the numbers", "the rows"))]
    if sentences:
        return str(sentences[0])
    return f"wrong with {_conditions(failing(verdicts))}"


def _errors(verdicts: dict[str, Any]) -> list[str]:
    """Return the names of the rows in which the project ends with an error."""
    return [name for name, row in verdicts["rows"].items() if row[0] == "error"]


def _conditions(rows: list[str]) -> str:
    """Return the conditions of rows, once each."""
    conditions = dict.fromkeys(name.partition(": ")[2] for name in rows)
    return ", ".join(one for one in conditions if one not in NO_CONDITION)


def _section(peer: Peer, verdicts: dict[str, Any]) -> list[str]:
    """Return the section on a peer."""
    versions = ", ".join(f"{name} {version}" for name, version in verdicts["versions"].items())
    command = ["python", "-m", "papers.peers", peer.name]
    command += ["--checkouts", "FOLDER"] if peer.repository else []
    source = (
        f"[{peer.repository}](https://github.com/{peer.repository}) at {peer.version[:10]}"
        if peer.repository
        else f"`{(peer.alone or peer.requirements)[-1]}` of PyPI"
    )
    adapter = peer.target.split(":")[0].replace(".", "/")
    lines = [
        f"## {_heading(peer)}",
        "",
        f"{source}, judged on {verdicts['date']} with {versions}. Adapter: `{adapter}.py`.",
        f"Command: `{shlex.join(command)}`",
        "",
        f"**{count(verdicts)}.**",
    ]
    if failed := failing(verdicts):
        right = ", ".join(right_with(verdicts)) or "no condition"
        raising = _errors(verdicts)
        wrong = [name for name in failed if name not in raising]
        lines += ["", f"All rows hold with: {right}."]
        lines[-1] += f" Rows that fail: {', '.join(wrong)}." if wrong else ""
        lines[-1] += f" Rows that end with an error: {', '.join(raising)}." if raising else ""
    if verdicts["diagnosis"]:
        lines += ["", "What the suite says, by the numbers alone:", ""]
        lines += [f"- {sentence}" for sentence in verdicts["diagnosis"]]
    if peer.findings:
        lines += [
            "",
            "Where we find it in the code, and the smallest change that would mend it:",
            "",
        ]
    lines += [_finding(one) for one in peer.findings]
    if peer.caveats:
        lines += ["", "Caveats: " + " ".join(peer.caveats)]
    return lines


def _finding(one: Finding) -> str:
    place, _, names = one.where.partition(", `")
    where = f"`{place}`, `{names}" if names else f"`{place}`"
    tried = f" **Tried:** {one.tried}." if one.tried else ""
    return f"- {where}: {one.what} **Patch:** {one.patch}.{tried}"


def write_page(verdicts: dict[str, dict[str, Any]], page: Path = PAGE) -> None:
    """Write the generated part into the page, between its marks."""
    text = page.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    write_whole(page, f"{before}{BEGIN}\n{generate(verdicts)}\n{after}")
