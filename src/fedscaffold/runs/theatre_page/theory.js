// The theory of a round on quadratics, as in the library, for two coordinates. tests/runs/test_theatre.py compares.
"use strict";
const Theory = (() => {
  const { add, sub, scale, apply, mean } = Engine;

  // Eigenvalues, rising, and the angle of the second one's vector, of a symmetric 2x2 matrix.
  function spectrum(A) {
    const half = (A[0][0] + A[1][1]) / 2, p = (A[0][0] - A[1][1]) / 2, q = A[0][1], r = Math.hypot(p, q);
    const high = half + r, det = A[0][0] * A[1][1] - q * q;
    const low = high ? det / high : half - r;  // no digits lost where it is small
    return { values: [low, high], angle: Math.atan2(q, p) / 2 };
  }
  function of(A, f) {  // f(A)
    const { values, angle } = spectrum(A), [low, high] = values.map(f), c = Math.cos(angle), s = Math.sin(angle);
    return [[high * c * c + low * s * s, (high - low) * c * s], [(high - low) * c * s, high * s * s + low * c * c]];
  }
  const sum = (A, B) => [add(A[0], B[0]), add(A[1], B[1])];
  const average = list => list.reduce(sum).map(row => scale(1 / list.length, row));
  function solve(A, v) {
    const det = A[0][0] * A[1][1] - A[0][1] * A[1][0];
    return [(A[1][1] * v[0] - A[0][1] * v[1]) / det, (A[0][0] * v[1] - A[1][0] * v[0]) / det];
  }

  // (1 - w)^H, its sum over h < H, and 1 - that sum / H: to full precision.
  function power(w, H) {
    const size = Math.exp(H * Math.log1p(w < 1 ? -w : w - 2));
    return w > 1 && H % 2 === 1 ? -size : size;
  }
  function geometric(w, H) {
    if (w === 0) return H;
    return (w < 0.5 ? -Math.expm1(H * Math.log1p(-w)) : 1 - power(w, H)) / w;
  }
  function lag(w, H) {
    if (Math.abs(w) * H > 1) return 1 - geometric(w, H) / H;
    let term = (H - 1) / 2 * w, series = term;
    for (let k = 1; k < 24; k++) series += term = -term * (H - k - 1) / (k + 2) * w;
    return series;
  }

  // What H local steps of client A do: `left` of the start (Upsilon), `behind` (B), `lost` = I - Upsilon, and the noise
  // they gather, for noise of variance 1. `drag` is FedProx's pull.
  function steps(A, lr, H, drag = 0) {
    return {
      left: of(A, a => power(lr * (a + drag), H) + drag * lr * geometric(lr * (a + drag), H)),
      behind: of(A, a => lag(lr * (a + drag), H)),
      lost: of(A, a => lr * a * geometric(lr * (a + drag), H)),
      noise: of(A, a => { const w = lr * (a + drag); return lr * lr * geometric(2 * w - w * w, H); }),
    };
  }
  function optimum({ hessians, linear }) {
    return solve(average(hessians), mean(linear));
  }

  // A round of SCAFFOLD with all clients, on s_c = u + r_c: u = mean s, s_c+ = Upsilon_c u + B_c (s_c - u).
  function roundMatrix(problem, lr, H) {
    const parts = problem.hessians.map(A => steps(A, lr, H)), n = parts.length;
    return square(2 * n, (i, j) => {
      const { left, behind } = parts[i >> 1], p = i & 1, q = j & 1;
      return (left[p][q] - behind[p][q]) / n + (i >> 1 === j >> 1 ? behind[p][q] : 0);
    });
  }
  const square = (n, f) => Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => f(i, j)));
  function product(A, B, turned = false) {  // A B, or A B'
    return square(A.length, (i, j) => {
      let total = 0;
      for (let k = 0; k < A.length; k++) total += A[i][k] * (turned ? B[j][k] : B[k][j]);
      return total;
    });
  }

  // Spectral radius, |A^n|^(1/n) for n = 2^44 by squaring: an error of one squaring counts half of the one before.
  function radius(A) {
    let log = 0;
    for (let k = 0; k < 45; k++) {
      const size = Math.sqrt(A.reduce((total, row) => total + row.reduce((t, a) => t + a * a, 0), 0));
      if (!(size > 0)) return size;
      log += Math.log(size) / 2 ** k;
      const unit = A.map(row => row.map(a => a / size));
      A = product(unit, unit);
    }
    return Math.exp(log);
  }
  const contractionRate = (problem, lr, H) => radius(roundMatrix(problem, lr, H));
  const roundsPerDigit = rate => rate <= 0 ? 0 : rate < 1 ? Math.LN10 / -Math.log(rate) : Infinity;

  // Where FedAvg (or FedProx, by `drag`) ends, minus the optimum.
  function bias(problem, lr, H, drag = 0) {
    const best = optimum(problem), parts = problem.hessians.map(A => steps(A, lr, H, drag));
    const pulls = problem.hessians.map((A, c) => sub(problem.linear[c], apply(A, best)));
    const push = mean(pulls.map((pull, c) => apply(parts[c].behind, pull)));
    return scale(-lr * H, solve(average(parts.map(part => part.lost)), push));
  }

  // The sum of A^t B A'^t, by doubling.
  function lyapunov(A, B) {
    const largest = M => Math.max(...M.flat().map(Math.abs));
    for (let k = 0; k < 64; k++) {
      const more = product(product(A, B), A, true);
      B = square(B.length, (i, j) => B[i][j] + more[i][j]);
      if (!(largest(more) > 1e-17 * largest(B))) break;
      A = product(A, A);
    }
    return B;
  }
  // Covariance of x in the long run, all clients taking part, gradients having variance `noise`.
  function stationary(problem, lr, H, noise, { memory = true, drag = 0 } = {}) {
    const parts = problem.hessians.map(A => steps(A, lr, H, drag)), n = parts.length;
    if (!memory) {
      const spread = average(parts.map(part => part.noise)).map(row => scale(noise / n, row));
      return lyapunov(average(parts.map(part => part.left)), spread);
    }
    const added = square(2 * n, (i, j) => i >> 1 === j >> 1 ? noise * parts[i >> 1].noise[i & 1][j & 1] : 0);
    const whole = lyapunov(roundMatrix(problem, lr, H), added);
    return square(2, (p, q) => {
      let total = 0;
      for (let c = 0; c < n; c++) for (let d = 0; d < n; d++) total += whole[2 * c + p][2 * d + q];
      return total / (n * n);
    });
  }

  // The number of local steps with the fewest rounds a digit: a coarse grid, then its valleys.
  function bestLocalSteps(problem, lr) {
    const known = new Map(), rate = H => {
      if (!known.has(H)) known.set(H, contractionRate(problem, lr, H));
      return known.get(H);
    };
    const cost = H => roundsPerDigit(rate(H)), least = list => list.reduce((a, b) => cost(b) < cost(a) ? b : a);
    const overall = average(problem.hessians), smallest = spectrum(overall).values[0], n = problem.hessians.length;
    const drift = square(2 * n, (i, j) => {  // its largest eigenvalue is the smoothness that drift sees
      const [A, B] = [problem.hessians[i >> 1], problem.hessians[j >> 1]], column = [B[0][j & 1], B[1][j & 1]];
      return (i >> 1 === j >> 1 ? A[i & 1][j & 1] : 0) - apply(A, solve(overall, column))[i & 1] / n;
    });
    const estimate = 1 / (lr * Math.sqrt(smallest * radius(drift)));
    const most = 50 / (lr * Math.min(...problem.hessians.map(A => spectrum(A).values[0])));
    let end = Math.min(most, 8 * estimate), grid = gridTo(end);
    while (least(grid) > end / 2 && end < most) grid = gridTo(end = Math.min(most, 4 * end));
    const valleys = grid.map((at, k) => [cost(at), grid[Math.max(k - 1, 0)], grid[Math.min(k + 1, grid.length - 1)]])
      .filter(([here, low, high]) => here <= Math.min(cost(low), cost(high)))
      .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const best = least(valleys.slice(0, 3).map(([, low, high]) => bottom(low, high, least)));
    return { steps: best, rate: rate(best), estimate };
  }
  function gridTo(end) {
    const last = Math.max(1, Math.ceil(end)), top = Math.max(last, 12);
    const number = Math.ceil(Math.log(Math.max(last / 12, 1)) / Math.log(1.4)) + 1;
    const beyond = Array.from({ length: number }, (_, k) =>
      Math.round(number === 1 ? 12 : 12 * (top / 12) ** (k / (number - 1))));
    return [...new Set([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...beyond])].filter(H => H <= last).sort((a, b) => a - b);
  }
  function bottom(low, high, least) {
    for (;;) {
      const points = [...new Set(Array.from({ length: 8 }, (_, k) => Math.round(low + (high - low) * k / 7)))];
      const best = least(points), at = points.indexOf(best);
      if (high - low < 8) return best;
      [low, high] = [points[Math.max(at - 1, 0)], points[Math.min(at + 1, points.length - 1)]];
    }
  }

  return { spectrum, solve, average, optimum, contractionRate, roundsPerDigit, bias, stationary, bestLocalSteps };
})();
