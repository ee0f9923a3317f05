// One chart: a line and a band for each group, told apart by colour, dashes and a number at the line's end.
"use strict";
const Chart = (() => {
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 5"], COLOURS = 6;  // k0 to k5 of the style: 30 kinds of lines
  const space = () => document.createRange().createContextualFragment("<svg></svg>").firstChild.namespaceURI;
  const make = (name, attributes = {}, text) => {
    const one = document.createElementNS(space(), name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const look = k => ({ colour: `k${k % COLOURS}`, dash: DASHES[k % DASHES.length] });

  function ticks(low, high, log, room) {
    if (log) {
      const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)], step = Math.max(1, Math.ceil((b - a + 1) / room));
      const tens = [];
      for (let k = a; k <= b; k += step) tens.push(10 ** k);
      return tens.length > 1 ? tens : [low, Math.sqrt(low * high), high];
    }
    const raw = (high - low) / room || 1, ten = 10 ** Math.floor(Math.log10(raw)), step = ten * [1, 2, 5, 10].find(m => m * ten >= raw * 0.999);
    const marks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) marks.push(Number((k * step).toPrecision(12)));
    return marks;
  }

  // At most so many points as a line has pixels for, the first and the last among them.
  const thinned = (points, most) => points.length <= most ? points
    : [...new Set(Array.from({ length: most }, (_, k) => Math.round(k * (points.length - 1) / (most - 1))))].map(k => points[k]);

  // lines: [{number, label, colour, dash, points}]; returns the svg, whose groups have data-group.
  function draw({ lines, wide, high, logX, logY, goal, titleX, titleY, showX, showY, legend = false }) {
    const seen = lines.flatMap(line => line.points), positive = key => seen.map(p => p[key]).filter(v => v > 0);
    const least = list => list.reduce((a, b) => Math.min(a, b), Infinity), most = list => list.reduce((a, b) => Math.max(a, b), -Infinity);
    const logarithmic = logY && positive("low").length > 0 && !seen.some(p => p.low < 0), logX_ = logX && positive("x").length > 0;
    const ys = logarithmic ? [least(positive("low")), most(positive("high"))] : [least(seen.map(p => p.low)), most(seen.map(p => p.high))];
    if (goal !== null && (!logarithmic || goal > 0)) { ys[0] = Math.min(ys[0], goal); ys[1] = Math.max(ys[1], goal); }
    const xs = logX_ ? [least(positive("x")), most(positive("x"))] : [Math.min(0, least(seen.map(p => p.x))), most(seen.map(p => p.x))];
    if (!seen.length) [xs[0], xs[1], ys[0], ys[1]] = [0, 1, 0, 1];
    const gap = logarithmic ? 1.1 : (ys[1] - ys[0]) / 25 || Math.abs(ys[1]) / 2 || 0.5;
    const [bottom, top] = logarithmic ? [ys[0] / gap, ys[1] * gap] : [ys[0] - gap, ys[1] + gap];
    const [begin, end] = [xs[0], xs[1] > xs[0] ? xs[1] : xs[0] + 1];
    const sx = logX_ ? Math.log : v => v, sy = logarithmic ? Math.log : v => v, [left, right, up, base] = [62, wide - 30, 26, high - 44];
    const X = v => left + (right - left) * (sx(v) - sx(begin)) / (sx(end) - sx(begin));
    const Y = v => base - (base - up) * (sy(Math.min(Math.max(v, bottom), top)) - sy(bottom)) / (sy(top) - sy(bottom));
    const whole = high + (legend ? 20 * lines.length + 8 : 0);
    const svg = make("svg", { viewBox: `0 0 ${wide} ${whole}`, width: wide, height: whole, role: "group", "aria-label": `${titleY} by ${titleX}` });
    svg.append(make("text", { x: 8, y: 14 }, titleY));
    if (legend) lines.forEach((line, k) => {
      const y = high + 12 + 20 * k, entry = make("g", { class: line.colour });
      entry.append(make("path", { class: "curve", "stroke-dasharray": line.dash, d: `M${left} ${y - 4}h34` }), make("text", { class: "tag", x: left + 42, y }, line.number),
        make("text", { x: left + 64, y }, line.label));
      svg.append(entry);
    });
    for (const v of ticks(bottom, top, logarithmic, 6)) {
      svg.append(make("path", { class: "grid", d: `M${left} ${Y(v).toFixed(1)}H${right}` }), make("text", { class: "end", x: left - 7, y: (Y(v) + 4).toFixed(1) }, showY(v)));
    }
    for (const v of ticks(begin, end, logX_, Math.max(2, wide / 130))) svg.append(make("text", { class: "mid", x: X(v).toFixed(1), y: base + 18 }, showX(v)));
    svg.append(make("path", { class: "axis", d: `M${left} ${base}H${right}` }), make("text", { class: "mid", x: (left + right) / 2, y: high - 6 }, titleX));
    if (goal !== null && (!logarithmic || goal > 0)) svg.append(make("path", { class: "goal", d: `M${left} ${Y(goal).toFixed(1)}H${right}` }));
    const ends = [];
    for (const line of lines) {
      const points = thinned(line.points.filter(p => (!logX_ || p.x > 0) && (!logarithmic || p.y > 0)), 2 * wide);
      const group = make("g", { class: `line ${line.colour}`, "data-group": line.number, tabindex: 0, role: "img", "aria-label": `${line.number}: ${line.label}` });
      if (points.length) {
        const at = (p, key) => `${X(p.x).toFixed(1)} ${Y(p[key]).toFixed(1)}`, path = `M${points.map(p => at(p, "y")).join("L")}`;
        if (points.some(p => p.low !== p.high))
          group.append(make("path", { class: "band", d: `M${points.map(p => at(p, "low")).join("L")}L${[...points].reverse().map(p => at(p, "high")).join("L")}Z` }));
        group.append(make("path", { class: "curve", "stroke-dasharray": line.dash, d: path }), make("path", { class: "hit", "data-hit": "", d: path }));
        ends.push({ group, y: Y(points.at(-1).y), x: X(points.at(-1).x), line });
      }
      group.prepend(make("title", {}, `${line.number}: ${line.label}`));
      svg.append(group);
    }
    // numbers at the ends, pushed apart where they would lie on each other
    ends.sort((a, b) => a.y - b.y);
    ends.forEach((one, k) => { if (k) one.y = Math.max(one.y, ends[k - 1].y + 12); });
    for (let k = ends.length - 1, limit = base + 6; k >= 0; k--, limit -= 12) ends[k].y = Math.min(ends[k].y, limit);
    for (const { group, x, y, line } of ends) group.append(make("text", { class: "tag", x: (x + 5).toFixed(1), y: (y + 4).toFixed(1) }, line.number));
    if (!seen.length) svg.append(make("text", { class: "mid", x: (left + right) / 2, y: (up + base) / 2 }, "Nothing to draw: not measured, or all filtered out."));
    return svg;
  }

  function sample({ colour, dash }) {
    const svg = make("svg", { class: `sample ${colour}`, viewBox: "0 0 34 10", width: 34, height: 10, "aria-hidden": "true" });
    svg.append(make("path", { "stroke-dasharray": dash, d: "M0 5H34" }));
    return svg;
  }

  // Who holds what: a row of squares for each client, as dark as its share of records with that label.
  function holdings(counts, wide) {
    const classes = counts[0].length, side = Math.max(3, Math.min(16, Math.floor((wide - 40) / classes), Math.floor(900 / counts.length)));
    const svg = make("svg", { viewBox: `0 0 ${classes * side + 2} ${counts.length * side + 2}`, width: classes * side + 2, height: counts.length * side + 2, role: "img", "aria-label": "who holds which labels" });
    counts.forEach((row, i) => {
      const total = row.reduce((a, b) => a + b, 0) || 1;
      row.forEach((count, j) => {
        if (!count) return;
        const square = make("rect", { x: 1 + j * side, y: 1 + i * side, width: side - 1, height: side - 1, "fill-opacity": (0.1 + 0.85 * count / total).toFixed(2) });
        square.append(make("title", {}, `client ${i}, label ${j}: ${count} records`));
        svg.append(square);
      });
    });
    return svg;
  }
  return { draw, holdings, look, sample, ticks };
})();
