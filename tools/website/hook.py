"""What the site has that no page has in its text.

Made from the code's own lists whenever the site is built.

A page asks for it by a line such as `<!-- made: wall -->`. The theatre is built in as `drift.html`,
and the rows of the errata get anchors, so that a formula can point at its own.
"""

import re
from itertools import cycle
from logging import getLogger
from pathlib import Path

import apidoc
import museum
import wall
from mkdocs.structure.files import File

from fedscaffold.runs.theatre import theatre

ROOT = Path(__file__).parents[2]
log = getLogger("mkdocs.hooks.website")
TABLES = (
    "configuration.md",
    "errata.md",
    "extend.md",
    "notation.md",
    "reproduction.md",
    "theory-formulas.md",
)
MADE = re.compile(r"^<!-- made: ([\w /.-]+?) -->$", re.M)


def included(name):
    """A page of the repository that is not in docs/, without its title.

    Links to pages of docs/ stay links.
    """
    text = re.sub(r"^# .*\n+", "", (ROOT / name).read_text(encoding="utf-8"))
    text = text.replace("](../docs/", "](docs:")
    text = re.sub(r"\[([^\]]+)\]\((?!docs:|https?:|#)[^)]*\)", r"\1", text)
    return text.replace("](docs:", "](")


MAKERS = {
    "first picture": museum.first_picture,
    "museum": museum.public,
    "our own mistakes": museum.private,
    "wall": wall.tiles,
    "count of the wall": wall.count,
    "benchmarks/README.md": lambda: included("benchmarks/README.md"),
}


def on_files(files, config):
    """The theatre is a page of its own."""
    files.append(File.generated(config, "drift.html", content=theatre()))
    return files


def on_page_markdown(markdown, page, **_):
    """Put in what is asked for."""
    if page.file.src_uri == "errata.md":
        markdown = with_anchors(markdown)
    if page.file.src_uri in TABLES:
        markdown = re.sub(r"`(fs|papers)\.([\w.]+)(\(\w+\))?`", linked, markdown)

    def made(match):
        if match[1].startswith("room "):
            return apidoc.room(match[1].removeprefix("room "), markdown)
        if match[1] not in MAKERS:
            log.warning("%s asks for '%s', which nothing makes", page.file.src_uri, match[1])
            return match[0]
        return MAKERS[match[1]]()

    return MADE.sub(made, markdown)


def on_page_content(html, page, **_):
    """Tables of words: on a phone every row is a card, with column heads before the cells."""
    if page.file.src_uri not in TABLES:
        return html
    html = re.sub(
        r"<code>(?:fs\.|test_)[^<]*</code>",
        lambda found: re.sub(r"(_|\.|::)", r"\1<wbr>", found[0]),
        html,
    )
    return f'<div class="cards">{re.sub(r"<table>.*?</table>", labelled, html, flags=re.S)}</div>'


def labelled(table):
    """Every cell with the head of its column."""
    heads = cycle(re.findall(r"<th>(.*?)</th>", table[0]))
    return re.sub(r"<td>", lambda _: f'<td data-head="{next(heads)}">', table[0])


def linked(name):
    """A name of the code, with a link to its place in the reference where it has one."""
    target = apidoc.find(name[2]) if name[1] == "fs" else f"papers.{name[2]}"
    return f"[{name[0]}][{target}]" if target else name[0]


def with_anchors(markdown):
    """Row 8a of the section on 004 becomes `#004-8a`."""
    lines, tag = [], ""
    for line in markdown.splitlines():
        if section := re.match(r"## (00\d),", line):
            tag = section[1]
        lines.append(re.sub(r"^\| (\d+[a-z]?)\. ", rf'| <a id="{tag}-\1"></a>\1. ', line))
    return "\n".join(lines) + "\n"
