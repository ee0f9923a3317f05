"""The moving picture of client drift.

Inline SVG and a few lines of script, no library, nothing from the network.
"""

from __future__ import annotations

import json
from string import Template
from typing import Any

from papers.claim import Data

__all__ = ["film"]

COLOURS = ("#009e73", "#b07d00")
NAMES = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}
LEFT, TOP, SIDE = -2.0, 2.2, 4.0  # the part of the plane that is shown


def film(data: Data) -> str:
    """HTML with both methods side by side, a button and a slider over every local step."""
    told: dict[str, Any] = {
        "films": {
            name: {"paths": _short(one["paths"].tolist()), "x": _short(one["x"].tolist())}
            for name, one in data["films"].items()
        },
        "optimum": _short(data["optimum"].tolist()),
        "minima": _short(data["minima"].tolist()),
        "colours": COLOURS,
        "frame": [LEFT, TOP, SIDE],
    }
    views = "".join(
        f"<figure><figcaption>{title}</figcaption>"
        f'<svg class="film" data-method="{name}" viewBox="0 0 400 400" '
        f'role="img" aria-label="local steps of two clients under {title}"></svg></figure>'
        for name, title in NAMES.items()
    )
    script = SCRIPT.replace("</", "<\\/")
    return Template(PAGE).substitute(
        views=views, data=json.dumps(told).replace("</", "<\\/"), script=script
    )


def _short(value: Any) -> Any:
    return [_short(item) for item in value] if isinstance(value, list) else round(value, 4)


PAGE = """<div class="panels">$views</div>
<p><button id="film-play">Play</button> <input id="film-at" type="range" min="0" value="0"
style="width:min(60%,420px)"> <span id="film-says"></span></p>
<script type="application/json" id="film-data">$data</script><script>$script</script>"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("film-data").textContent), [left, top, side] =
  data.frame; const at = p => [(p[0] - left) / side * 400, (top - p[1]) / side * 400]; const made =
  (svg, kind, all) => { const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const name in all) node.setAttribute(name, all[name]); svg.append(node); return node; };
  const dot = (svg, p, r, fill) => made(svg, "circle", { cx: at(p)[0], cy: at(p)[1], r, fill });
  const line = (svg, points, stroke, width, dash) => made(svg, "polyline", {
    points: points.map(p => at(p).join(",")).join(" "), fill: "none", stroke, "stroke-width": width,
    "stroke-dasharray": dash || "none" });
  const views = [...document.querySelectorAll("svg.film")], first = data.films.fedavg.paths;
  const steps = first[0][0].length - 1, pause = 3, span = steps + pause, frames = first.length *
  span; const slider = document.getElementById("film-at"), says =
  document.getElementById("film-says"); slider.max = frames; const draw = t => { for (const svg of
  views) {
    const film = data.films[svg.dataset.method], round = Math.min(Math.floor(t / span),
    film.paths.length - 1); const step = Math.min(t - round * span, steps), over = t - round * span
    > steps; svg.replaceChildren(); made(svg, "rect", { x: 0.5, y: 0.5, width: 399, height: 399,
    fill: "none", stroke: "#8888" }); data.minima.forEach((p, i) => { dot(svg, p, 5,
    data.colours[i]); }); const [x, y] = at(data.optimum); made(svg, "path", { d: `M${x} ${y -
    9}L${x + 3} ${y - 3}L${x + 9} ${y - 2}L${x + 4} ${y + 3}L${x + 6} ${y + 9}` +
      `L${x} ${y + 5}L${x - 6} ${y + 9}L${x - 4} ${y + 3}L${x - 9} ${y - 2}L${x - 3} ${y - 3}Z`,
      fill: "currentColor" });
    line(svg, film.x.slice(0, round + 1 + over), "#d55e00", 2, "");
    film.x.slice(0, round + 1 + over).forEach(p => dot(svg, p, 3.5, "#d55e00"));
    film.paths[round].forEach((path, i) => { line(svg, path.slice(0, step + 1), data.colours[i], 2,
    "");
      dot(svg, path[step], 3, data.colours[i]); });
    if (over) film.paths[round].forEach(path => line(svg, [path[steps], film.x[round + 1]], "#8888",
    1, "3 3")); says.textContent = over ? `round ${round + 1}: averaged` : `round ${round + 1},
    local step ${step} of ${steps}`;
  } };
  let timer = null; const button = document.getElementById("film-play");
  const stop = () => { clearInterval(timer); timer = null; button.textContent = "Play"; };
  button.addEventListener("click", () => { if (timer) return stop();
    if (+slider.value >= frames) slider.value = 0; button.textContent = "Pause";
    timer = setInterval(() => { slider.value = +slider.value + 1; draw(+slider.value);
      if (+slider.value >= frames) stop(); }, 130); });
  slider.addEventListener("input", () => { stop(); draw(+slider.value); });
  draw(0);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) button.click();
})();
"""
