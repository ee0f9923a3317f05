// The panels: each draws one part of the page from the model, which `live.js` keeps.
"use strict";
const Panels = (() => {
  const byId = id => document.getElementById(id), { known, safe, short, bytes, time } = Draw;
  const ROWS = 40;  // clients on the map at once
  const APART = new Set(["round", "residual", "bytes_up", "bytes_down"]);
  const TITLES = {
    loss: "Loss", accuracy: "Accuracy", gap: "Loss above the optimum", distance: "Distance to the optimum",
    grad_norm: "Gradient norm", drift: "Drift of the local models", control_error: "Error of the control variates",
    age: "Mean age of control variates, in rounds",
  };
  const PHASES = {
    starting: "Starting", running: "Running", silent: "Its process is gone", finished: "Finished", target: "Target reached",
    diverged: "Diverged", stopped: "Stopped", failed: "Failed",
  };
  const NEEDED = {
    compile: "compiling", draw: "drawing cohorts and batches", rounds: "rounds, measurements included",
    checkpoint: "checkpoints", record: "this record", wall: "rounds",
  };
  function set(id, text) {  // read out only when it changes
    if (byId(id).textContent !== text) byId(id).textContent = text;
  }
  const runs = now => ["starting", "running"].includes(now.phase);
  const ahead = now => runs(now) && now.rounds || 0;
  const wideOf = id => Math.max(260, byId(id).clientWidth);

  function header({ now, gone }) {
    const { algorithm = "", problem = "" } = now.facts, ended = ["finished", "target"].includes(now.phase);
    set("title", algorithm ? `${algorithm}, ${now.kind === "deployment" ? "deployed" : now.phase === "running" ? "live" : "a run"}` : "A run");
    set("problem", problem || "");
    set("phase", PHASES[now.phase] || now.phase);
    byId("phase").className = ended ? "ended" : ["diverged", "failed", "silent"].includes(now.phase) ? "broken" : "";
    set("count", `round ${now.round}${now.rounds ? ` of ${now.rounds}` : ""}`);
    byId("done").style.width = now.rounds ? `${Math.min(100, 100 * now.round / now.rounds)}%` : "0";
    byId("meter").setAttribute("aria-valuemax", now.rounds || 0);
    byId("meter").setAttribute("aria-valuenow", now.round);
    const rate = now.pace ? (now.pace >= 1 ? `${short(now.pace)} rounds a second` : `${time(1 / now.pace)} a round`) : "";
    const left = known(now.left) ? `about ${time(now.left)} left` : "";
    const quiet = now.phase === "running" && now.quiet > Math.max(10, 5 / (now.pace || 1)) ? `nothing new for ${time(now.quiet)}` : "";
    set("pace", [left, rate, quiet].filter(Boolean).join(", "));
    const notes = [...now.notes, ...(gone ? [gone] : [])].map(note => `<li>${safe(note)}</li>`).join("");
    if (byId("notes").innerHTML !== notes) byId("notes").innerHTML = notes;
    byId("stop").hidden = now.kind !== "simulation" || now.phase !== "running";
    byId("stop").disabled = !now.stoppable || Boolean(gone);
    document.title = `${now.round}${now.rounds ? `/${now.rounds}` : ""} ${PHASES[now.phase] || ""}: ${algorithm || "fedscaffold"}`;
  }

  function curves({ now, columns, at, linear }) {
    const order = [...Object.keys(TITLES), ...Object.keys(columns)];
    const names = [...new Set(order)].filter(name => !APART.has(name) && (columns[name] || []).some(known));
    if (byId("charts").children.length !== names.length) {
      byId("charts").innerHTML = names.map(name => `<figure data-name="${safe(name)}"></figure>`).join("") ||
        '<p class="small">Nothing has been measured yet.</p>';
    }
    [...byId("charts").querySelectorAll("figure")].forEach((figure, k) => {
      const name = names[k], ys = columns[name], title = TITLES[name] || name.replaceAll("_", " ");
      const aim = now.target && now.target[0] === name ? now.target[1] : null, shown = known(ys[at]) ? ys[at] : null;
      const label = `${title} by round; ${short(shown)} at round ${columns.round[at]}`, wide = Math.max(260, figure.clientWidth);
      const svg = Draw.chart({ xs: columns.round, ys, wide, linear, limit: aim, at, rounds: ahead(now), label });
      const goal = aim === null ? "" : ` <span class="small">target ${short(aim)}</span>`;
      figure.dataset.name = name;
      figure.innerHTML = `<figcaption><span>${safe(title)}${goal}</span><b>${short(shown)}</b></figcaption>${svg}`;
    });
  }

  function health({ now, columns, at }) {
    const { state, residual, largest, limit } = now.gauge, hurt = now.gauge.state === "broken";
    const words = {
      healthy: "✔ Healthy. The memories add up.",
      broken: "✘ Broken, and it will not heal: training ends beside the optimum.",
      none: "There are no control variates, so nothing to gauge.",
      unknown: now.kind === "deployment" ? "Not known here: the clients keep their c_i." : "Nothing is known yet.",
    };
    byId("gauge").className = `health ${state}`;
    set("verdict", words[state]);
    const said = [["|c − mean c<sub>i</sub>| now", short(residual)], ["largest in any round", short(largest)],
      ["rounding explains up to", short(limit)]];
    byId("residual").innerHTML = state === "none" ? "" : said.map(([k, v]) => `<dt>${k}</dt><dd>${v}</dd>`).join("");
    const ys = columns.residual || [], drawn = ys.some(v => known(v) && v > 0);
    const label = `Residual by round, ${short(residual)} now; ${hurt ? "above" : "below"} what rounding explains`;
    byId("residuals").innerHTML = drawn ? Draw.chart({ xs: columns.round, ys, wide: wideOf("residuals"), high: 150, limit,
      at, rounds: ahead(now), label }) : "";
  }

  // Who was heard: marks are by round, as {word: [clients]}, a number, or null.
  const nameOf = (now, i) => Array.isArray(now.clients) ? now.clients[i] : String(i);
  function wordOf(now, mark, i) {
    if (typeof mark === "number") return mark === sizeOf(now) ? "heard" : "none";
    const who = Array.isArray(now.clients) ? now.clients[i] : i;
    for (const word of ["heard", "late", "refused", "failed"]) if (mark && mark[word] && mark[word].includes(who)) return word;
    return "none";
  }
  const sizeOf = now => Array.isArray(now.clients) ? now.clients.length : now.clients;
  function heat({ now, columns, marks, at, page }) {
    const all = sizeOf(now), rounds = [...marks.keys()], counted = rounds.some(r => typeof marks.get(r) === "number" && marks.get(r) !== all);
    const looked = now.kind === "deployment" ? Math.min(columns.round[at] + 1, now.round) : columns.round[at];
    byId("pages").hidden = all <= ROWS || counted || !rounds.length;
    if (!rounds.length || !all) {
      byId("map").innerHTML = "";
      byId("legend").innerHTML = "";
      set("told", runs(now) ? "No round is over yet." : "Not recorded for this run.");
      return;
    }
    set("told", sentence(now, marks, looked));
    if (counted) {
      byId("map").innerHTML = byId("legend").innerHTML = "";
      return;
    }
    const first = page * ROWS, rows = Math.min(ROWS, all - first), wide = wideOf("map");
    const names = [...Array(rows).keys()].map(k => nameOf(now, first + k));
    const recent = rounds.slice(-Math.max(12, Math.floor((wide - 90) / 7)));
    const found = (row, round) => wordOf(now, marks.get(round), first + row);
    const label = `Clients by round, the last ${recent.length} rounds: who was heard`;
    byId("map").innerHTML = Draw.map({ names, rounds: recent, found, wide, at: looked, label });
    byId("legend").innerHTML = Draw.legend(now.kind === "deployment" ? ["heard", "late", "refused", "failed", "none"] : ["heard", "none"]);
    set("shown", `clients ${first} to ${first + rows - 1} of ${all}`);
    byId("earlier").disabled = page === 0;
    byId("later").disabled = first + ROWS >= all;
  }
  function sentence(now, marks, round) {
    const mark = marks.get(round), all = sizeOf(now);
    if (mark === undefined || mark === null) return `Of round ${round || 0} it is no longer kept who was heard.`;
    if (typeof mark === "number") return mark === all ? `Round ${round}: all ${all} clients were heard.` :
      `Round ${round}: ${mark} of ${all} clients were heard; of so many only the number is kept.`;
    const list = who => who.slice(0, 12).join(", ") + (who.length > 12 ? ` and ${who.length - 12} more` : "");
    const parts = ["heard", "late", "refused", "failed"].filter(word => mark[word]).map(word => `${word}: ${list(mark[word])}`);
    return `Round ${round}: ${parts.join("; ") || "nobody was heard"}.`;
  }

  function ages({ now }) {
    const told = now.ages;
    if (!told) {
      byId("ages").innerHTML = `<p class="small">${now.round ? "Who was heard is not known by name." : "No round is over yet."}</p>`;
      set("oldest", "");
      return;
    }
    const { bins, counts } = told, last = counts.reduce((k, count, j) => count ? j : k, 0);
    const name = j => j + 1 === bins.length ? `${bins[j]} or more` : bins[j + 1] - bins[j] === 1 ? `${bins[j]}` : `${bins[j]} to ${bins[j + 1] - 1}`;
    const rows = counts.slice(0, last + 1).map((count, j) => [name(j), count, count]);
    byId("ages").innerHTML = Draw.bars([...rows, ...(told.never ? [["never heard", told.never, told.never]] : [])]);
    const [[who, age] = []] = told.oldest;
    const eldest = known(age) ? `; the oldest: ${Array.isArray(now.clients) ? who : `client ${who}`}, ${age} round${age === 1 ? "" : "s"}` : "";
    set("oldest", known(told.mean) ? `Mean ${short(told.mean)}${eldest}.` : "");
  }

  function traffic({ now, columns }) {
    const { up, down } = now.bytes, last = name => (columns[`bytes_${name}`] || []).at(-1) || 0;
    byId("bytes").innerHTML = !known(up) ? `<p class="small">${now.round ? "Not recorded for this run." : "No round is over yet."}</p>` : Draw.bars([
      ["from clients", up, bytes(up)], ["to clients", down, bytes(down)]]) +
      `<p class="small">In the last round ${bytes(last("up"))} from clients and ${bytes(last("down"))} to them.</p>`;
    const spent = Object.entries(now.seconds), total = spent.reduce((sum, [, s]) => sum + s, 0);
    byId("seconds").innerHTML = spent.length ? Draw.bars(spent.map(([name, s]) => [NEEDED[name] || name, s, time(s)])) : '<p class="small">Not known yet.</p>';
    const inside = "Measurements are inside the compiled rounds and not timed apart.";
    set("phases", spent.length ? `${time(total)} in all. ${now.kind === "simulation" ? inside : ""}` : "");
  }

  function facts({ now }) {
    const rows = Object.entries(now.facts).filter(([, value]) => value !== null && value !== "" && value !== undefined);
    const text = rows.map(([name, value]) => `<dt>${safe(name)}</dt><dd>${safe(value)}</dd>`).join("");
    if (byId("facts").innerHTML !== text) byId("facts").innerHTML = text;
  }

  return { ROWS, byId, set, sizeOf, draw: model => [header, curves, health, heat, ages, traffic, facts].forEach(part => part(model)) };
})();
