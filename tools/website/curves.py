"""Small pictures of distance by round, as SVG that follows the page's colours."""

import math
from html import escape

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, UPPER, LOWER = 44, 8, 8, 20  # room for the words around the axes
TOP, BOTTOM = 3, -16  # powers of ten


def height(value):
    """Where a distance is drawn; what is larger than the picture runs along its upper edge."""
    power = min(max(math.log10(max(value, 1e-300)), BOTTOM), TOP)
    return UPPER + (TOP - power) / (TOP - BOTTOM) * (HEIGHT - UPPER - LOWER)


def line(values, rounds, kind):
    """A curve, up to the first value that is not finite."""
    across = (WIDTH - LEFT - RIGHT) / rounds
    points = []
    for t, value in enumerate(values):
        if not math.isfinite(value):
            break
        points.append(f"{LEFT + t * across:.1f},{height(value):.1f}")
    return f'<polyline class="{kind}" points="{" ".join(points)}"/>'


def picture(said, rounds, **curves):
    """Curves by the name of their kind, which the style sheet colours.

    `said` is for those who do not see them.
    """
    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
        f'y1="{height(10.0**p):.1f}" y2="{height(10.0**p):.1f}"/>'
        f'<text x="{LEFT - 5}" y="{height(10.0**p) + 4:.1f}" text-anchor="end">'
        f"{'1' if p == 0 else f'1e{p}'}</text>"
        for p in (0, -5, -10, -15)
    )
    foot = (
        f'<text x="{LEFT}" y="{HEIGHT - 5}">0</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{rounds} rounds</text>'
    )
    drawn = "".join(line(values, rounds, kind) for kind, values in curves.items())
    return (
        f'<svg class="curves" data-search-exclude viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(said)}">{grid}{foot}{drawn}</svg>'
    )
