// Maps and bars: who holds what, who was heard, and amounts side by side.
"use strict";
const Maps = (() => {
  const { make, px } = Chart;
  const element = (name, properties = {}, ...inside) => {
    const one = Object.assign(document.createElement(name), properties);
    one.append(...inside);
    return one;
  };

  // Who holds what: a row for each client, a column for each label, shaded by the label's share of the client's records.
  function holdings({ counts, who }, room) {
    const labels = counts[0].length, rows = counts.length, totals = counts.map(row => row.reduce((a, b) => a + b, 0));
    const tall = Math.max(5, Math.min(18, 600 / rows)), [left, up] = [52, labels > 1 ? 10 : 6], most = Math.max(1, ...totals), digits = String(most).length;
    const span = labels > 1 ? Math.max(3.4, Math.min(30, (room - left - 110 - 8 * digits) / labels)) : 0, grid = left + labels * span;
    const bars = grid + (span ? 14 : 0), length = span ? 70 : Math.min(420, room - left - 20 - 8 * digits), wide = bars + length + 12 + 8 * digits;
    const bottom = up + rows * tall, high = bottom + (labels > 1 ? 74 : 40);
    const svg = make("svg", { viewBox: `0 0 ${px(wide)} ${px(high)}`, width: px(wide), height: px(high), role: "img", "aria-label": `${rows} clients and their records of ${labels} label${labels > 1 ? "s" : ""}` });
    const every = Math.max(1, Math.ceil(14 / tall)), wides = Math.max(1, Math.ceil(20 / (span || 1)));
    counts.forEach((row, i) => {
      const y = up + i * tall;
      if (i % every === 0) svg.append(make("text", { class: "end", x: left - 7, y: px(y + tall / 2 + 4) }, who[i]));
      if (span) row.forEach((count, j) => cell(svg, left + j * span, y, span, tall, count / (totals[i] || 1), `client ${who[i]}, label ${j}: ${count} of ${totals[i]} records`));
      const bar = make("rect", { class: "records", x: px(bars), y: px(y + 1), width: px(length * totals[i] / most), height: px(tall - 2) });
      bar.append(make("title", {}, `client ${who[i]}: ${totals[i]} records`));
      svg.append(bar);
      if (i % every === 0) svg.append(make("text", { class: span ? "" : "", x: px(bars + length * totals[i] / most + 5), y: px(y + tall / 2 + 4) }, totals[i]));
    });
    svg.append(make("text", { class: "mid", transform: `translate(13 ${px((up + bottom) / 2)}) rotate(-90)` }, "client"),
      make("text", { x: px(bars), y: px(bottom + 17) }, "records"));
    if (!span) return svg;
    for (let j = 0; j < labels; j += wides) svg.append(make("text", { class: "mid", x: px(left + (j + 0.5) * span), y: px(bottom + 17) }, j));
    svg.append(make("text", { class: "mid", x: px((left + grid) / 2), y: px(bottom + 34) }, "label"));
    ramp(svg, left, bottom + 46);
    return svg;
  }
  function cell(svg, x, y, w, h, share, words) {
    const gap = w > 6 && h > 6 ? 1 : 0;
    svg.append(make("rect", { class: "cell", x: px(x), y: px(y), width: px(w), height: px(h) }));
    if (share <= 0) return;
    const square = make("rect", { class: "share", x: px(x + gap / 2), y: px(y + gap / 2), width: px(w - gap), height: px(h - gap), "fill-opacity": (0.08 + 0.92 * share).toFixed(2) });
    square.append(make("title", {}, `${words} (${Math.round(100 * share)} %)`));
    svg.append(square);
  }
  function ramp(svg, x, y) {
    [0, 0.25, 0.5, 0.75, 1].forEach((share, k) => cell(svg, x + 24 * k, y, 24, 12, share, "share"));
    svg.append(make("text", { x, y: y + 26 }, "0"), make("text", { class: "end", x: x + 120, y: y + 26 }, "100 %"), make("text", { x: x + 130, y: y + 11 }, "share of the client's records"));
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

  // Who was heard: rows are clients, columns are rounds; `found(row, round)` gives the word.
  function attendance({ names, rounds, found, wide, at, label }) {
    const left = Math.min(150, 34 + 7.5 * Math.max(...names.map(name => name.length))), tall = 15, drawn = {};
    const step = Math.min(22, (wide - left - 4) / rounds.length), w = Math.max(1.5, step - 2), high = names.length * tall + 38;
    names.forEach((_, row) => rounds.forEach((round, k) => {
      const word = found(row, round);
      drawn[word] = (drawn[word] || "") + SHAPES[word](left + k * step, row * tall + 2, w, tall - 4);
    }));
    const svg = make("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": label });
    for (const [word, d] of Object.entries(drawn)) svg.append(make("path", { class: word, d }));
    names.forEach((name, row) => svg.append(make("text", { class: "end", x: px(left - 8), y: row * tall + 12 }, name)));
    const every = Math.max(1, Math.ceil(48 / step));
    rounds.forEach((round, k) => {
      const x = left + k * step;
      if (k % every === 0 && x < wide - 14) svg.append(make("text", { class: "mid", x: px(x + w / 2), y: high - 22 }, round));
      if (round === at) svg.append(make("rect", { class: "column", x: px(x - 1), y: 0.6, width: px(w + 2), height: names.length * tall - 0.6 }));
    });
    svg.append(make("text", { class: "mid", x: px(left + rounds.length * step / 2), y: high - 4 }, "round"),
      make("text", { class: "mid", transform: `translate(12 ${names.length * tall / 2}) rotate(-90)` }, "client"));
    return svg;
  }
  const legend = words => words.map(word => {
    const svg = make("svg", { viewBox: "-2 -2 16 16", "aria-hidden": "true" }, make("path", { class: word, d: SHAPES[word](0, 0, 12, 12) }));
    return element("span", {}, svg, WORDS[word]);
  });

  // [words, value, said] with bars to scale.
  function bars(rows) {
    const most = Math.max(...rows.map(row => row[1]), 1e-300);
    return element("div", { className: "bars" }, ...rows.flatMap(([words, value, said]) => {
      const bar = element("i");
      bar.style.width = `${(100 * value / most).toFixed(1)}%`;
      return [element("span", { textContent: words }), bar, element("span", { textContent: said })];
    }));
  }
  return { attendance, bars, element, holdings, legend };
})();
