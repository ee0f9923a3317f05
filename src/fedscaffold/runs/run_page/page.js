// The page itself: what is chosen, the table, the charts, and how they point at each other. `Page.show(data)` draws it.
"use strict";
const Page = typeof document === "undefined" ? null : (() => {
  const { byId, set } = Panels, { element } = Maps, { known, short } = Numbers;
  const words = metric => metric.replaceAll("_", " "), said = value => value === undefined ? "–" : String(value);
  const now = { sort: "", falling: false, refused: new Map(), pinned: null, pointed: null, at: null, clients: 0, gone: "" };
  let data = null;

  // What has the focus keeps it, however often the page is drawn.
  function keeping(draw) {
    const key = document.activeElement?.dataset?.key;
    draw();
    if (key && document.activeElement?.dataset?.key !== key) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  }
  const target = () => {
    const value = byId("target-value").value;
    return { metric: byId("target-metric").value, value: value === "" || !Number.isFinite(Number(value)) ? null : Number(value) };
  };
  const visible = () => data.groups.filter(group => data.keys.every(key => !now.refused.get(key)?.has(said(group.config[key]))));
  const rows = groups => groups.map(group => Object.assign(Numbers.row(group, target(), data.rises),
    { name: `${group.name} ${group.detail}`, label: group.label, number: group.number, group }));
  const heads = () => { const t = target(); return [`${words(t.metric)} ${t.value}`, words(t.metric)]; };
  const several = () => data.groups.length > 1;
  const longest = () => Math.max(0, ...data.groups.flatMap(group => group.runs.map(run => run.along.round.at(-1) ?? 0)));

  const earliest = () => Math.min(longest(), ...data.groups.flatMap(group => group.runs.map(run => run.along.round[0] ?? 0)));

  function options(select, pairs, value) {
    select.replaceChildren(...pairs.map(([key, text]) => element("option", { value: key, textContent: text })));
    select.value = value;
  }
  // Numbers, colours and dashes for good, in the order in which the page opens.
  function begin() {
    const start = data.target || { metric: data.metrics[0] || "loss", value: null };
    options(byId("target-metric"), (data.metrics.length ? data.metrics : ["loss"]).map(m => [m, words(m)]), start.metric);
    byId("target-value").value = start.value === null ? "" : start.value;
    now.sort = start.value === null ? "best_metric" : "rounds_to_target";
    now.falling = start.value === null && data.rises.includes(start.metric);
  }
  function number() {
    data.groups = Numbers.sorted(rows(data.groups), now.sort, now.falling).map(row => row.group);
    data.groups.forEach((group, k) => Object.assign(group, { number: k + 1, look: Chart.look(group.colour, several() ? k : 0) }));
  }

  function light() {
    const lit = now.pointed ?? now.pinned;
    for (const id of ["charts", "residuals", "spending"]) byId(id).classList.toggle("some", lit !== null && several());
    for (const one of document.querySelectorAll("[data-group]")) one.classList.toggle("lit", Number(one.dataset.group) === lit);
  }
  function pointing(one, group) {
    for (const [event, at] of [["pointerenter", group], ["pointerleave", null], ["focusin", group], ["focusout", null]])
      one.addEventListener(event, () => { now.pointed = at; light(); });
  }
  function pin(group) {
    now.pinned = now.pinned === group ? null : group;
    for (const one of document.querySelectorAll("#table [aria-pressed]"))
      one.setAttribute("aria-pressed", Number(one.closest("tr").dataset.group) === now.pinned);
    light();
  }

  function table() {
    const all = Numbers.sorted(rows(visible()), now.sort, now.falling), t = target(), columns = Numbers.columns(all, t.value !== null);
    const head = element("tr", {}, ...columns.map(column => {
      const way = now.sort === column.key ? (now.falling ? "\u00a0↓" : "\u00a0↑") : "";
      const button = element("button", { textContent: column.head(...heads()) + way });
      Object.assign(button.dataset, { sort: column.key, key: `sort-${column.key}` });
      const cell = element("th", { scope: "col" }, button);
      if (way) cell.setAttribute("aria-sort", now.falling ? "descending" : "ascending");
      button.addEventListener("click", () => {
        now.falling = now.sort === column.key ? !now.falling : false;
        now.sort = column.key;
        keeping(table);
      });
      return cell;
    }));
    const body = all.map(row => {
      const tag = several() ? [element("b", { textContent: row.number })] : [];
      const button = element("button", {}, ...tag, Chart.sample(row.group.look), row.group.name,
        ...(row.group.detail ? [element("small", { textContent: row.group.detail })] : []));
      button.setAttribute("aria-pressed", row.number === now.pinned);
      button.dataset.key = `row-${row.number}`;
      button.addEventListener("click", () => pin(row.number));
      const bad = key => (key === "health" && row.health) || (key === "diverged" && row.diverged) ? "bad" : "";
      const line = element("tr", {}, element("th", { scope: "row" }, button), ...columns.slice(1).map(column =>
        element("td", { textContent: column.show(row), className: bad(column.key) })));
      line.dataset.group = row.number;
      pointing(line, row.number);
      return line;
    });
    byId("table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
    const idle = !data.groups.length || (Panels.going(data.progress) && t.value === null);
    set("verdict", idle ? "" : Numbers.verdict(all, t, words(t.metric), data.rises));
    const ill = all.flatMap(row => row.group.runs.filter(run => run.advice).map(run => `${row.group.label}, seed ${run.seed}: ${run.advice}`));
    set("advice", ill.slice(0, 6).join("; ") + (ill.length > 6 ? `; and ${ill.length - 6} more` : ""));
    light();
    return { all, columns };
  }

  // One figure: the chart of a metric, and its values at the round that is looked at.
  function figure(metric, { lead = false, value, goal = null, said = "", title, legend = false, place }) {
    const axis = byId("axis").value, at = now.at ?? longest();
    const show = { rounds: v => Numbers.short(v, 6), up: Numbers.size, sent: Numbers.size, seconds: Numbers.time }[axis];
    const lines = visible().map(group => ({ number: group.number, label: group.label, name: group.name, ...group.look, calm: group.runs.every(run => run.diverged === null),
      points: Numbers.band(group, metric, axis, value) }));
    const wide = Math.max(260, place.clientWidth), high = lead ? Math.min(440, Math.max(260, wide * 0.36)) : 240;
    const planned = axis === "rounds" && Panels.going(data.progress) ? data.progress.rounds || 0 : 0, scale = byId("scale").value;
    const svg = Chart.draw({ lines, wide, high, scale: scale === "auto" && data.rises.includes(metric) ? "linear" : scale, logX: byId("log-x").checked, goal, said,
      titleX: byId("axis").selectedOptions[0].textContent, titleY: title, showX: show, showY: v => short(v, 3), at: legend ? null : at, planned, legend });
    const shown = lines.map(line => [line, Chart.nearest(line.points, at)]).filter(([, point]) => point).slice(0, 12);
    const readout = element("div", { className: "readout" }, ...shown.map(([line, point]) => element("span", {},
      ...(several() ? [Chart.sample(line), element("b", { textContent: `${line.number} ` })] : []), ...(several() && shown.length <= 6 ? [`${line.name} `] : []), short(point.y, 4))));
    return { svg, readout };
  }
  function place(id, names) {
    const there = [...byId(id).querySelectorAll("figure")];
    if (there.map(one => one.dataset.name).join() === names.join()) return there;
    const made = names.map(name => Object.assign(element("figure"), {}));
    made.forEach((one, k) => { one.dataset.name = names[k]; });
    byId(id).replaceChildren(...made);
    return made;
  }
  function charts() {
    const t = target(), names = [t.metric, ...data.metrics.filter(metric => metric !== t.metric)].filter(metric => data.metrics.includes(metric));
    byId("curves").hidden = !data.groups.length;
    byId("charts").classList.toggle("several", several() && names.length > 0);
    if (!names.length) byId("charts").replaceChildren(element("p", { className: "small", textContent: "Nothing has been measured yet." }));
    else place("charts", names).forEach((one, k) => {
      const title = data.meanings[names[k]] || words(names[k]), goal = names[k] === t.metric ? t.value : null;
      const { svg, readout } = figure(names[k], { lead: several() && k === 0, goal, said: goal === null ? "" : `target ${goal}`, title, place: one });
      one.replaceChildren(element("figcaption", { textContent: title }), readout, svg);
      listen(svg);
    });
    const seeds = data.groups.some(group => group.runs.length > 1), long = data.stretch;
    set("reading", [seeds ? "Line: median of the seeds; band: lowest to highest." : "", several() ? "Colour is the algorithm; numbers are those of the table's rows. Hover or focus a row or a curve to see it alone; press it to keep it." : "",
      long ? `Curves are thinned to the lowest and highest value of every ${long} rounds, so rounds to a target that is chosen here may be up to ${long} late.` : ""].filter(Boolean).join(" "));
    const rounds = longest();
    Object.assign(byId("look"), { min: earliest(), max: rounds, value: now.at ?? rounds });
    set("looked", String(now.at ?? rounds));
    byId("look").setAttribute("aria-valuetext", `round ${now.at ?? rounds}`);
    byId("latest").setAttribute("aria-pressed", now.at === null);
    light();
  }
  function listen(svg) {
    for (const line of svg.querySelectorAll(".line")) {
      const group = Number(line.dataset.group);
      pointing(line, group);
      line.addEventListener("click", () => pin(group));
      line.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pin(group); } });
    }
    svg.addEventListener("click", event => {  // looks at the round that was clicked
      const box = svg.getBoundingClientRect(), round = svg.roundAt((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
      if (round !== null) look(round);
    });
  }

  function health() {
    const held = visible().map(group => ({ group, states: group.runs.map(run => run.health) })), judged = [];
    const worst = group => Numbers.highest(group.runs.map(run => run.relative).filter(known));
    for (const { group, states } of held) {
      const state = ["broken", "healthy", "noised", "unknown", "none"].find(word => states.includes(word)), times = worst(group);
      const size = Number.isFinite(times) ? `The largest mismatch is ${short(times, 2)} times what rounding explains.` : "";
      const sentence = { broken: `${size} Client state was lost, repeated or computed wrong, and training ends at a biased model.`, healthy: size,
        noised: "Whole clients are private: the server's c is its own and holds the noise, which the clients' do not. Their distance is no fault, and rounding is not its measure.",
        unknown: data.progress?.kind === "deployment" ? "The sites keep their control variates themselves." : Panels.going(data.progress) ? "No round is over yet." :
          "Its control variates are not finite, or were not recorded." }[state];
      const title = { broken: `✘ ${group.label}: broken.`, healthy: `✔ ${group.label}: healthy.`, noised: `${group.label}: c holds noise.`, unknown: `${group.label}: not known.` }[state];
      if (state !== "none") judged.push(element("div", { className: `box ${state}` }, element("b", { textContent: title }), ` ${sentence}`));
    }
    const without = held.filter(({ states }) => states.every(state => state === "none")).map(({ group }) => group.name);
    if (without.length) judged.push(element("p", { className: "small", textContent: `Without control variates: ${[...new Set(without)].join(", ")}.` }));
    byId("gauge").hidden = !data.groups.length;
    byId("judged").replaceChildren(...judged);
    const gauged = data.groups.flatMap(group => group.runs).filter(run => run.explained > 0 && run.columns.residual), noised = gauged.length > 0 && gauged.every(run => run.health === "noised");
    set("meant", noised ? "" : "The server's control variate must be the mean of the clients', c = sum p_i c_i. A mismatch never heals: training then ends away from the optimum, without any other sign.");
    if (!gauged.length) { byId("residuals").replaceChildren(); return; }
    const [one] = place("residuals", ["residual"]), title = noised ? "Noise in c: |c - sum p_i c_i|" : "Mismatch |c - sum p_i c_i|, as a multiple of what rounding explains";
    const times = (v, run) => run.explained > 0 && run.health !== "noised" ? v / run.explained : NaN;
    const { svg, readout } = figure("residual", { ...(noised ? {} : { value: times, goal: 1, said: "explained by rounding" }), title, place: one });
    one.replaceChildren(element("figcaption", { textContent: title }), readout, svg);
    listen(svg);
  }

  // What was spent: epsilon by round with the budget's line, and by client at the end.
  function privacy() {
    const runs = visible().flatMap(group => group.runs.filter(run => run.columns.epsilon)), budgets = [...new Set(runs.map(run => run.privacy?.budget ?? null))];
    byId("privacy").hidden = !runs.length;
    if (!runs.length) return;
    Panels.privacy(runs);
    const [one] = place("spending", ["epsilon"]), title = data.meanings.epsilon, budget = budgets.length === 1 ? budgets[0] : null;
    const { svg, readout } = figure("epsilon", { goal: budget, said: budget === null ? "" : `budget ${budget}`, title, place: one });
    one.replaceChildren(element("figcaption", { textContent: title }), readout, svg);
    listen(svg);
  }

  function filters() {
    const wanted = data.keys.map(key => [key, [...new Set(data.groups.map(group => said(group.config[key])))]]).filter(([, values]) => values.length < 30);
    byId("filters").hidden = wanted.length === 0 || data.groups.length < 3;
    byId("choices").replaceChildren(...wanted.map(([key, values]) => {
      const boxes = values.map(value => {
        const box = element("input", { type: "checkbox", checked: !now.refused.get(key)?.has(value) });
        box.addEventListener("change", () => {
          const refused = now.refused.get(key) || new Set();
          refused[box.checked ? "delete" : "add"](value);
          now.refused.set(key, refused);
          chosen();
        });
        return element("label", {}, box, value);
      });
      return element("fieldset", {}, element("legend", { textContent: key }), ...boxes);
    }));
  }
  function differences() {
    const groups = visible(), keys = data.keys.filter(key => new Set(groups.map(group => said(group.config[key]))).size > 1);
    const head = element("tr", {}, element("th", { scope: "col", textContent: "setting" }), ...groups.map(group => {
      const cell = element("th", { scope: "col" }, element("b", { textContent: `${group.number} ` }), Chart.sample(group.look), group.name);
      cell.dataset.group = group.number;
      return cell;
    }));
    const body = keys.map(key => element("tr", {}, element("th", { scope: "row", textContent: key }),
      ...groups.map(group => element("td", { textContent: said(group.config[key]) }))));
    byId("settings").hidden = groups.length < 2 || keys.every(key => key === "algorithm.name");
    byId("differences").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  }

  const more = (title, ...inside) => element("details", {}, element("summary", { textContent: title }), ...inside);
  function origins() {
    const runs = data.groups.flatMap(group => group.runs.map(run => `${group.label}, seed ${run.seed}: ${run.rounds} rounds, ${run.digest || "no digest"}, ${run.folder}`));
    const made = one => [...(one.command ? [element("pre", { textContent: one.command })] : []), element("p", { className: "small",
      textContent: [one.seconds ? `Seconds: ${one.seconds}.` : "", one.versions ? `Made with ${one.versions}; ${one.precision}.` : ""].filter(Boolean).join(" ") })];
    const places = data.origins.length === 1 ? made(data.origins[0]) : data.origins.map(one => more(one.folder, ...made(one)));
    const texts = data.groups.filter(group => group.toml).map(group => more(`Configuration of ${several() ? `${group.number} ` : ""}${group.label}`, element("pre", { textContent: group.toml })));
    const timed = "Time is that of the rounds, compiling left out: from the run's own log where it kept one; else all rounds count the same, and runs that were computed side by side share their time equally.";
    byId("source").hidden = !runs.length;
    byId("origins").replaceChildren(...places, ...texts, more(`${runs.length === 1 ? "The run" : `All ${runs.length} runs`} (equal digests mean equal models)`,
      element("pre", { textContent: runs.join("\n") })), element("p", { className: "small", textContent: timed }));
  }
  function holders() {
    byId("holders").hidden = data.maps.length === 0;
    byId("maps").replaceChildren(...data.maps.map(one => {
      const labels = one.counts[0].length, part = one.clients > one.who.length ? `, of which ${one.who.length} are drawn, evenly chosen` : "";
      const text = `${one.clients} clients hold ${one.records} records${labels > 1 ? ` of ${labels} labels` : ""}${part}`;
      return element("figure", {}, element("figcaption", { textContent: text }), Maps.holdings(one, Math.min(860, document.body.clientWidth - 30)));
    }));
  }

  function chosen() { keeping(() => { table(); charts(); health(); privacy(); differences(); }); }
  function look(round) {
    now.at = round === null || round >= longest() ? null : Math.max(0, round);
    keeping(() => { charts(); health(); privacy(); });
    Panels.attendance(data.progress, now.at ?? longest(), now.clients);
  }
  function live() {
    Panels.header(data.progress, now.gone);
    if (data.progress) now.clients = Math.max(0, Math.min(now.clients, Math.ceil(Panels.sizeOf(data.progress) / Panels.ROWS) - 1));
    Panels.attendance(data.progress, now.at ?? longest(), now.clients);
    Panels.costs(data.progress, data.groups[0]?.runs[0]);
  }
  function draw() {
    set("title", data.title);
    byId("problems").replaceChildren(...data.problems.filter(Boolean).map(textContent => element("p", { textContent })));
    byId("results").hidden = !data.groups.length;
    filters(); chosen(); live(); origins(); holders();
  }
  function show(fresh) {
    const first = data === null || data.metrics.join() !== fresh.metrics.join() || data.groups.length !== fresh.groups.length;
    data = Numbers.prepare(fresh);
    if (first) begin();
    number();
    draw();
    const { progress } = data;
    document.title = Panels.going(progress) ? `${progress.round}${progress.rounds ? `/${progress.rounds}` : ""}: ${data.title}` : data.title;
  }

  // Exports: what is shown, in the order shown
  const machine = () => {
    const { all } = table(), numbers = ["rounds_to_target", "rounds_low", "rounds_high", "reached", "seeds", "bytes_to_target", "seconds_to_target",
      "seconds_low", "seconds_high", "best_metric", "best_spread", "final_loss", "residual", "diverged", "ends", "metric", "target", "rounds"];
    return [["algorithm", ...data.keys, ...numbers], ...all.map(row => [row.group.name, ...data.keys.map(key => row.group.config[key]), ...numbers.map(n => row[n])])];
  };
  const people = () => {
    const { all, columns } = table();
    return [columns.map(column => column.head(...heads())), ...all.map(row => columns.map((column, k) => k ? column.show(row) : row.label))];
  };
  byId("csv").addEventListener("click", () => keeping(() => Exports.download("comparison.csv", "text/csv", Exports.csv(machine()))));
  byId("latex").addEventListener("click", () => keeping(() => Exports.download("comparison.tex", "application/x-tex", Exports.latex(people()))));
  byId("svg").addEventListener("click", () => {  // with the names of the lines, which the table has on the page
    const t = target(), title = data.meanings[t.metric] || words(t.metric), one = byId("charts").querySelector("figure");
    if (!one) return;
    const { svg } = figure(t.metric, { lead: true, goal: t.value, said: t.value === null ? "" : `target ${t.value}`, title, legend: true, place: one });
    one.append(svg);
    const text = Exports.svg(svg);
    svg.remove();
    Exports.download("curves.svg", "image/svg+xml", text);
  });
  byId("target-metric").addEventListener("change", () => {
    byId("target-value").value = "";
    chosen();
  });
  byId("target-value").addEventListener("input", chosen);
  for (const name of ["axis", "scale", "log-x"]) byId(name).addEventListener("change", () => look(now.at));
  byId("look").addEventListener("input", event => look(Number(event.target.value)));
  byId("latest").addEventListener("click", () => look(null));
  for (const [id, step] of [["earlier", -1], ["later", 1]]) byId(id).addEventListener("click", () => { now.clients += step; live(); });
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { if (data) { look(now.at); holders(); } });
  });
  const given = JSON.parse(byId("data").textContent);
  if (given) show(given);
  return { show, progress: () => data?.progress ?? null, lost: gone => { now.gone = gone; if (data) live(); } };
})();
