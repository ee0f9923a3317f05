"""The picture of rooms and arrows in docs/architecture.md, drawn from the package's imports.

`python tools/architecture.py` writes it, `--check` exits with 1 if it is out of date. Rooms stand
in
layers: a room is above every room that it imports. A line is drawn for every import, except where a
longer way over other rooms says the same; the table below the picture has them all.
"""

import ast
import functools
import sys
from collections import defaultdict
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedscaffold"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- begin rooms -->\n", "<!-- end rooms -->"
WIDTH, HEIGHT, GAP = 130, 38, 62


def imported(path):
    """Modules of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fedscaffold":
            yield from (f"fedscaffold.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def arrows():
    """For each room, the rooms that it imports."""
    rooms = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    found = {room: set() for room in rooms}
    for room in rooms:
        for path in (SOURCE / room).rglob("*.py"):
            targets = (
                module.split(".")[1]
                for module in imported(path)
                if module.startswith("fedscaffold.")
            )
            found[room] |= {target for target in targets if target in found and target != room}
    return found


def layers(found):
    """Rooms by their longest way down; a circle is an error."""
    depth = {}

    def of(room, above=()):
        if room in above:
            raise SystemExit(f"the imports of rooms make a circle: {' -> '.join([*above, room])}")
        if room not in depth:
            depth[room] = 1 + max((of(below, (*above, room)) for below in found[room]), default=-1)
        return depth[room]

    by_depth = defaultdict(list)
    for room in found:
        by_depth[of(room)].append(room)
    return [by_depth[level] for level in sorted(by_depth)]


def direct(found):
    """The arrows that no way over a third room implies."""
    below = {}

    def reach(room):
        if room not in below:
            below[room] = found[room].union(*(reach(one) for one in found[room]))
        return below[room]

    return {
        room: {t for t in found[room] if not any(t in reach(one) for one in found[room] - {t})}
        for room in found
    }


def picture(found):
    """An SVG of the layers, the room that imports nothing at the bottom."""
    rows = layers(found)
    widest = max(map(len, rows))
    across, high = widest * (WIDTH + 24), len(rows) * (HEIGHT + GAP) - GAP + 4
    place = {}
    for level, row in enumerate(rows):
        left = (across - len(row) * (WIDTH + 24)) / 2 + 12
        for k, room in enumerate(row):
            place[room] = (left + k * (WIDTH + 24), high - 2 - HEIGHT - level * (HEIGHT + GAP))
    lines = []
    for room, targets in sorted(direct(found).items()):
        x, y = place[room]
        for target in sorted(targets):
            u, v = place[target]
            middle = (y + HEIGHT + v) / 2
            start, stop = x + WIDTH / 2, u + WIDTH / 2
            lines.append(
                f'<path d="M{start:g} {y + HEIGHT:g} C{start:g} {middle:g} '
                f'{stop:g} {middle:g} {stop:g} {v - 5:g}"/>'
            )
    boxes = [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 5:g}">{escape(room)}/</text>'
        for room, (x, y) in sorted(place.items())
    ]
    return "\n".join(
        [
            f'<svg class="rooms" viewBox="0 0 {across:g} {high:g}" role="img" '
            'aria-label="Rooms and what they import">',
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="3" refY="3" '
            'orient="auto">'
            '<path d="M0 0 L6 3 L0 6 z" style="fill:currentColor;stroke:none"/></marker></defs>',
            '<g style="fill:none;stroke:currentColor;opacity:.6;marker-end:url(#tip)">',
            *lines,
            "</g>",
            '<g style="fill:currentColor;stroke:none;font-family:monospace;font-size:14px;'
            'text-anchor:middle">',
            *(
                box.replace("<rect ", '<rect style="fill:none;stroke:currentColor" ')
                for box in boxes
            ),
            "</g>",
            "</svg>",
        ]
    )


def purpose(room):
    """The first sentence of a room's docstring."""
    text = (
        ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8")))
        or ""
    )
    return text.split("\n\n")[0].replace("\n", " ").strip()


def rooms():
    """The generated part of the page."""
    found = arrows()
    order = [room for row in reversed(layers(found)) for room in row]
    lines = [
        f"| `{room}/` | {purpose(room)} | "
        f"{', '.join(f'`{one}`' for one in sorted(found[room])) or 'nothing'} |"
        for room in order
    ]
    return "\n".join(
        [picture(found), "", "| room | what it is | imports |", "|---|---|---|", *lines, ""]
    )


def filled(page):
    """The page with its picture and table drawn anew."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit("docs/architecture.md has lost its markers `begin rooms` and `end rooms`")
    return f"{head}{BEGIN}{rooms()}{END}{tail}"


def main():
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        if page != filled(page):
            raise SystemExit(
                "docs/architecture.md is out of date: run `make architecture`, look, and commit"
            )
    else:
        PAGE.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
