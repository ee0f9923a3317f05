// The numbers of the page: a port of fedscaffold.report.tables, from the curves of the runs. No document.
"use strict";
const Numbers = (() => {
  const HUGE = 1e300;  // as good as infinite
  const known = v => v !== null && v !== undefined && Number.isFinite(v);
  const mean = list => list.reduce((a, b) => a + b, 0) / list.length;
  const spread = list => {
    const m = mean(list);
    return list.length > 1 ? Math.sqrt(list.reduce((a, v) => a + (v - m) ** 2, 0) / (list.length - 1)) : 0;
  };

  // The middle, where null is later than everything; null if it is null.
  function median(list) {
    const order = list.map(v => v === null ? Infinity : v).sort((a, b) => a < b ? -1 : a > b ? 1 : 0);
    const half = order.length >> 1, middle = order.length % 2 ? order[half] : (order[half - 1] + order[half]) / 2;
    return Number.isFinite(middle) ? middle : null;
  }

  // Columns of single precision stay so, and meet the targets they met when they were measured.
  function prepare(data) {
    for (const group of data.groups) for (const run of group.runs) {
      for (const [name, { single, values }] of Object.entries(run.columns))
        run.columns[name] = (single ? Float32Array : Float64Array).from(values, v => v === null ? NaN : v);
      run.seconds = Float64Array.from(run.seconds, v => v === null ? NaN : v);
      for (const [name, parts] of [["up", ["bytes_up"]], ["sent", ["bytes_up", "bytes_down"]]]) {
        const there = parts.filter(part => run.columns[part]);
        let total = 0;
        run[name] = there.length ? run.columns.round.map((_, k) => total += there.reduce((a, p) => a + run.columns[p][k], 0)) : null;
      }
    }
    return data;
  }

  // Where in its columns a run first meets the target; -1 for never.
  function reached(run, metric, goal, rises) {
    const column = run.columns[metric];
    if (!column || goal === null) return -1;
    const aim = column instanceof Float32Array ? Math.fround(goal) : goal;
    return column.findIndex(v => rises ? v >= aim : v <= aim);
  }

  // One row of the table: all runs of a group, at a target {metric, value} whose value may be null.
  function row(group, target, rises) {
    const { metric, value } = target, up = rises.includes(metric);
    const at = group.runs.map(run => reached(run, metric, value, up));
    const pick = column => group.runs.map((run, k) => at[k] < 0 || !column(run) || !known(column(run)[at[k]]) ? null : column(run)[at[k]]);
    const rounds = pick(run => run.columns.round), hits = rounds.filter(v => v !== null), all = hits.length === rounds.length;
    const finite = (run, name) => [...(run.columns[name] || [])].filter(v => Math.abs(v) < HUGE);
    const edge = list => list.reduce((a, b) => up ? Math.max(a, b) : Math.min(a, b));
    const best = group.runs.map(run => finite(run, metric)).filter(list => list.length).map(edge);
    const last = group.runs.filter(run => run.diverged === null).map(run => finite(run, "loss")).filter(list => list.length).map(list => list.at(-1));
    const off = group.runs.flatMap(run => [run.residual, ...finite(run, "residual")]).filter(known);
    const seconds = pick(run => run.seconds), ends = list => list.some(v => v === null) ? [null, null] : [Math.min(...list), Math.max(...list)];
    const bytes = median(pick(run => run.sent)), [quick, slow] = ends(seconds);
    const ill = group.runs.filter(run => run.health === "broken").length, none = group.runs.every(run => run.health === "none");
    return {
      rounds_to_target: median(rounds), rounds_low: all ? Math.min(...hits) : null, rounds_high: all ? Math.max(...hits) : null,
      reached: hits.length, seeds: group.runs.length, bytes_to_target: bytes === null ? null : Math.round(bytes),
      seconds_to_target: median(seconds), seconds_low: quick, seconds_high: slow,
      best_metric: best.length ? mean(best) : null, best_spread: best.length > 1 ? spread(best) : 0,
      final_loss: last.length ? mean(last) : null, residual: off.length ? off.reduce((a, b) => Math.max(a, b)) : null,
      health: ill ? 1 : none ? null : 0, diverged: group.runs.filter(run => run.diverged !== null).length,
      ends: group.ends ?? null, metric, target: value, rounds: Math.max(...group.runs.map(run => run.rounds)),
    };
  }

  // Median, lowest and highest of a metric over the seeds, where half of them were measured, against an axis.
  function band(group, metric, axis) {
    const places = new Map(), against = run => ({ rounds: run.columns.round, up: run.up, sent: run.sent, seconds: run.seconds })[axis];
    for (const run of group.runs) {
      const xs = against(run), ys = run.columns[metric];
      if (!xs || !ys) continue;
      run.columns.round.forEach((round, k) => {
        if (!(Math.abs(ys[k]) < HUGE) || !known(xs[k])) return;
        if (!places.has(round)) places.set(round, [[], []]);
        places.get(round)[0].push(xs[k]); places.get(round)[1].push(ys[k]);
      });
    }
    return [...places].sort((a, b) => a[0] - b[0]).filter(([, [, ys]]) => 2 * ys.length >= group.runs.length)
      .map(([round, [xs, ys]]) => ({ round, x: median(xs), y: median(ys), low: Math.min(...ys), high: Math.max(...ys) }));
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
  const time = s => s < 1 ? `${digits(s * 1000, 3)} ms` : s < 120 ? `${digits(s, 3)} s` : `${digits(s / 60, 3)} min`;

  // The columns of the table: key to sort by, heading, what is shown; `asked` only where a target is given.
  const range = (low, high, show) => known(low) && known(high) && low !== high ? ` (${show(low)} to ${show(high)})` : "";
  const COLUMNS = [
    { key: "name", head: () => "Run", show: r => r.name },
    { key: "rounds_to_target", asked: true, head: goal => `Rounds to ${goal}`, show: r => r.rounds_to_target === null
      ? `> ${r.rounds}` : digits(r.rounds_to_target, 10) + range(r.rounds_low, r.rounds_high, String) },
    { key: "reached", asked: true, head: () => "Seeds that reached it", show: r => `${r.reached} of ${r.seeds}` },
    { key: "bytes_to_target", asked: true, head: () => "Data sent until then", show: r => known(r.bytes_to_target) ? size(r.bytes_to_target) : "-" },
    { key: "seconds_to_target", asked: true, some: true, head: () => "Time until then", show: r => known(r.seconds_to_target)
      ? time(r.seconds_to_target) + range(r.seconds_low, r.seconds_high, time) : "-" },
    { key: "best_metric", head: (_, metric) => `Best ${metric}`, show: r => short(r.best_metric) + (known(r.best_metric) && r.seeds > 1 ? ` ± ${short(r.best_spread, 2)}` : "") },
    { key: "final_loss", head: () => "Final loss", show: r => short(r.final_loss) },
    { key: "ends", some: true, head: () => "Ends", show: r => r.ends ?? "-" },
    { key: "health", head: () => "Control variates", show: r => r.health === null ? "none" : r.health ? "✘ broken" : "✔ healthy" },
    { key: "diverged", head: () => "Diverged", show: r => `${r.diverged} of ${r.seeds}` },
  ];
  const columns = (rows, asked) => COLUMNS.filter(c => (asked || !c.asked) && (!c.some || rows.some(r => known(r[c.key]) || r[c.key])));

  // What came out, in one sentence.
  function verdict(rows, target, metric) {
    if (!rows.length) return "No run is left: loosen the filters.";
    if (target.value === null) return "Give a target value to see who reaches it first.";
    const [first, ...others] = sorted(rows, "rounds_to_target", false), goal = `${metric} ${target.value}`;
    if (first.rounds_to_target === null) return `Nobody reached ${goal}${first.reached ? " with half of the seeds" : ""}.`;
    const over = first.seeds === 1 ? "one seed" : `median of ${first.seeds} seeds`;
    const next = others.find(r => r.rounds_to_target !== null);
    const rest = !others.length ? "" : !next ? "; nobody else did" : `; next ${next.label} after ${digits(next.rounds_to_target, 10)}`;
    return `${first.label} reached ${goal} first, after ${digits(first.rounds_to_target, 10)} rounds (${over})${rest}.`;
  }
  return { band, columns, known, median, prepare, reached, row, short, size, sorted, time, verdict };
})();
