"""The generated part of docs/judged.md: a table of all peers, and a section on each."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from fedscaffold.state.files import write_whole
from papers.peers.catalogue import PEERS, Peer

__all__ = ["BEGIN", "END", "PAGE", "count", "failing", "generate", "write_page"]

PAGE = Path("docs/judged.md")
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


def generate(verdicts: dict[str, dict[str, Any]]) -> str:
    """Return the generated part of the page: those that are right in all they offer come first."""
    judged = [(PEERS[name], one) for name, one in verdicts.items()]
    judged.sort(key=lambda both: (len(failing(both[1])), both[0].project.lower()))
    lines = ["| project | version | rows | verdict |", "|---|---|---|---|"]
    for peer, one in judged:
        anchor = _heading(peer).lower().replace(" ", "-")
        anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
        cells = [f"[{peer.project}](#{anchor})", peer.version[:10], count(one), _verdict(one)]
        lines.append(f"| {' | '.join(cells)} |")
    for peer, one in judged:
        lines += ["", *_section(peer, one)]
    return "\n".join(lines)


def _heading(peer: Peer) -> str:
    return f"{peer.project} {peer.version[:10]}"


def _verdict(verdicts: dict[str, Any]) -> str:
    """Return the verdict in a few words."""
    if not failing(verdicts):
        return "right in all it offers"
    sentences = [s for s in verdicts["diagnosis"] if not s.startswith(("the numbers", "the rows"))]
    if sentences:
        return str(sentences[0])
    conditions = dict.fromkeys(name.partition(": ")[2] for name in failing(verdicts))
    return f"wrong with {', '.join(one for one in conditions if one)}"


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
        lines += ["", f"Rows that fail: {', '.join(failed)}."]
    if verdicts["diagnosis"]:
        lines += ["", "What the suite says, by the numbers alone:", ""]
        lines += [f"- {sentence}" for sentence in verdicts["diagnosis"]]
    if peer.findings:
        lines += [
            "",
            "Where we find it in the code, and the smallest change that would mend it:",
            "",
        ]
    lines += [f"- `{one.where}`: {one.what} **Patch:** {one.patch}." for one in peer.findings]
    if peer.caveats:
        lines += ["", "Caveats: " + " ".join(peer.caveats)]
    return lines


def write_page(verdicts: dict[str, dict[str, Any]], page: Path = PAGE) -> None:
    """Write the generated part into the page, between its marks."""
    text = page.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    write_whole(page, f"{before}{BEGIN}\n{generate(verdicts)}\n{after}")
