// The clock of the page: ask the server for what is new, keep it, draw; and the controls.
"use strict";
(() => {
  const { byId, set, ROWS, sizeOf } = Panels;
  const model = { now: null, columns: { round: [] }, marks: new Map(), at: -1, page: 0, linear: false, gone: "" };
  let follows = true, version = "";

  function take(now) {
    const { columns } = model, length = columns.round.length;
    if (now.version !== version || now.held !== length) {
      model.columns = { round: [] };
      model.marks.clear();
      version = now.version;
      if (now.held !== 0) return false;  // rows are missing: ask again for all of them
    }
    const held = model.columns.round.length;
    for (const [name, values] of Object.entries(now.columns)) {
      const column = model.columns[name] || (model.columns[name] = Array(held).fill(null));
      for (const value of values) column.push(value);
    }
    now.marks.forEach((mark, k) => model.marks.set(now.first + k, mark));
    while (model.marks.size > now.recent) model.marks.delete(model.marks.keys().next().value);
    model.now = now;
    return true;
  }
  function draw() {
    if (!model.now) return;
    const rounds = model.columns.round, most = rounds.length - 1, slider = byId("look");
    model.at = follows ? most : Math.min(model.at, most);
    slider.max = Math.max(0, most);
    slider.value = model.at;
    set("looked", most < 0 ? "0" : String(rounds[model.at]));
    slider.setAttribute("aria-valuetext", `round ${most < 0 ? 0 : rounds[model.at]}`);
    byId("latest").setAttribute("aria-pressed", follows);
    model.page = Math.max(0, Math.min(model.page, Math.ceil(sizeOf(model.now) / ROWS) - 1));
    Panels.draw(model);
  }
  function look(k) {
    model.at = Math.max(0, Math.min(k, model.columns.round.length - 1));
    follows = model.at === model.columns.round.length - 1;
    draw();
  }

  async function poll() {
    let wait = 1000;
    try {
      const answer = await fetch(`state?held=${model.columns.round.length}&version=${encodeURIComponent(version)}`);
      if (!answer.ok) throw new Error(await answer.text());
      wait = take(await answer.json()) ? (["starting", "running"].includes(model.now.phase) ? 1000 : 5000) : 0;
      model.gone = "";
      draw();
    } catch (error) {
      gone();
      wait = 5000;
    }
    setTimeout(poll, wait);
  }
  function gone() {
    const over = model.now && !["starting", "running"].includes(model.now.phase);
    model.gone = over ? "The run has ended, and its server with it: this is the last state. fedscaffold watch shows it again." :
      "The server does not answer: this is the last state it sent.";
    draw();
  }

  byId("stop").addEventListener("click", async () => {
    byId("stop").disabled = true;
    try {
      await fetch("stop", { method: "POST" });
    } catch (error) {
      gone();
    }
  });
  byId("linear").addEventListener("click", () => {
    model.linear = !model.linear;
    byId("linear").setAttribute("aria-pressed", model.linear);
    draw();
  });
  byId("latest").addEventListener("click", () => look(model.columns.round.length - 1));
  byId("look").addEventListener("input", event => look(Number(event.target.value)));
  byId("earlier").addEventListener("click", () => { model.page -= 1; draw(); });
  byId("later").addEventListener("click", () => { model.page += 1; draw(); });
  byId("charts").addEventListener("click", event => {  // a click on a curve looks at that round
    const svg = event.target.closest("svg");
    if (!svg) return;
    const { first, last, left, right } = svg.dataset, box = svg.getBoundingClientRect(), rounds = model.columns.round;
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const round = Number(first) + (x - left) / (right - left) * (last - first);
    look(rounds.reduce((best, r, k) => Math.abs(r - round) < Math.abs(rounds[best] - round) ? k : best, 0));
  });
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
  poll();
})();
