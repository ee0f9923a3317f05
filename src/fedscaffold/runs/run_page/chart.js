// One chart: a line and a band for each group. Colour is the algorithm; dashes and a number at the end tell its lines apart.
"use strict";
const Chart = (() => {
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 5"];
  const { highest, lowest } = Numbers;
  const space = () => document.createRange().createContextualFragment("<svg></svg>").firstChild.namespaceURI;
  const make = (name, attributes = {}, ...inside) => {
    const one = document.createElementNS(space(), name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    one.append(...inside);
    return one;
  };
  const look = (colour, k) => ({ colour: `k${colour}`, dash: DASHES[k % DASHES.length] });
  const px = v => v.toFixed(1);

  // Marks of an axis: tens where it is logarithmic, else round numbers; about as many as there is room for.
  function ticks(low, high, log, room) {
    if (log) {
      const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)], step = Math.max(1, Math.ceil((b - a + 1) / room));
      const tens = [];
      for (let k = a; k <= b; k += step) tens.push(Number(`1e${k}`));
      if (tens.length > 2) return tens;
      const fine = [1, 2, 5].flatMap(m => [...Array(b - a + 3).keys()].map(k => m * Number(`1e${a - 1 + k}`))).filter(v => v >= low && v <= high);
      if (fine.length > 1) return fine.map(v => Number(v.toPrecision(12)));
    }
    const raw = (high - low) / room || 1, ten = 10 ** Math.floor(Math.log10(raw)), step = ten * [1, 2, 5, 10].find(m => m * ten >= raw * 0.999);
    const marks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) marks.push(Number((k * step).toPrecision(12)));
    return marks.filter(v => !log || v > 0);
  }

  // Where values lie: [bottom, top, logarithmic]. A run that blows up must not flatten the others, so it is cut off.
  function extent(lines, scale, goal) {
    const calm = lines.some(line => line.calm && line.points.length) ? lines.filter(line => line.calm) : lines;
    const seen = calm.flatMap(line => line.points.flatMap(p => [p.low, p.high]));
    for (const line of lines) if (!calm.includes(line) && line.points.length) seen.push(line.points[0].y);
    if (goal !== null) seen.push(goal);
    if (!seen.length) return [0, 1, false];
    const positive = seen.filter(v => v > 0), most = highest(positive), least = lowest(positive);
    const rounding = -1e-12 * most;  // what is negative by rounding only does not forbid it
    const log = scale !== "linear" && positive.length > 0 && lowest(seen) >= rounding && (scale === "log" || most / least > 30);
    if (log) return [least / 1.15, most * 1.15, true];
    const [a, b] = [lowest(seen), highest(seen)], gap = (b - a) / 20 || Math.abs(b) / 2 || 0.5;
    return [a >= 0 && a - gap < 0 ? 0 : a - gap, b + gap, false];
  }

  // lines: [{number, label, colour, dash, calm, points}]; returns the svg, whose groups have data-group, with `roundAt(x)`.
  function draw({ lines, wide, high, scale = "auto", logX = false, goal = null, said = "", titleX, titleY, showX, showY, at = null, planned = 0, legend = false, label = titleY }) {
    const seen = lines.flatMap(line => line.points), xs = seen.map(p => p.x), positive = xs.filter(v => v > 0);
    const [bottom, top, logarithmic] = extent(lines, scale, goal), logarithmicX = logX && positive.length > 0;
    const begin = logarithmicX ? lowest(positive) : Math.min(0, lowest(xs)), last = Math.max(highest(xs), Math.min(planned, 2 * highest(xs)));
    const [first, end] = seen.length ? [begin, last > begin ? last : begin + 1] : [0, 1];
    const sx = logarithmicX ? Math.log : v => v, sy = logarithmic ? Math.log : v => v;
    const [up, base] = [legend ? 26 : 10, high - 40], marks = ticks(bottom, top, logarithmic, Math.max(2, (base - up) / 42));
    const words = marks.map(showY), left = Math.max(34, 12 + 7.3 * highest(words.map(w => w.length))), right = wide - (lines.length > 1 ? 26 : 12);
    const X = v => left + (right - left) * (sx(v) - sx(first)) / (sx(end) - sx(first));
    const Y = v => base - (base - up) * (sy(Math.min(Math.max(v, bottom), top)) - sy(bottom)) / (sy(top) - sy(bottom));
    const whole = high + (legend ? 20 * lines.length + 8 : 0);
    const svg = make("svg", { viewBox: `0 0 ${wide} ${whole}`, width: wide, height: whole, role: "group", "aria-label": `${label}, by ${titleX}` });
    if (legend) svg.append(make("text", { x: 8, y: 14 }, titleY), ...lines.map((line, k) => key(line, left, high + 12 + 20 * k)));
    marks.forEach((v, k) => svg.append(make("path", { class: "grid", d: `M${px(left)} ${px(Y(v))}H${right}` }),
      make("text", { class: "end", x: px(left - 7), y: px(Y(v) + 4) }, words[k])));
    for (const v of ticks(first, end, logarithmicX, Math.max(2, (right - left) / 95))) if (X(v) < right - 8 || lines.length > 1)
      svg.append(make("path", { class: "axis", d: `M${px(X(v))} ${base}v4` }), make("text", { class: "mid", x: px(X(v)), y: base + 18 }, showX(v)));
    svg.append(make("path", { class: "axis", d: `M${px(left)} ${base}H${right}` }), make("text", { class: "mid", x: px((left + right) / 2), y: high - 5 }, titleX));
    if (goal !== null && (!logarithmic || goal > 0)) {
      svg.append(make("path", { class: "goal", d: `M${px(left)} ${px(Y(goal))}H${right}` }));
      if (said) svg.append(make("text", { x: px(left + 6), y: px(Y(goal) - 5 < up + 8 ? Y(goal) + 15 : Y(goal) - 5) }, said));
    }
    const ends = lines.map(line => drawn(svg, line, { X, Y, up, base, at, logarithmic, logarithmicX, showY })).filter(Boolean);
    if (lines.length > 1) tags(ends, base);
    if (!seen.length) svg.append(make("text", { class: "mid", x: px((left + right) / 2), y: (up + base) / 2 }, "Nothing was measured here, or all is filtered out."));
    svg.roundAt = x => {  // the round of the nearest point
      const near = lines.flatMap(line => line.points).map(p => [Math.abs(X(p.x) - x), p.round]);
      return near.length ? near.reduce((a, b) => b[0] < a[0] ? b : a)[1] : null;
    };
    return svg;
  }

  function key(line, x, y) {
    const entry = make("g", { class: line.colour });
    entry.append(make("path", { class: "curve", "stroke-dasharray": line.dash, d: `M${px(x)} ${y - 4}h34` }), make("text", { class: "tag", x: px(x + 42), y }, line.number),
      make("text", { x: px(x + 64), y }, line.label));
    return entry;
  }

  function drawn(svg, line, { X, Y, up, base, at, logarithmic, logarithmicX, showY }) {
    const points = line.points.filter(p => (!logarithmicX || p.x > 0) && (!logarithmic || p.y > 0));
    const name = line.number ? `${line.number}: ${line.label}` : line.label;
    const group = make("g", { class: `line ${line.colour}`, "data-group": line.number, "data-key": `line-${line.number}`, tabindex: 0, role: "img", "aria-label": name });
    group.append(make("title", {}, name));
    svg.append(group);
    if (!points.length) return null;
    const place = (p, key) => `${px(X(p.x))} ${px(Y(p[key]))}`, path = `M${points.map(p => place(p, "y")).join("L")}`;
    if (points.some(p => p.low !== p.high))
      group.append(make("path", { class: "band", d: `M${points.map(p => place(p, "low")).join("L")}L${[...points].reverse().map(p => place(p, "high")).join("L")}Z` }));
    group.append(make("path", { class: "curve", "stroke-dasharray": line.dash, d: path }), make("path", { class: "hit", "data-hit": "", d: path }));
    const looked = at === null ? null : nearest(points, at);
    if (looked) {
      group.append(make("path", { class: "cross", "data-hit": "", d: `M${px(X(looked.x))} ${up}V${base}` }),
        make("circle", { class: "dot", "data-hit": "", cx: px(X(looked.x)), cy: px(Y(looked.y)), r: 4 }));
      group.setAttribute("aria-label", `${name}: ${showY(looked.y)} at round ${looked.round}`);
    } else if (points.length === 1) group.append(make("circle", { class: "dot", cx: px(X(points[0].x)), cy: px(Y(points[0].y)), r: 4 }));
    return { group, x: X(points.at(-1).x), y: Y(points.at(-1).y), line };
  }
  // The last point up to a round, or the first there is.
  const nearest = (points, round) => points.findLast(p => p.round <= round) ?? points[0] ?? null;

  // Numbers at the ends, pushed apart where they would lie on each other.
  function tags(ends, base) {
    ends.sort((a, b) => a.y - b.y);
    ends.forEach((one, k) => { if (k) one.y = Math.max(one.y, ends[k - 1].y + 13); });
    for (let k = ends.length - 1, limit = base + 6; k >= 0; k--, limit -= 13) ends[k].y = Math.min(ends[k].y, limit);
    for (const { group, x, y, line } of ends) group.append(make("text", { class: "tag", x: px(x + 6), y: px(y + 4) }, line.number));
  }

  function sample({ colour, dash }) {
    const svg = make("svg", { class: `sample ${colour}`, viewBox: "0 0 34 10", width: 34, height: 10, "aria-hidden": "true" });
    svg.append(make("path", { "stroke-dasharray": dash, d: "M0 5H34" }));
    return svg;
  }
  return { draw, look, make, nearest, px, sample, ticks };
})();
