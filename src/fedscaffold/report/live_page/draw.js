// Drawing: curves, bars and the map of who was heard, as text of SVG or HTML. No state, no document.
"use strict";
const Draw = (() => {
  const known = v => v !== null && v !== undefined && Number.isFinite(v);
  const px = v => v.toFixed(1);
  const lowest = list => list.reduce((a, b) => Math.min(a, b), Infinity);  // of any number of values
  const highest = list => list.reduce((a, b) => Math.max(a, b), -Infinity);
  const safe = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);
  function short(v) {
    if (!known(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size < 1e-3 || size >= 1e6) return Number(v.toPrecision(3)).toExponential().replace("e+", "e");
    return String(Number(v.toPrecision(4)));
  }
  function bytes(v) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    const k = v < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(v) / 3));
    return `${Number((v / 1000 ** k).toPrecision(3))} ${units[k]}`;
  }
  function time(s) {
    if (s < 1) return `${Math.round(s * 1000)} ms`;
    if (s < 90) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
    if (s < 5400) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
    return s < 172800 ? `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min` : `${Math.round(s / 86400)} days`;
  }

  // Marks of an axis: tens where it is logarithmic, else round numbers.
  function ticks(low, high, log, count = 5.5) {
    if (log) {
      const [a, b] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))], step = Math.ceil((b - a + 1) / 6);
      return [...Array(Math.floor((b - a) / step) + 1).keys()].map(k => 10 ** (a + k * step));
    }
    const raw = (high - low) / count || Math.abs(high) || 1, ten = 10 ** Math.floor(Math.log10(raw));
    const step = ten * [1, 2, 5, 10].find(m => m * ten >= raw * 0.999), first = Math.ceil(low / step - 1e-9);
    const number = Math.floor(high / step + 1e-9) - first + 1;
    return [...Array(Math.max(0, number)).keys()].map(k => Number(((first + k) * step).toPrecision(12)));
  }

  // A line through (x, y) pixels with no more than a few points for each column of pixels: its ends and extremes.
  function path(points) {
    const kept = [];
    for (let k = 0; k < points.length;) {
      const column = Math.floor(points[k][0]), first = k;
      let low = k, high = k;
      for (; k < points.length && Math.floor(points[k][0]) === column; k++) {
        if (points[k][1] < points[low][1]) low = k;
        if (points[k][1] > points[high][1]) high = k;
      }
      for (const j of [...new Set([first, low, high, k - 1])].sort((a, b) => a - b)) kept.push(points[j]);
    }
    return kept.length ? `M${kept.map(([x, y]) => `${px(x)} ${px(y)}`).join("L")}` : "";
  }

  // Rounds in xs, values in ys; `limit` a dashed line, `at` the index that is looked at. The axis goes as far as `rounds`,
  // and no further than twice the rounds there are.
  function chart({ xs, ys, wide, high = 190, linear = false, limit = null, at = -1, rounds = 0, label }) {
    const seen = ys.filter(known), marked = known(limit) ? [limit] : [], positive = [...seen, ...marked].filter(v => v > 0);
    const least = lowest(positive), most = highest(positive), all = seen.concat(marked);
    const log = !linear && positive.length > 0 && lowest(seen) >= 0 && most / least > 30;
    let [bottom, top] = log ? [least, most] : [lowest(all), highest(all)];
    if (!seen.length) [bottom, top] = [0, 1];
    if (log) [bottom, top] = [10 ** Math.floor(Math.log10(bottom) - 1e-9), 10 ** Math.ceil(Math.log10(top) + 1e-9)];
    else {
      const room = top > bottom ? (top - bottom) / 20 : Math.abs(top) / 2 || 0.5;
      [bottom, top] = [bottom - (bottom === 0 && top > 0 ? 0 : room), top + room];
    }
    const size = log ? Math.log10 : v => v, floor = Math.max(log ? bottom : -Infinity, bottom);
    const [left, right, up, base] = [58, wide - 10, 8, high - 24];
    const first = xs.length ? Math.min(1, xs[0]) : 0, now = xs.length ? xs[xs.length - 1] : 1;
    const last = Math.max(now, Math.min(rounds, 2 * now), first + 1);
    const X = x => left + (right - left) * (x - first) / (last - first);
    const Y = v => base - (base - up) * (size(Math.max(v, floor)) - size(bottom)) / (size(top) - size(bottom));
    const body = ticks(bottom, top, log).filter(v => v >= bottom * 0.999 || !log).filter(v => Y(v) <= base + 1 && Y(v) >= up - 1)
      .map(v => `<path class="grid" d="M${left} ${px(Y(v))}H${right}"/><text class="end" x="${left - 6}" y="${px(Y(v) + 4)}">${short(v)}</text>`);
    const below = ticks(first, last, false, wide < 420 ? 5 : 8).filter(v => Number.isInteger(v) && v >= first && X(v) < right - 12);
    body.push(...below.map(v => `<text class="mid" x="${px(X(v))}" y="${high - 7}">${v}</text>`));
    if (known(limit)) body.push(`<path class="limit" d="M${left} ${px(Y(limit))}H${right}"/>`);
    const points = xs.map((x, k) => [x, ys[k]]).filter(([, y]) => known(y)).map(([x, y]) => [X(x), Y(y)]);
    body.push(`<path class="curve" d="${path(points)}"/>`);
    if (points.length === 1) body.push(`<circle class="dot" cx="${px(points[0][0])}" cy="${px(points[0][1])}" r="3"/>`);
    if (at >= 0 && at < xs.length) {
      body.push(`<path class="cross" d="M${px(X(xs[at]))} ${up}V${base}"/>`);
      if (known(ys[at])) body.push(`<circle class="dot" cx="${px(X(xs[at]))}" cy="${px(Y(ys[at]))}" r="4"/>`);
    }
    return `<svg viewBox="0 0 ${wide} ${high}" data-first="${first}" data-last="${last}" data-left="${left}"
      data-right="${right}" role="img" aria-label="${safe(label)}">${body.join("")}</svg>`;
  }

  // [words, value, said] with bars to scale.
  function bars(rows) {
    const most = Math.max(...rows.map(row => row[1]), 1e-300);
    return `<div class="bars">${rows.map(([words, value, said]) => `<span>${safe(words)}</span>
      <i style="width:${(100 * value / most).toFixed(1)}%"></i><span>${safe(said)}</span>`).join("")}</div>`;
  }

  // One shape for each word, so that colour is never needed to tell them apart.
  const SHAPES = {
    heard: (x, y, w, h) => `M${px(x)} ${px(y)}h${px(w)}v${px(h)}h${px(-w)}Z`,
    late: (x, y, w, h) => `M${px(x)} ${px(y + h)}h${px(w)}l${px(-w / 2)} ${px(-h)}Z`,
    refused: (x, y, w, h) => `M${px(x)} ${px(y)}l${px(w)} ${px(h)}m0 ${px(-h)}l${px(-w)} ${px(h)}`,
    failed: (x, y, w, h) => `M${px(x + w / 2)} ${px(y)}l${px(w / 2)} ${px(h / 2)}l${px(-w / 2)} ${px(h / 2)}l${px(-w / 2)} ${px(-h / 2)}Z`,
    none: (x, y, w, h) => `M${px(x + w / 2 - 1)} ${px(y + h / 2 - 1)}h2v2h-2Z`,
  };
  const WORDS = { heard: "heard", late: "late", refused: "refused", failed: "failed", none: "not sampled" };
  // `found(client, round)` gives the word; rows are clients, columns are rounds.
  function map({ names, rounds, found, wide, at, label }) {
    const left = Math.min(150, 20 + 7.5 * Math.max(...names.map(name => name.length))), tall = 15;
    const step = Math.min(22, (wide - left - 4) / rounds.length), w = Math.max(1.5, step - 2), h = tall - 4, drawn = {};
    names.forEach((_, row) => rounds.forEach((round, k) => {
      const word = found(row, round), shape = SHAPES[word](left + k * step, row * tall + 2, w, h);
      drawn[word] = (drawn[word] || "") + shape;
    }));
    const body = Object.entries(drawn).map(([word, d]) => `<path class="${word}" d="${d}"/>`);
    names.forEach((name, row) => body.push(`<text class="end" x="${left - 8}" y="${row * tall + 12}">${safe(name)}</text>`));
    const high = names.length * tall + 20, every = Math.max(1, Math.ceil(48 / step));
    rounds.forEach((round, k) => {
      const x = px(left + k * step + w / 2);
      if (k % every === 0 && left + k * step < wide - 14) body.push(`<text class="mid" x="${x}" y="${high - 4}">${round}</text>`);
      if (round === at) body.push(`<rect class="column" x="${px(left + k * step - 1)}" y="0.6" width="${px(w + 2)}" height="${names.length * tall - 0.6}"/>`);
    });
    return `<svg viewBox="0 0 ${wide} ${high}" role="img" aria-label="${safe(label)}">${body.join("")}</svg>`;
  }
  const legend = words => words.map(word => `<span><svg viewBox="-2 -2 16 16" aria-hidden="true"><path class="${word}"
    d="${SHAPES[word](0, 0, 12, 12)}"/></svg>${WORDS[word]}</span>`).join("");

  return { known, safe, short, bytes, time, chart, bars, map, legend, ticks, path };
})();
