// The controls: sliders, buttons, and the clock.
"use strict";
(() => {
  const byId = id => document.getElementById(id), { dials, mistakes, tour, methods } = Words, { ROUNDS } = Stage;
  let settings = { ...Words.base }, harms = [], t = 0, clock = null;

  byId("panels").innerHTML = Object.entries(methods).map(([name, [title, words]]) => `<figure class="${name}">
    <svg id="panel-${name}" role="img" aria-label="${title}">
      <g id="ground-${name}"></g><g id="action-${name}"></g></svg>
    <figcaption><b>${title}</b> <span class="away" id="away-${name}"></span>
      <span class="small">${words}</span></figcaption></figure>`).join("");
  byId("sliders").innerHTML = dials.map(([key, label, least, most, step]) => `<div class="dial">
    <label for="dial-${key}">${label}</label><output id="shown-${key}" for="dial-${key}"></output>
    <input id="dial-${key}" type="range" min="${least}" max="${most}" step="${step}"></div>`).join("");
  byId("breaks").innerHTML = mistakes.map(([kind, label]) =>
    `<button id="break-${kind}" aria-pressed="false">${label}</button>`).join("");
  byId("tour").innerHTML = tour.map(([label]) => `<button aria-pressed="false">${label}</button>`).join("");

  function draw() {
    Stage.draw(t);
    byId("round").value = t;
    byId("round-now").textContent = t;
    byId("play").textContent = clock ? "Pause" : t === ROUNDS ? "Play again" : "Play";
  }
  function compute() {
    Stage.compute(settings, harms);
    draw();
  }
  function pause() {
    clearInterval(clock);
    clock = null;
  }
  function goTo(round) {
    pause();
    t = Math.min(round, ROUNDS);
    draw();
  }
  function play() {
    pause();
    if (t === ROUNDS) t = 0;
    clock = setInterval(() => {
      t += 1;
      if (t === ROUNDS) pause();
      draw();
    }, 220);
    draw();
  }
  // From the start; who asked for less motion, or opens the page with #still, sees the end at once.
  function begin() {
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches || location.hash === "#still";
    t = still ? ROUNDS : 0;
    pause();
    compute();
    if (!still) play();
  }

  const shown = (key, digits) =>
    key === "cohort" ? `${settings.cohort} of ${settings.clients}` : settings[key].toFixed(digits);
  function showDials() {
    byId("dial-cohort").max = settings.clients;
    for (const [key, , , , , digits] of dials) {
      byId(`dial-${key}`).value = settings[key];
      byId(`dial-${key}`).setAttribute("aria-valuetext", shown(key, digits));
      byId(`shown-${key}`).textContent = shown(key, digits);
    }
  }
  function turn(key, value) {
    const everyone = settings.cohort === settings.clients;
    settings = { ...settings, [key]: value };
    if (key === "clients") settings.cohort = everyone ? value : Math.min(settings.cohort, value);
    showDials();
    press("tour", -1);
    compute();
  }
  function press(group, which) {
    [...byId(group).children].forEach((button, k) => button.setAttribute("aria-pressed", k === which));
  }
  function tell(words) {
    byId("caption").textContent = byId("told").textContent = words;
  }

  function mistake(k) {
    const [kind, , from, to, words] = mistakes[k], lasting = harms.find(harm => harm.kind === kind && harm.to > ROUNDS);
    if (lasting && t > 0) {  // it ends here; what it did stays
      harms = [{ ...lasting, to: t }];
      press("breaks", -1);
      tell(Words.stopped);
      compute();
      return;
    }
    harms = [{ kind, from, to }];
    press("breaks", k);
    press("tour", -1);
    tell(words);
    begin();
  }
  function mend() {
    harms = [];
    press("breaks", -1);
    byId("told").textContent = Words.unbroken;
  }
  function scene(k) {
    const [, changes, words, kind] = tour[k];
    settings = { ...Words.base, ...changes };
    mend();
    showDials();
    if (kind) mistake(mistakes.findIndex(one => one[0] === kind));
    else begin();
    byId("caption").textContent = words;
    press("tour", k);
  }
  function reset() {
    mend();
    pause();
    t = 0;
    compute();
  }

  for (const [key] of dials) {
    byId(`dial-${key}`).addEventListener("input", event => turn(key, Number(event.target.value)));
  }
  [...byId("breaks").children].forEach((button, k) => button.addEventListener("click", () => mistake(k)));
  [...byId("tour").children].forEach((button, k) => button.addEventListener("click", () => scene(k)));
  byId("play").addEventListener("click", () => clock ? goTo(t) : play());
  byId("step").addEventListener("click", () => goTo(t + 1));
  byId("reset").addEventListener("click", reset);
  byId("round").addEventListener("input", event => goTo(Number(event.target.value)));
  addEventListener("resize", Stage.resize);
  scene(2);
})();
