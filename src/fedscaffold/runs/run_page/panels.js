// The parts of the page that are about one run: how far it is, who was heard, where data and time went.
"use strict";
const Panels = (() => {
  const { known, short, size, time } = Numbers, { element } = Maps;
  const byId = id => document.getElementById(id);
  const ROWS = 40;  // clients on the map at once
  const PHASES = {
    starting: "Starting", running: "Running", silent: "Its process is gone", unfinished: "Running when this page was written", finished: "Finished", target: "Target reached",
    diverged: "Diverged", budget: "Privacy budget spent", stopped: "Stopped", failed: "Failed",
  };
  const QUANTILES = ["least", "lower quartile", "median", "upper quartile", "largest"];
  const above = v => short(Math.ceil(v * 1000) / 1000, 6);  // an epsilon is never rounded down
  const NEEDED = {
    compile: "compiling", draw: "drawing cohorts and batches", rounds: "rounds, metrics included", checkpoint: "checkpoints",
    record: "this log", trackers: "trackers",
  };
  function set(id, text) {  // read out only when it changes
    if (byId(id).textContent !== text) byId(id).textContent = text;
  }
  const going = progress => progress !== null && ["starting", "running"].includes(progress.phase);
  const sizeOf = progress => Array.isArray(progress.clients) ? progress.clients.length : progress.clients;

  function header(progress, gone) {
    byId("now").hidden = progress === null;
    byId("notes").replaceChildren(...[...(progress?.notes ?? []), ...(gone ? [gone] : [])].map(textContent => element("li", { textContent })));
    byId("stop").hidden = progress === null || progress.kind !== "simulation" || progress.phase !== "running";
    if (progress === null) return;
    const { phase, round, rounds, pace, left, quiet } = progress, ended = ["finished", "target", "budget"].includes(phase);
    set("phase", PHASES[phase] || phase);
    byId("phase").className = ended ? "ended" : ["diverged", "failed", "silent"].includes(phase) ? "broken" : "";
    set("count", `round ${round}${rounds ? ` of ${rounds}` : ""}`);
    byId("meter").hidden = ended;
    byId("done").style.width = rounds ? `${Math.min(100, 100 * round / rounds)}%` : "0";
    byId("meter").setAttribute("aria-valuemax", rounds || 0);
    byId("meter").setAttribute("aria-valuenow", round);
    const rate = pace ? (pace >= 1 ? `${short(pace, 3)} rounds per second` : `${time(1 / pace)} per round`) : "";
    const silence = phase === "running" && quiet > Math.max(10, 5 / (pace || 1)) ? `nothing new for ${time(quiet)}` : "";
    set("pace", [known(left) ? `about ${time(left)} left` : "", going(progress) ? rate : "", silence].filter(Boolean).join(", "));
    byId("stop").disabled = !progress.stoppable || Boolean(gone);
  }

  // Who was heard: marks are by round, as {word: [clients]}, a number, or null.
  function wordOf(progress, mark, i) {
    if (typeof mark === "number") return mark === sizeOf(progress) ? "heard" : "none";
    const who = Array.isArray(progress.clients) ? progress.clients[i] : i;
    for (const word of ["heard", "late", "refused", "failed"]) if (mark && mark[word] && mark[word].includes(who)) return word;
    return "none";
  }
  function attendance(progress, at, page) {
    const all = progress ? sizeOf(progress) : 0;
    byId("attendance").hidden = !all || (!progress.marks.length && !going(progress));
    if (byId("attendance").hidden) return;
    const marks = new Map(progress.marks.map((mark, k) => [progress.first + k, mark])), rounds = [...marks.keys()];
    const counted = rounds.some(r => typeof marks.get(r) === "number" && marks.get(r) !== all);
    const looked = progress.kind === "deployment" ? Math.min(at + 1, progress.round) : at;
    byId("pages").hidden = all <= ROWS || counted || !rounds.length;
    set("told", rounds.length ? sentence(progress, marks, looked) : "No round is over yet.");
    if (counted || !rounds.length) {
      byId("map").replaceChildren();
      byId("legend").replaceChildren();
      return;
    }
    const first = page * ROWS, rows = Math.min(ROWS, all - first), wide = Math.max(260, byId("attendance").clientWidth);
    const names = [...Array(rows).keys()].map(k => Array.isArray(progress.clients) ? progress.clients[first + k] : String(first + k));
    const recent = rounds.slice(-Math.max(12, Math.floor((wide - 90) / 7)));
    byId("map").replaceChildren(Maps.attendance({ names, rounds: recent, found: (row, round) => wordOf(progress, marks.get(round), first + row), wide, at: looked,
      label: `Clients by round, the last ${recent.length} rounds: who was heard` }));
    byId("legend").replaceChildren(...Maps.legend(progress.kind === "deployment" ? ["heard", "late", "refused", "failed", "none"] : ["heard", "none"]));
    set("shown", `clients ${first} to ${first + rows - 1} of ${all}`);
    byId("earlier").disabled = page === 0;
    byId("later").disabled = first + ROWS >= all;
  }
  function sentence(progress, marks, round) {
    const mark = marks.get(round), all = sizeOf(progress);
    if (mark === undefined || mark === null) return `Who was heard in round ${round || 0} is no longer kept.`;
    if (typeof mark === "number") return mark === all ? `Round ${round}: all ${all} clients were heard.` :
      `Round ${round}: ${mark} of ${all} clients were heard; of so many only the number is kept.`;
    const list = who => who.slice(0, 12).join(", ") + (who.length > 12 ? ` and ${who.length - 12} more` : "");
    const parts = ["heard", "late", "refused", "failed"].filter(word => mark[word]).map(word => `${word}: ${list(mark[word])}`);
    return `Round ${round}: ${parts.join("; ") || "nobody was heard"}.`;
  }

  const note = textContent => element("p", { className: "small", textContent });
  function ages({ ages: told, clients, round }) {
    if (!told) {
      byId("ages").replaceChildren(note(round ? "Clients were counted, not named." : "No round is over yet."));
      set("oldest", "");
      return;
    }
    const { bins, counts } = told, last = counts.reduce((k, count, j) => count ? j : k, 0);
    const name = j => j + 1 === bins.length ? `${bins[j]} or more` : bins[j + 1] - bins[j] === 1 ? `${bins[j]}` : `${bins[j]} to ${bins[j + 1] - 1}`;
    const rows = counts.slice(0, last + 1).map((count, j) => [`${name(j)} rounds`.replace(/^1 rounds/, "1 round"), count, count]);
    byId("ages").replaceChildren(Maps.bars([...rows, ...(told.never ? [["never heard", told.never, told.never]] : [])]));
    const [[who, age] = []] = told.oldest;
    const eldest = known(age) ? `; oldest: ${Array.isArray(clients) ? who : `client ${who}`}, ${age} round${age === 1 ? "" : "s"}` : "";
    set("oldest", known(told.mean) ? `Mean ${short(told.mean, 3)} rounds${eldest}.` : "");
  }

  function costs(progress, run) {
    byId("costs").hidden = progress === null || !run || (!sizeOf(progress) && !Object.keys(progress.seconds).length);
    if (byId("costs").hidden) return;
    ages(progress);
    const total = way => run.along[way]?.at(-1), up = total("up"), sent = total("sent");
    byId("bytes").replaceChildren(known(up) ? Maps.bars([["by clients", up, size(up)], ["to clients", sent - up, size(sent - up)]]) :
      note(progress.round ? "Not recorded for this run." : "No round is over yet."));
    const spent = Object.entries(progress.seconds).filter(([, s]) => s > 0), all = spent.reduce((sum, [, s]) => sum + s, 0);
    byId("seconds").replaceChildren(spent.length ? Maps.bars(spent.map(([name, s]) => [NEEDED[name] || name, s, time(s)])) : note("Not known yet."));
    set("phases", spent.length ? `${time(all)} in all.` : "");
  }

  // What was spent, in words and by client; of several runs the words alone.
  const PROTECTED = { record: "a single record of a client", client: "a whole client" };
  function privacy(runs) {
    if (runs.some(run => !run.privacy)) {  // a deployed server: its sites told it, in the notes
      for (const id of ["guarantee", "protects", "spenders", "spent"]) byId(id).replaceChildren();
      return;
    }
    const { unit, delta, epsilon, after, clients, quantiles, before } = runs[0].privacy, single = runs.length === 1;
    const earlier = before ? ` Other runs on its ledger had spent ${above(before)} before, which is included.` : "";
    set("guarantee", single ? `After round ${after}: epsilon ${known(epsilon) ? above(epsilon) : "without bound"} at delta ${short(delta)}, for ${PROTECTED[unit]}.${earlier}` :
      "Each run has an epsilon of its own. What publishing several of them spends is more, and those with the same seed share their noise.");
    set("protects", runs.every(run => run.privacy.simulated) ? "A simulated epsilon protects nobody: one process held all records, and its noise follows from the seed. It is what a deployment with these settings would spend." : "");
    const rows = !single ? [] : clients ? clients.map((v, i) => [`client ${i}`, v]) : (quantiles ?? []).map((v, k) => [QUANTILES[k], v]);
    set("spenders", rows.length ? `Epsilon by client, after round ${after}` : "");
    byId("spent").replaceChildren(...(rows.length ? [Maps.bars(rows.map(([name, v]) => [name, v ?? 0, known(v) ? above(v) : "no bound"]))] :
      single ? [note("Its clients differ in more ways than are listed; run.privacy.by_client() computes them.")] : []));
  }
  return { ROWS, attendance, byId, costs, going, privacy, header, set, sizeOf };
})();
