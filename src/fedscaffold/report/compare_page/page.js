// The page itself: what is chosen, the table, the chart, and how they point at each other.
"use strict";
if (typeof document !== "undefined") (() => {
  const id = name => document.getElementById(name);
  const make = (name, properties = {}, ...inside) => {
    const one = Object.assign(document.createElement(name), properties);
    one.append(...inside);
    return one;
  };
  const data = Numbers.prepare(JSON.parse(id("data").textContent));
  const words = metric => metric.replaceAll("_", " "), said = value => value === undefined ? "–" : String(value);
  for (const group of data.groups) group.label = group.detail ? `${group.name} (${group.detail})` : group.name;
  const start = data.target || { metric: data.metrics[0] || "loss", value: null };
  const now = { sort: start.value === null ? "best_metric" : "rounds_to_target", falling: false, refused: new Map(), pinned: null, pointed: null };
  const choose = (select, options, value) => {
    select.append(...options.map(([key, text]) => make("option", { value: key, textContent: text })));
    select.value = value;
  };
  choose(id("target-metric"), data.metrics.map(m => [m, words(m)]), start.metric);
  choose(id("chart-metric"), [...data.metrics, "residual"].map(m => [m, words(m)]), start.metric);
  id("target-value").value = start.value === null ? "" : start.value;
  id("log-y").checked = !data.rises.includes(start.metric);
  now.falling = start.value === null && data.rises.includes(start.metric);

  const target = () => {
    const value = id("target-value").value.trim();
    return { metric: id("target-metric").value, value: value === "" || !Number.isFinite(Number(value)) ? null : Number(value) };
  };
  const visible = () => data.groups.filter(group => data.keys.every(key => !now.refused.get(key)?.has(said(group.config[key]))));
  const rows = groups => groups.map(group => Object.assign(Numbers.row(group, target(), data.rises),
    { name: `${group.name} ${group.detail}`, label: group.label, number: group.number, group }));
  // numbers, colours and dashes for good, in the order in which the page opens
  data.groups = Numbers.sorted(rows(data.groups), now.sort, now.falling).map(row => row.group);
  data.groups.forEach((group, k) => Object.assign(group, { number: k + 1, look: Chart.look(k) }));
  const heads = () => { const t = target(); return [`${words(t.metric)} ${t.value}`, words(t.metric)]; };

  function light() {
    const lit = now.pointed ?? now.pinned;
    id("chart").classList.toggle("some", lit !== null);
    for (const one of document.querySelectorAll("[data-group]")) one.classList.toggle("lit", Number(one.dataset.group) === lit);
  }
  function pointing(one, number) {
    for (const [event, at] of [["pointerenter", number], ["pointerleave", null], ["focusin", number], ["focusout", null]])
      one.addEventListener(event, () => { now.pointed = at; light(); });
  }
  function pin(number) {
    now.pinned = now.pinned === number ? null : number;
    for (const one of document.querySelectorAll("#table [aria-pressed]"))
      one.setAttribute("aria-pressed", Number(one.closest("tr").dataset.group) === now.pinned);
    light();
  }

  function table() {
    const all = Numbers.sorted(rows(visible()), now.sort, now.falling), t = target(), columns = Numbers.columns(all, t.value !== null);
    const head = make("tr", {}, ...columns.map(column => {
      const way = now.sort === column.key ? (now.falling ? "\u00a0↓" : "\u00a0↑") : "";
      const button = make("button", { textContent: column.head(...heads()) + way });
      button.dataset.sort = column.key;
      const cell = make("th", { scope: "col" }, button);
      if (way) cell.setAttribute("aria-sort", now.falling ? "descending" : "ascending");
      button.addEventListener("click", () => {
        now.falling = now.sort === column.key ? !now.falling : false;
        now.sort = column.key;
        table();
        document.querySelector(`[data-sort="${column.key}"]`).focus();
      });
      return cell;
    }));
    const body = all.map(row => {
      const button = make("button", {}, make("b", { textContent: row.number }), Chart.sample(row.group.look), row.group.name,
        ...(row.group.detail ? [make("small", { textContent: row.group.detail })] : []));
      button.setAttribute("aria-pressed", row.number === now.pinned);
      button.addEventListener("click", () => pin(row.number));
      const line = make("tr", {}, make("th", { scope: "row" }, button), ...columns.slice(1).map(column =>
        make("td", { textContent: column.show(row), className: (column.key === "health" && row.health) || (column.key === "diverged" && row.diverged) ? "bad" : "" })));
      line.dataset.group = row.number;
      pointing(line, row.number);
      return line;
    });
    id("table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
    id("verdict").textContent = Numbers.verdict(all, t, words(t.metric));
    const ill = all.flatMap(row => row.group.runs.filter(run => run.advice).map(run => `${row.group.label}, seed ${run.seed}: ${run.advice}`));
    id("notes").textContent = ill.slice(0, 6).join("; ") + (ill.length > 6 ? `; and ${ill.length - 6} more` : "");
    light();
    return { all, columns };
  }

  function chart(legend) {
    const metric = id("chart-metric").value, axis = id("chart-axis").value, t = target();
    const show = { rounds: v => Numbers.short(v, 6), up: Numbers.size, sent: Numbers.size, seconds: Numbers.time }[axis];
    const lines = visible().map(group => ({ number: group.number, label: group.label, ...group.look, points: Numbers.band(group, metric, axis) }));
    const drawn = Chart.draw({ lines, wide: Math.max(300, id("chart").clientWidth), high: Math.min(520, Math.max(300, id("chart").clientWidth * 0.45)),
      logX: id("log-x").checked, logY: id("log-y").checked, goal: metric === t.metric ? t.value : null,
      titleX: id("chart-axis").selectedOptions[0].textContent, titleY: data.meanings[metric] || "|c - sum p_i c_i|", showX: show, showY: v => Numbers.short(v, 3), legend: legend === true });
    id("chart").replaceChildren(drawn);
    for (const line of drawn.querySelectorAll(".line")) {
      const number = Number(line.dataset.group);
      pointing(line, number);
      line.addEventListener("click", () => pin(number));
      line.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pin(number); } });
    }
    light();
  }

  function filters() {
    const wanted = data.keys.map(key => [key, [...new Set(data.groups.map(group => said(group.config[key])))]]).filter(([, values]) => values.length < 30);
    id("filters").hidden = wanted.length === 0;
    id("choices").replaceChildren(...wanted.map(([key, values]) => {
      const boxes = values.map(value => {
        const box = make("input", { type: "checkbox", checked: true });
        box.addEventListener("change", () => {
          const refused = now.refused.get(key) || new Set();
          refused[box.checked ? "delete" : "add"](value);
          now.refused.set(key, refused);
          table(); chart(); differences();
        });
        return make("label", {}, box, value);
      });
      return make("fieldset", {}, make("legend", { textContent: key }), ...boxes);
    }));
  }

  function differences() {
    const groups = visible(), keys = data.keys.filter(key => new Set(groups.map(group => said(group.config[key]))).size > 1);
    const head = make("tr", {}, make("th", { scope: "col", textContent: "key" }), ...groups.map(group => {
      const cell = make("th", { scope: "col" }, make("b", { textContent: `${group.number} ` }), Chart.sample(group.look), group.name);
      cell.dataset.group = group.number;
      return cell;
    }));
    const body = keys.map(key => make("tr", {}, make("th", { scope: "row", textContent: key }),
      ...groups.map(group => make("td", { textContent: said(group.config[key]) }))));
    id("settings").hidden = groups.length < 2 || keys.length === 0;
    id("differences").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  }

  function origins() {
    const runs = data.groups.flatMap(group => group.runs.map(run => `${group.number} ${group.label}, seed ${run.seed}: ${run.rounds} rounds, ${run.digest}, ${run.folder}`));
    id("origins").replaceChildren(...data.origins.map(one => make("details", {}, make("summary", { textContent: one.folder }),
      make("pre", { textContent: one.command }), make("p", { className: "small", textContent: `Seconds: ${one.seconds || "unknown"}. Made with ${one.versions || "unknown versions"}; ${one.precision}.` }),
      make("pre", { textContent: one.config }))), make("details", {}, make("summary", { textContent: `All ${runs.length} runs (equal digests, equal models)` }),
      make("pre", { textContent: runs.join("\n") })), make("p", { className: "small", textContent: "Time is that of the rounds, compiling left out: from the run's own record where there is one; " +
      "else all rounds count the same, and the runs of a comparison, computed side by side, share its time equally." }));
    id("holders").hidden = data.maps.length === 0;
    id("maps").replaceChildren(...data.maps.map(one => make("figure", {}, Chart.holdings(one.counts, Math.min(900, innerWidth - 40)),
      make("figcaption", { className: "small", textContent: `${one.of}: a row for each client${one.clients > one.counts.length ? ` (the first ${one.counts.length} of ${one.clients})` : ""}, a column for each label; the stronger, the larger its share.` }))));
  }

  // Exports: what is shown, in the order shown
  const machine = () => {
    const { all } = table(), keys = data.keys, numbers = ["rounds_to_target", "rounds_low", "rounds_high", "reached", "seeds", "bytes_to_target", "seconds_to_target",
      "seconds_low", "seconds_high", "best_metric", "best_spread", "final_loss", "residual", "diverged", "ends", "metric", "target", "rounds"];
    return [["run", ...keys, ...numbers], ...all.map(row => [row.group.name, ...keys.map(key => row.group.config[key]), ...numbers.map(n => row[n])])];
  };
  const people = () => {
    const { all, columns } = table();
    return [columns.map(column => column.head(...heads())), ...all.map(row => columns.map((column, k) => k ? column.show(row) : row.label))];
  };
  id("csv").addEventListener("click", () => Exports.download("comparison.csv", "text/csv", Exports.csv(machine())));
  id("latex").addEventListener("click", () => Exports.download("comparison.tex", "application/x-tex", Exports.latex(people())));
  id("svg").addEventListener("click", () => {
    chart(true);  // with the names of the lines, which the table has on the page
    Exports.download("comparison.svg", "image/svg+xml", Exports.svg(id("chart").firstChild));
    chart();
  });

  id("target-metric").addEventListener("change", () => {
    id("chart-metric").value = id("target-metric").value;
    id("log-y").checked = !data.rises.includes(id("target-metric").value);
    table(); chart();
  });
  id("target-value").addEventListener("input", () => { table(); chart(); });
  for (const name of ["chart-metric", "chart-axis", "log-x", "log-y"]) id(name).addEventListener("change", chart);
  addEventListener("resize", chart);
  filters(); table(); chart(); differences(); origins();
})();
