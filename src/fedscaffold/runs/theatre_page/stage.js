// The stage: what is drawn for given settings and mistakes, round by round. All numbers come from Engine and Theory.
"use strict";
const Stage = (() => {
  const { add, sub, norm } = Engine, ROUNDS = 60, LETTERS = "ABCDE", NEAR = 1e-4, NAMES = Words.methods;
  const byId = id => document.getElementById(id);
  const px = v => (Math.abs(v) < 1e5 ? v : 1e5 * Math.sign(v)).toFixed(1);
  const short = v => v === 0 ? "0" : v < NEAR ? v.toExponential(0) : v < 0.1 ? v.toFixed(3) : v.toFixed(2);
  // Shapes and dashes, so that colour is never needed to tell them apart.
  const DASHES = { sgd: "7 4", fedavg: "13 4", fedprox: "9 3 2 3", scaffold: "" };
  const CLIENT_DASHES = ["", "6 3", "2 3", "9 3 2 3", "12 4"];
  const MARKS = {
    sgd: "M-3-3H3V3H-3Z",
    fedavg: "M0-4 4 3H-4Z",
    fedprox: "M0-4 4 0 0 4-4 0Z",
    scaffold: "M-3 0A3 3 0 1 1 3 0A3 3 0 1 1-3 0",
  };
  const OFTEN = Math.sqrt(2 * Math.log(20));  // a Gaussian in the plane is within so many deviations 19 times of 20

  let settings, harms, t = 0, show, facts;
  const off = x => norm(sub(x, facts.best));
  const partial = () => settings.cohort < settings.clients;
  const heavy = () => harms.some(harm => harm.kind === "momentum" && harm.from < t && t <= harm.to);

  function compute(newSettings, newHarms) {
    [settings, harms] = [newSettings, newHarms];
    show = Engine.run(settings, harms, ROUNDS);
    facts = theory();
    landscape();
    numbers();
  }

  // What is known before the first round, for these settings.
  function theory() {
    const { problem } = show, { lr, steps, noise, clients, slopes, curves } = settings, mu = Engine.PULL;
    const best = Theory.optimum(problem), asked = [lr, clients, slopes, curves].join();
    const law = (count, kind) => noise && !partial() ? Theory.stationary(problem, lr, count, noise ** 2, kind) : null;
    return {
      best,
      asked,
      rate: Theory.contractionRate(problem, lr, steps),
      wanted: facts && facts.asked === asked ? facts.wanted : Theory.bestLocalSteps(problem, lr),  // dear: kept
      ends: {
        sgd: best,
        fedavg: add(best, Theory.bias(problem, lr, steps)),
        fedprox: add(best, Theory.bias(problem, lr, steps, mu)),
        scaffold: best,
      },
      laws: {
        sgd: law(1, { memory: false }),
        fedavg: law(steps, { memory: false }),
        fedprox: law(steps, { memory: false, drag: mu }),
        scaffold: law(steps),
      },
    };
  }
  // Where a method will end: a mismatch e in SCAFFOLD's memory moves that to where the mean gradient is -e.
  function endOf(name) {
    if (name !== "scaffold") return facts.ends[name];
    return sub(facts.best, Theory.solve(Theory.average(show.problem.hessians), show.told.scaffold.mismatch[t]));
  }

  // The window: square, with all that matters in it; to(x) in pixels.
  let size = 300, centre = [0, 0], half = 2;
  const minima = () => show.problem.hessians.map((A, i) => Theory.solve(A, show.problem.linear[i]));
  const to = p => [0.5 + (p[0] - centre[0]) / (2 * half), 0.5 - (p[1] - centre[1]) / (2 * half)].map(v => v * size);
  const at = p => to(p).map(px).join(" ");
  function frame() {
    const seen = [show.problem.start, facts.best, ...Object.values(facts.ends), ...minima()];
    const [a, b, c, d] = [0, 1].flatMap(k => [Math.min, Math.max].map(end => end(...seen.map(p => p[k]))));
    centre = [(a + b) / 2, (c + d) / 2];
    half = Math.max(b - a, d - c, 2.4) / 2 * 1.22;
    size = Math.max(120, byId("panels").firstElementChild.clientWidth);
  }
  // An ellipse around p with half axes of `along` in the direction `angle`, and `across`.
  function ellipse(p, along, across, angle, attributes) {
    const k = size / (2 * half), turn = `translate(${at(p)}) rotate(${(-angle * 180 / Math.PI).toFixed(2)})`;
    return `<ellipse rx="${px(along * k)}" ry="${px(across * k)}" transform="${turn}" ${attributes}/>`;
  }
  function contour(A, p, reach, attributes) {  // of (x - p)'A(x - p), its longer half axis `reach`
    const { values: [low, high], angle } = Theory.spectrum(A);
    return ellipse(p, reach * Math.sqrt(low / high), reach, angle, attributes);
  }
  function landscape() {
    frame();
    const { hessians } = show.problem, mean = Theory.average(hessians), shared = new Map();
    const body = [1.56, 1.14, 0.78, 0.48, 0.24].map(r => contour(mean, facts.best, r * half, 'class="bowl"'));
    minima().forEach((p, i) => {
      const look = `class="contour" stroke-dasharray="${CLIENT_DASHES[i]}"`;
      body.push(...[0.5, 0.32, 0.16].map(r => contour(hessians[i], p, r * half, look)));
      const [x, y] = to(p), hidden = norm(sub([x, y], to(facts.best))) < 20;  // a mark there hangs below
      const place = `${px(x)} ${px(hidden ? y + 24 : y)}`;
      shared.set(place, (shared.get(place) || "") + LETTERS[i]);  // clients with the same best point share a mark
    });
    for (const [place, letters] of shared) {
      const wide = 4 + 3.8 * letters.length, box = `x="${-wide}" y="-8" width="${2 * wide}" height="16" rx="8"`;
      body.push(`<g class="client" transform="translate(${place})"><rect ${box}/><text y="3.6">${letters}</text></g>`);
    }
    for (const name in NAMES) {
      byId(`panel-${name}`).setAttribute("viewBox", `0 0 ${size} ${size}`);
      byId(`ground-${name}`).innerHTML = body.join("");
    }
  }

  function action(name) {
    const one = show.told[name], xs = one.xs.slice(0, t + 1), end = endOf(name), law = facts.laws[name], body = [];
    const put = (kind, p, d) => `<path class="${kind}" transform="translate(${at(p)})" d="${d}"/>`;
    for (const { path } of one.paths[t]) body.push(`<path class="walk" d="M${path.map(at).join("L")}"/>`);
    body.push(`<path class="path" d="M${xs.map(at).join("L")}"/>`, ...xs.map(x => put("dot", x, MARKS[name])));
    body.push(`<g class="target" transform="translate(${at(facts.best)})"><circle r="12"/><circle r="2.2"/></g>`);
    if (law && !(name === "scaffold" && heavy())) {
      const { values, angle } = Theory.spectrum(law), [low, high] = values.map(v => OFTEN * Math.sqrt(v));
      body.push(ellipse(end, high, low, angle, 'class="theory range"'));
    }
    if (off(end) > 1e-6) body.push(put("theory", end, "M0-15 15 0 0 15-15 0Z"));
    for (const kind of ["now halo", "now"]) body.push(put(kind, one.xs[t], "M-6-6 6 6M-6 6 6-6"));
    return body.join("");
  }
  function draw(round) {
    t = round;
    for (const name in NAMES) {
      byId(`action-${name}`).innerHTML = action(name);
      const far = off(show.told[name].xs[t]);
      const words = far < NEAR ? "arrived" : far > 1e3 ? "ran away" : `${short(far)} away`;
      byId(`away-${name}`).textContent = words;
      byId(`panel-${name}`).setAttribute("aria-label", `${NAMES[name][0]} after ${t} rounds: ${words}`);
    }
    gauge();
    chart();
  }

  function gauge() {
    const one = show.told.scaffold, e = norm(one.mismatch[t]), well = Engine.healthy(one, t);
    const heading = `the model heads for a point ${short(off(endOf("scaffold")))} beside the target.`;
    const told = well ? "✔ Healthy. The memories add up." : `✘ Broken, and it will not heal: ${heading}`;
    const share = Math.min(100, Math.max(15, 100 + 17 * Math.log10(e / one.size[t])));  // full: as large as the c_i
    byId("gauge").className = well ? "health" : "health broken";
    if (byId("verdict").textContent !== told) byId("verdict").textContent = told;  // read out only when it changes
    byId("mismatch").textContent = well ? "0, but for rounding" : short(e);
    byId("needle").style.width = well ? "2%" : `${share.toFixed(0)}%`;
  }

  // Distance by round, on a scale of tens, with theory dotted on top.
  function chart() {
    const wide = Math.max(280, byId("chart").clientWidth), high = wide < 500 ? 260 : 330, right = wide - 92;
    const [left, top, base, least, most] = [52, 8, high - 34, -4, 0.7], body = [], ends = [], told = [];
    const X = k => left + (right - left) * k / ROUNDS, tens = v => Math.log10(Math.max(v, 1e-30));
    const Y = v => top + (base - top) * (most - Math.max(least, Math.min(most, tens(v)))) / (most - least);
    const line = list => `M${list.map((v, k) => `${px(X(k))} ${px(Y(v))}`).join("L")}`;
    const text = (x, y, words, more) => `<text x="${px(x)}" y="${px(y)}" ${more}>${words}</text>`;
    for (const v of [0.0001, 0.001, 0.01, 0.1, 1]) {
      body.push(`<path class="grid" d="M${left} ${px(Y(v))}H${right}"/>`, text(left - 6, Y(v) + 4, v, 'class="tick"'));
    }
    for (const k of [0, 20, 40, 60]) body.push(text(X(k), high - 14, k, 'class="mid"'));
    body.push(text(X(ROUNDS / 2), high - 1, "round", 'class="mid"'));
    for (const name in NAMES) {
      const far = show.told[name].xs.slice(0, t + 1).map(off), place = `translate(${px(X(t))} ${px(Y(far[t]))})`;
      const curve = `class="curve" data-method="${name}" stroke-dasharray="${DASHES[name]}" d="${line(far)}"`;
      const mark = `class="dot" transform="${place} scale(1.5)" d="${MARKS[name]}"`;
      body.push(`<g class="${name}"><path ${curve}/><path ${mark}/></g>`);
      ends.push({ name, y: Y(far[t]) });
      told.push(`${NAMES[name][0]} ${short(far[t])}`);
    }
    body.push(...promised().map(list => `<path class="theory" d="${line(list)}"/>`));
    ends.sort((a, b) => a.y - b.y).forEach((end, k) => { end.y = Math.max(end.y, k ? ends[k - 1].y + 16 : 12); });
    const over = Math.max(0, ends[3].y - base - 4) - 4;  // names that would fall below the axis move up together
    for (const { name, y } of ends) body.push(text(X(t) + 10, y - over, NAMES[name][0], `class="name ${name}"`));
    const label = `Distance to the target in round ${t}: ${told.join(", ")}`;
    byId("chart").innerHTML =
      `<svg viewBox="0 0 ${wide} ${high}" role="img" aria-label="${label}">${body.join("")}</svg>`;
  }
  function promised() {  // FedAvg's and FedProx's bias; SCAFFOLD's rate, down to what noise or damage leaves
    const all = [...Array(ROUNDS + 1).keys()], law = facts.laws.scaffold, start = off(show.problem.start);
    const floor = Math.hypot(law ? Math.sqrt(law[0][0] + law[1][1]) : 0, off(endOf("scaffold")));
    const flat = [facts.ends.fedavg, facts.ends.fedprox].map(off).filter(v => v > NEAR).map(v => all.map(() => v));
    return heavy() || partial() ? flat : [...flat, all.map(k => Math.max(start * facts.rate ** k, floor))];
  }

  function numbers() {
    const law = facts.laws.scaffold, digit = Theory.roundsPerDigit(facts.rate).toFixed(1);
    const stop = name => off(facts.ends[name]) < NEAR ? "0" : short(off(facts.ends[name]));
    const range = law ? short(OFTEN * Math.sqrt(Theory.spectrum(law).values[1])) : settings.noise ? "–" : "0";
    const rows = [
      ["rate", facts.rate.toFixed(3), "SCAFFOLD's error shrinks to this share in a round, or less: one more digit " +
        `right every ${digit} rounds, in the long run.`],
      ["best", facts.wanted.steps, `local steps would be best for SCAFFOLD here (you chose ${settings.steps}).`],
      ["bias", stop("fedavg"), "is how far beside the target FedAvg stops."],
      ["prox", stop("fedprox"), "is how far FedProx stops."],
      ["range", range, "is how far noise still moves SCAFFOLD: the longer half of its ellipse."],
    ];
    byId("numbers").innerHTML = rows.map(([key, value, words]) =>
      `<div><dt id="theory-${key}">${value}</dt><dd>${words}</dd></div>`).join("");
    const some = "Rate, best number and ellipse are for rounds in which every client is heard; now only some are. ";
    const momentum = harms.some(harm => harm.kind === "momentum") ? "They do not cover momentum." : "";
    byId("scope").textContent = (partial() ? some : "") + momentum;
  }

  return { ROUNDS, compute, draw, resize: () => { landscape(); draw(t); } };
})();
