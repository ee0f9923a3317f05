// The landscape and the rounds: the library's formulas on vectors of two numbers. tests/runs/test_theatre.py compares.
"use strict";
const Engine = (() => {
  const add = (a, b) => [a[0] + b[0], a[1] + b[1]];
  const sub = (a, b) => [a[0] - b[0], a[1] - b[1]];
  const scale = (s, a) => [s * a[0], s * a[1]];
  const apply = (A, v) => [A[0][0] * v[0] + A[0][1] * v[1], A[1][0] * v[0] + A[1][1] * v[1]];
  const times = (A, B) => [0, 1].map(i => [0, 1].map(j => A[i][0] * B[0][j] + A[i][1] * B[1][j]));
  const norm = a => Math.hypot(a[0], a[1]);
  const mean = list => scale(1 / list.length, list.reduce(add, [0, 0]));

  // The clients f_i(x) = x'A_i x / 2 - b_i'x around an optimum at 0, unlike in two ways that are dialled apart:
  //   A_i = S (I + curves T_i) S    T_i a reflection whose axis turns from client to client, so mean A_i = S S
  //   b_i = slopes S u_i            u_i a direction that turns alike, so that mean b_i = 0
  const TILT = 0.45, LONG = Math.sqrt(0.4);  // S has the eigenvalues 1 and LONG, the first one turned by TILT
  const START = [-1.7, 1.5];
  function landscape({ clients, slopes, curves }) {
    const [c, s] = [Math.cos(TILT), Math.sin(TILT)];
    const S = [[c * c + LONG * s * s, (1 - LONG) * c * s], [(1 - LONG) * c * s, s * s + LONG * c * c]];
    const hessians = [], linear = [];
    for (let i = 0; i < clients; i++) {
      const turn = 2 * Math.PI * i / clients, [a, b] = [curves * Math.cos(turn), curves * Math.sin(turn)];
      hessians.push(times(times(S, [[1 + a, b], [b, 1 - a]]), S));
      linear.push(scale(slopes, apply(S, [Math.cos(turn + 0.9), Math.sin(turn + 0.9)])));
    }
    return { hessians, linear, start: START };
  }

  // direction (g, y, x, shift), as in the library's algorithms; the server step is the same for all but for c.
  const PULL = 1;  // mu of FedProx
  const METHODS = {
    sgd: { direction: g => g, oneStep: true },
    fedavg: { direction: g => g },
    fedprox: { direction: (g, y, x) => add(g, scale(PULL, sub(y, x))) },
    scaffold: { direction: (g, y, x, shift) => add(g, shift), memory: true },
  };
  const shift = (c, own) => sub(c, own);
  const remember = (c, own, d) => add(sub(own, c), d);
  const server = (x, c, move, d, heard) => [sub(x, move), add(c, scale(heard, sub(d, c)))];
  const travelled = (x, y, steps, lr) => scale(1 / (steps * lr), sub(x, y));

  // One client: its local path, its mean direction d, and what it will remember. `beta` is momentum by displacement:
  // the move is divided by steps * lr as if no momentum had carried it further.
  function client(method, problem, i, x, c, own, { steps, lr }, noise, beta) {
    const [A, b] = [problem.hessians[i], problem.linear[i]], count = method.oneStep ? 1 : steps;
    const off = method.memory ? shift(c, own) : null, path = [x];
    let y = x, total = [0, 0], ball = [0, 0];
    for (let k = 0; k < count; k++) {
      const g = add(sub(apply(A, y), b), noise());
      const d = method.direction(g, y, x, off);
      total = add(total, d);
      ball = add(scale(beta, ball), d);
      y = sub(y, scale(lr, ball));
      path.push(y);
    }
    const d = scale(1 / count, total);
    const kept = method.memory ? remember(c, own, beta ? travelled(x, y, count, lr) : d) : own;
    return { i, d, move: sub(x, y), kept, path };
  }

  // One round. `harm` may lose replies on their way (the clients have stored their c_i by then) or repeat one.
  function round(method, state, problem, settings, cohort, noises, harm = {}) {
    const c_i = state.c_i.slice(), all = cohort.map(i =>
      client(method, problem, i, state.x, state.c, state.c_i[i], settings, noises(i), method.memory && harm.beta || 0));
    for (const reply of all) c_i[reply.i] = reply.kept;
    const arrived = all.filter(reply => !(harm.lost || []).includes(reply.i));
    if (harm.twice && arrived.length) arrived.push(arrived[0]);
    let { x, c } = state;
    if (arrived.length) {
      const D = mean(arrived.map(reply => reply.d)), move = mean(arrived.map(reply => reply.move));
      const after = server(x, c, move, D, arrived.length / problem.linear.length);
      [x, c] = [after[0], method.memory ? after[1] : c];
    }
    if (harm.forget && method.memory) c_i[harm.forget.client] = [0, 0];
    return { state: { x, c, c_i }, paths: all.map(reply => ({ i: reply.i, path: reply.path })) };
  }

  // Chance that can be replayed: the same draws for every method, whatever the sliders say.
  function dice(...seeds) {
    let a = seeds.reduce((h, seed) => Math.imul(h ^ (seed + 0x9e3779b9), 0x85ebca6b) ^ (h >>> 13), 0x2545f491) | 0;
    return () => {
      a = (a + 0x6d2b79f5) | 0;
      let t = Math.imul(a ^ (a >>> 15), 1 | a);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }
  function gauss(random, size) {
    return () => {
      if (!size) return [0, 0];
      const r = size * Math.sqrt(-2 * Math.log(1 - random())), angle = 2 * Math.PI * random();
      return [r * Math.cos(angle), r * Math.sin(angle)];
    };
  }
  function drawCohort(t, clients, number) {
    const random = dice(1, t), left = [...Array(clients).keys()], taken = [];
    while (taken.length < number) taken.push(...left.splice(Math.floor(random() * left.length), 1));
    return taken.sort();
  }

  // A whole run of all methods. `harms` lists what goes wrong: {kind, from, to}, in force in the rounds from < t <= to.
  const DROPPED = 0.05, BETA = 0.5, DRAW = 4;  // a draw that loses an early reply, whose mark is large enough to see
  function harmOf(harms, t, cohort) {
    const on = kind => harms.some(harm => harm.kind === kind && harm.from < t && t <= harm.to), random = dice(DRAW, t);
    const lost = cohort.filter(() => random() < DROPPED);
    return {
      lost: on("drop") ? lost : [],
      twice: on("twice"),
      forget: on("lose") ? { client: cohort[0] } : null,
      beta: on("momentum") ? BETA : 0,
    };
  }
  function run(settings, harms, rounds) {
    const problem = landscape(settings), none = Array(settings.clients).fill([0, 0]), told = {};
    for (const [name, method] of Object.entries(METHODS)) {
      let state = { x: problem.start, c: [0, 0], c_i: none };
      const one = told[name] = { xs: [state.x], paths: [[]], mismatch: [[0, 0]], size: [0], clients: problem.hessians.length };
      for (let t = 1; t <= rounds; t++) {
        const cohort = drawCohort(t, settings.clients, settings.cohort);
        const noises = i => gauss(dice(2, t, i), settings.noise);
        const after = round(method, state, problem, settings, cohort, noises, harmOf(harms, t, cohort));
        state = norm(after.state.x) < 1e6 ? after.state : state;  // what has run away stays where it was last seen
        one.xs.push(state.x);
        one.paths.push(after.paths);
        one.mismatch.push(sub(state.c, mean(state.c_i)));
        one.size.push(Math.max(one.size[t - 1], ...state.c_i.map(norm)));
      }
    }
    return { problem, told };
  }
  // As the library judges: what rounding explains of the mismatch, see `fedscaffold.metrics.explained`.
  const healthy = (one, t) => norm(one.mismatch[t]) <= (10 + 6 * Math.sqrt(one.clients)) * 2 ** -52 * Math.sqrt(t || 1) * one.size[t];

  return { METHODS, PULL, add, sub, scale, apply, times, norm, mean, landscape, round, run, healthy };
})();
