// The numbers of the page: a port of fedscaffold.runs.tables, from the curves of the runs. No document.
"use strict";
const Numbers = (() => {
  const HUGE = 1e300;  // as good as infinite
  const known = v => v !== null && v !== undefined && Number.isFinite(v);
  const mean = list => list.reduce((a, b) => a + b, 0) / list.length;
  const lowest = list => list.reduce((a, b) => Math.min(a, b), Infinity), highest = list => list.reduce((a, b) => Math.max(a, b), -Infinity);
  const spread = list => {
    const m = mean(list);
    return list.length > 1 ? Math.sqrt(list.reduce((a, v) => a + (v - m) ** 2, 0) / (list.length - 1)) : 0;
  };

  // The median, where null is later than everything; null if it is null.
  function median(list) {
    const order = list.map(v => v === null ? Infinity : v).sort((a, b) => a < b ? -1 : a > b ? 1 : 0);
    const half = order.length >> 1, middle = order.length % 2 ? order[half] : (order[half - 1] + order[half]) / 2;
    return Number.isFinite(middle) ? middle : null;
  }

  // Columns of single precision stay so, and meet the targets they met when they were measured.
  function prepare(data) {
    const numbers = (values, kind) => kind.from(values, v => v === null ? NaN : v);
    for (const group of data.groups) {
      group.label = group.detail ? `${group.name} (${group.detail})` : group.name;
      for (const run of group.runs) {
        for (const way of ["up", "sent", "seconds"]) if (run.along[way]) run.along[way] = numbers(run.along[way], Float64Array);
        for (const column of Object.values(run.columns)) {
          column.values = numbers(column.values, column.single ? Float32Array : Float64Array);
          column.round = column.round || run.along.round;
        }
      }
    }
    return data;
  }

  // Data sent, or seconds, until the end of a round: given at some rounds, or at all, and linear between.
  function along(run, axis, round) {
    if (axis === "rounds") return round;
    const xs = run.along.round, ys = run.along[axis];
    if (!ys || !xs.length) return null;
    let [a, b] = [0, xs.length - 1];
    while (b - a > 1) { const middle = (a + b) >> 1; if (xs[middle] <= round) a = middle; else b = middle; }
    if (xs[b] <= round) a = b;
    const share = xs[b] > xs[a] ? (round - xs[a]) / (xs[b] - xs[a]) : 0, y = ys[a] + share * (ys[b] - ys[a]);
    return Number.isFinite(y) ? y : null;
  }

  // The first round in which a run meets the target; null for never.
  function reached(run, metric, goal, rises) {
    const column = run.columns[metric];
    if (!column || goal === null) return null;
    const aim = column.values instanceof Float32Array ? Math.fround(goal) : goal;
    const at = column.values.findIndex(v => rises ? v >= aim : v <= aim);
    return at < 0 ? null : column.round[at];
  }

  // One row of the table: all runs of a group, at a target {metric, value} whose value may be null.
  function row(group, target, rises) {
    const { metric, value } = target, up = rises.includes(metric);
    const rounds = group.runs.map(run => reached(run, metric, value, up)), hits = rounds.filter(v => v !== null), all = hits.length === rounds.length;
    const cost = axis => group.runs.map((run, k) => rounds[k] === null ? null : along(run, axis, rounds[k]));
    const finite = (run, name) => [...(run.columns[name] || { values: [] }).values].filter(v => Math.abs(v) < HUGE);
    const best = group.runs.map(run => finite(run, metric)).filter(list => list.length).map(up ? highest : lowest);
    const last = group.runs.filter(run => run.diverged === null).map(run => finite(run, "loss")).filter(list => list.length).map(list => list.at(-1));
    const off = group.runs.flatMap(run => [run.residual, ...finite(run, "residual")]).filter(known);
    const seconds = cost("seconds"), bytes = median(cost("sent")), timed = seconds.every(v => v !== null);
    const ill = group.runs.filter(run => run.health === "broken").length, without = state => group.runs.every(run => run.health === state);
    return {
      rounds_to_target: median(rounds), rounds_low: all ? lowest(hits) : null, rounds_high: all ? highest(hits) : null,
      reached: hits.length, seeds: group.runs.length, bytes_to_target: bytes === null ? null : Math.round(bytes),
      seconds_to_target: median(seconds), seconds_low: timed ? lowest(seconds) : null, seconds_high: timed ? highest(seconds) : null,
      best_metric: best.length ? mean(best) : null, best_spread: best.length > 1 ? spread(best) : 0,
      final_loss: last.length ? mean(last) : null, residual: off.length ? highest(off) : null,
      health: ill ? 1 : without("none") || without("unknown") ? null : 0, diverged: group.runs.filter(run => run.diverged !== null).length,
      noised: without("noised"), ends: group.ends ?? null, metric, target: value, rounds: highest(group.runs.map(run => run.rounds)),
    };
  }

  // Median, lowest and highest of a metric over the seeds, where half of them were measured, against an axis.
  function band(group, metric, axis, value = v => v) {
    const places = new Map();
    for (const run of group.runs) {
      const column = run.columns[metric];
      if (!column) continue;
      column.values.forEach((v, k) => {
        const y = value(v, run), round = column.round[k], x = along(run, axis, round);
        if (!(Math.abs(y) < HUGE) || x === null) return;
        if (!places.has(round)) places.set(round, [[], []]);
        places.get(round)[0].push(x); places.get(round)[1].push(y);
      });
    }
    return [...places].sort((a, b) => a[0] - b[0]).filter(([, [, ys]]) => 2 * ys.length >= group.runs.length)
      .map(([round, [xs, ys]]) => ({ round, x: median(xs), y: median(ys), low: lowest(ys), high: highest(ys) }));
  }

  // Numbers rise or fall, words go by the alphabet; what is not there comes last, whichever way.
  function sorted(rows, key, falling) {
    const order = (a, b) => typeof a === "string" ? a.localeCompare(b) : a - b;
    return rows.map((row, k) => [row, k]).sort(([a, i], [b, j]) => {
      const [p, q] = [a[key] ?? null, b[key] ?? null];
      if (p === null || q === null) return (p === null) - (q === null) || i - j;
      return (falling ? order(q, p) : order(p, q)) || i - j;
    }).map(([row]) => row);
  }

  const digits = (v, n) => known(v) ? String(Number(v.toPrecision(n))) : "-";
  function short(v, n = 4) {
    const size = Math.abs(v);
    return known(v) && v !== 0 && (size < 1e-3 || size >= 1e6) ? Number(v.toPrecision(n)).toExponential().replace("e+", "e") : digits(v, n);
  }
  function size(v) {
    const power = v >= 1 ? Math.min(4, Math.floor(Math.floor(Math.log10(v)) / 3)) : 0;
    return `${digits(v / 1000 ** power, 4)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  }
  const time = s => s === 0 ? "0 s" : s < 1 ? `${digits(s * 1000, 3)} ms` : s < 120 ? `${digits(s, 3)} s` : s < 7200 ? `${digits(s / 60, 3)} min` :
    s < 172800 ? `${digits(s / 3600, 3)} h` : `${digits(s / 86400, 3)} days`;

  // The columns of the table: key to sort by, heading, what is shown; `asked` only where a target is given.
  const range = (low, high, show) => known(low) && known(high) && low !== high ? ` (${show(low)} to ${show(high)})` : "";
  const COLUMNS = [
    { key: "name", head: () => "Configuration", show: r => r.name },
    { key: "rounds_to_target", asked: true, head: goal => `Rounds to ${goal}`, show: r => r.rounds_to_target === null
      ? `> ${r.rounds}` : digits(r.rounds_to_target, 10) + range(r.rounds_low, r.rounds_high, String) },
    { key: "reached", asked: true, head: () => "Seeds that reached it", show: r => `${r.reached} of ${r.seeds}` },
    { key: "bytes_to_target", asked: true, head: () => "Data sent until then", show: r => known(r.bytes_to_target) ? size(r.bytes_to_target) : "-" },
    { key: "seconds_to_target", asked: true, some: true, head: () => "Time until then", show: r => known(r.seconds_to_target)
      ? time(r.seconds_to_target) + range(r.seconds_low, r.seconds_high, time) : "-" },
    { key: "best_metric", head: (_, metric) => `Best ${metric}`, show: r => short(r.best_metric) + (known(r.best_metric) && r.seeds > 1 ? ` ± ${short(r.best_spread, 2)}` : "") },
    { key: "final_loss", some: true, head: () => "Final loss", show: r => short(r.final_loss) },
    { key: "ends", some: true, head: () => "Ends", show: r => r.ends ?? "-" },
    { key: "health", head: () => "Control variates", show: r => r.health === null ? "none" : r.health ? "✘ broken" : r.noised ? "hold noise" : "✔ healthy" },
    { key: "diverged", head: () => "Diverged", show: r => `${r.diverged} of ${r.seeds}` },
  ];
  const columns = (rows, asked) => COLUMNS.filter(c => (asked || !c.asked) && (!c.some || rows.some(r => known(r[c.key]) || r[c.key])));

  // The result in one sentence.
  function verdict(rows, target, metric, rises) {
    if (!rows.length) return "No run is left: loosen the filters.";
    const over = r => r.seeds === 1 ? "one seed" : `${target.value === null ? "mean" : "median"} of ${r.seeds} seeds`;
    if (target.value === null) {
      const known_ = sorted(rows, "best_metric", rises.includes(target.metric)).filter(r => known(r.best_metric));
      if (!known_.length) return "Nothing was measured.";
      return `Best ${metric}: ${known_.slice(0, 6).map(r => `${r.label} ${short(r.best_metric)}`).join(", ")} (${over(known_[0])}).`;
    }
    const [first, ...others] = sorted(rows, "rounds_to_target", false), goal = `${metric} ${target.value}`;
    if (first.rounds_to_target === null) {
      const half = first.reached ? " with half of the seeds" : "";
      return others.length ? `No configuration reached ${goal}${half}.` : `${first.label} did not reach ${goal}${half} within ${first.rounds} rounds.`;
    }
    const next = others.find(r => r.rounds_to_target !== null), rounds = r => `${digits(r.rounds_to_target, 10)} round${r.rounds_to_target === 1 ? "" : "s"}`;
    const rest = !others.length ? "" : !next ? "; no other configuration did" : `; next was ${next.label} after ${digits(next.rounds_to_target, 10)}`;
    return `${first.label} reached ${goal}${others.length ? " first," : ""} after ${rounds(first)} (${over(first)})${rest}.`;
  }
  return { along, band, columns, highest, known, lowest, median, prepare, reached, row, short, size, sorted, time, verdict };
})();
