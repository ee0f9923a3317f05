"""The family's methods as plain NumPy loops on quadratics: what other code is compared with.

Written from the papers' pseudo-code, sharing no line with the package. Clients hold f_i(x) = x'A_i x / 2 - b_i'x, with `a`
(N, d, d) and `b` (N, d), and compute exact gradients. Every function returns x after each round, one a row. `cohorts`
lists the clients of every round; methods whose papers have all clients take `rounds` instead. Clients weigh the same
unless `weights` are given.

>>> a, b, x0 = np.array([[[1.0]], [[0.2]]]), np.array([[1.0], [-0.5]]), [2.0]
>>> optimum, both = np.array([0.5 / 1.2]), [[0, 1]] * 400
>>> def reached(path):
...     return bool(abs(path[-1] - optimum)[0] < 1e-12)
>>> reached(vrl_sgd(a, b, x0, 0.5, 5, 400)), reached(dane(a, b, x0, 0.5, 400))
(True, True)
>>> reached(feddyn(a, b, x0, 0.5, 5, 0.5, [[0], [1]] * 200)), reached(mime(a, b, x0, 0.5, 5, 0.5, both))
(True, True)
>>> reached(scaffnew(a, b, x0, 0.5, 0.2, [0, 1, 0, 0, 1] * 200)), reached(saga(a, b, x0, 0.5, [0, 1, 1] * 200))
(True, True)
>>> reached(fedopt(a, b, x0, 0.5, 5, both, momentum(0.5), 1.0)), reached(fednova(a, b, x0, 0.5, [5, 2], both))
(False, False)
"""

import numpy as np


def gradient(a, b, i, x):
    """A_i x - b_i."""
    return a[i] @ x - b[i]


def mean_gradient(a, b, x, clients=None):
    """Mean of the clients' gradients at x; of all clients unless some are named."""
    clients = range(len(b)) if clients is None else clients
    return np.mean([gradient(a, b, i, x) for i in clients], axis=0)


def descended(a, b, i, x, lr, steps, extra=lambda y: 0.0):
    """Where client i ends after `steps` steps y <- y - lr (grad f_i(y) + extra(y)) from x."""
    y = np.array(x, float)
    for _ in range(steps):
        y = y - lr * (gradient(a, b, i, y) + extra(y))
    return y


def vrl_sgd(a, b, x0, lr, local_steps, rounds):
    """VRL-SGD (Liang et al. 2019, Algorithm 1), all clients.

    Delta_i = 0. In every round from the common x: K times x_i <- x_i - lr (grad f_i(x_i) - Delta_i); then the average
    x = mean x_i, and Delta_i <- Delta_i + (x - x_i) / (K lr).
    """
    x, delta, path = np.array(x0, float), np.zeros_like(b, float), []
    for _ in range(rounds):
        ends = np.stack(
            [
                descended(a, b, i, x, lr, local_steps, lambda y, own=delta[i]: -own)
                for i in range(len(b))
            ]
        )
        x = ends.mean(axis=0)
        delta = delta + (x - ends) / (local_steps * lr)
        path.append(x)
    return np.array(path)


def dane(a, b, x0, mu, rounds, eta=1.0):
    """DANE (Shamir, Srebro, Zhang 2014, Figure 1) with exact local solves, all clients.

    y_i = argmin_y f_i(y) - <grad f_i(x) - eta grad f(x), y> + mu/2 |y - x|^2; x <- mean y_i. Where the slope is zero,
    A_i y - b_i - grad f_i(x) + eta grad f(x) + mu (y - x) = 0.
    """
    x, path, eye = np.array(x0, float), [], np.eye(len(x0))
    for _ in range(rounds):
        g = mean_gradient(a, b, x)
        right = [b[i] + gradient(a, b, i, x) - eta * g + mu * x for i in range(len(b))]
        x = np.mean([np.linalg.solve(a[i] + mu * eye, right[i]) for i in range(len(b))], axis=0)
        path.append(x)
    return np.array(path)


def dane_by_steps(a, b, x0, lr, local_steps, mu, cohorts):
    """DANE with K gradient steps from x as the local solver; grad f(x) is the mean over the cohort.

    y <- y - lr (grad f_i(y) - grad f_i(x) + grad f(x) + mu (y - x)); x <- mean y_i.
    """
    x, path = np.array(x0, float), []
    for cohort in cohorts:
        g = mean_gradient(a, b, x, cohort)
        ends = []
        for i in cohort:
            own = gradient(a, b, i, x)
            ends.append(
                descended(
                    a, b, i, x, lr, local_steps, lambda y, own=own, g=g, x=x: g - own + mu * (y - x)
                )
            )
        x = np.mean(ends, axis=0)
        path.append(x)
    return np.array(path)


def fednova(a, b, x0, lr, local_steps, cohorts, weights=None, server_lr=1.0):
    """FedNova (Wang et al. 2020, eq. 9) for plain SGD: `local_steps` is one number tau_i for each client.

    d_i = (x - y_i) / (lr tau_i), the client's mean gradient; tau_eff = sum p_i tau_i; x <- x - tau_eff lr sum p_i d_i,
    with weights p_i that sum to one over the cohort.
    """
    x, path = np.array(x0, float), []
    shares = np.ones(len(b)) if weights is None else np.asarray(weights, float)
    taus = np.broadcast_to(local_steps, len(b))
    for cohort in cohorts:
        p = shares[list(cohort)] / shares[list(cohort)].sum()
        d = [(x - descended(a, b, i, x, lr, taus[i])) / (lr * taus[i]) for i in cohort]
        tau_eff = sum(w * taus[i] for w, i in zip(p, cohort, strict=True))
        x = x - server_lr * tau_eff * lr * sum(w * v for w, v in zip(p, d, strict=True))
        path.append(x)
    return np.array(path)


def fedexp(a, b, x0, lr, local_steps, cohorts, weights, eps):
    """FedExP (Jhunjhunwala et al. 2023, Algorithm 1) with weighted means; returns the models and the server's steps."""
    x, path, steps = np.array(x0, float), [], []
    for cohort in cohorts:
        p = np.asarray(weights, float)[list(cohort)]
        p = p / p.sum()
        deltas = np.array([descended(a, b, i, x, lr, local_steps) - x for i in cohort])
        mean = p @ deltas
        steps.append(
            max(1.0, p @ np.square(np.linalg.norm(deltas, axis=1)) / (2 * (mean @ mean + eps)))
        )
        x = x + steps[-1] * mean
        path.append(x)
    return np.array(path), np.array(steps)


def feddyn(a, b, x0, lr, local_steps, alpha, cohorts):
    """FedDyn (Acar et al. 2021, Algorithm 1), with K gradient steps from x as the local solver.

    Client k of the cohort: y_k ~ argmin_y f_k(y) - <g_k, y> + alpha/2 |y - x|^2, then g_k <- g_k - alpha (y_k - x).
    Server: h <- h - alpha (1/m) sum over the cohort of (y_k - x), m the number of all clients; then
    x <- mean of the cohort's y_k - h / alpha. g_k and h start at zero.
    """
    x, memory, h, path = np.array(x0, float), np.zeros_like(b, float), np.zeros(len(x0)), []
    for cohort in cohorts:
        ends = {
            k: descended(
                a, b, k, x, lr, local_steps, lambda y, k=k, x=x: alpha * (y - x) - memory[k]
            )
            for k in cohort
        }
        for k, y in ends.items():
            memory[k] = memory[k] - alpha * (y - x)
        h = h - alpha / len(b) * sum(y - x for y in ends.values())
        x = np.mean(list(ends.values()), axis=0) - h / alpha
        path.append(x)
    return np.array(path)


def mime(a, b, x0, lr, local_steps, beta, cohorts, lite=False):
    """Mime with SGD momentum (Karimireddy et al. 2021, Algorithm 1: MimeSGDm; `lite`: MimeLiteSGDm).

    c = mean over the cohort of grad f_i(x). Client: K times y <- y - lr ((1 - beta) g + beta m) with
    g = grad f_i(y) - grad f_i(x) + c, or grad f_i(y) for MimeLite; m stays during the round. Server: x <- mean y_i and
    m <- (1 - beta) c + beta m. m starts at zero.
    """
    x, m, path = np.array(x0, float), np.zeros(len(x0)), []
    for cohort in cohorts:
        c = mean_gradient(a, b, x, cohort)
        ends = []
        for i in cohort:
            y = x.copy()
            for _ in range(local_steps):
                g = gradient(a, b, i, y)
                if not lite:
                    g = g - gradient(a, b, i, x) + c
                y = y - lr * ((1 - beta) * g + beta * m)
            ends.append(y)
        x, m = np.mean(ends, axis=0), (1 - beta) * c + beta * m
        path.append(x)
    return np.array(path)


def scaffnew(a, b, x0, lr, p, coins):
    """Scaffnew (Mishchenko et al. 2022, Algorithm 2), all clients; `coins` says at which iterations they communicate.

    Every iteration: z_i = x_i - lr (grad f_i(x_i) - h_i); then x_i = mean_j (z_j - (lr/p) h_j) where the coin says so, else
    x_i = z_i; h_i <- h_i + (p/lr) (x_i - z_i). The h_i start at zero, so their sum stays zero and the mean is that of the
    z_j. Returns x at every communication.
    """
    x = np.tile(np.array(x0, float), (len(b), 1))
    h, path = np.zeros_like(x), []
    for coin in coins:
        z = np.stack([x[i] - lr * (gradient(a, b, i, x[i]) - h[i]) for i in range(len(b))])
        x = np.tile((z - lr / p * h).mean(axis=0), (len(b), 1)) if coin else z
        h = h + p / lr * (x - z)
        if coin:
            path.append(x[0])
    return np.array(path)


def saga(a, b, x0, lr, clients, table=None):
    """SAGA (Defazio et al. 2014), the one client j of each round given; the table starts at zero unless given.

    x <- x - lr (grad f_j(x) - t_j + mean t); t_j <- grad f_j(x at the start of the round).
    """
    x, path = np.array(x0, float), []
    t = np.zeros_like(b, float) if table is None else np.array(table, float)
    for j in clients:
        g = gradient(a, b, j, x)
        x, t[j] = x - lr * (g - t[j] + t.mean(axis=0)), g
        path.append(x)
    return np.array(path)


def momentum(decay, nesterov=False):
    """Heavy ball as optax.sgd has it: t <- g + decay t; step t, or g + decay t for Nesterov's."""

    def step(g, state, count):
        trace = g + decay * (0 if state is None else state)
        return (g + decay * trace if nesterov else trace), trace

    return step


def adam(b1=0.9, b2=0.999, eps=1e-8):
    """As optax.adam: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, step m^ / (sqrt(v^) + eps), ^ bias-corrected."""

    def step(g, state, count):
        m, v = (np.zeros_like(g), np.zeros_like(g)) if state is None else state
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        return m / (1 - b1**count) / (np.sqrt(v / (1 - b2**count)) + eps), (m, v)

    return step


def yogi(b1=0.9, b2=0.999, eps=1e-3, start=1e-6):
    """As optax.yogi: Adam with v <- v - (1 - b2) sign(v - g^2) g^2, and both moments starting at 1e-6."""

    def step(g, state, count):
        m, v = (np.full_like(g, start), np.full_like(g, start)) if state is None else state
        m, v = b1 * m + (1 - b1) * g, v - (1 - b2) * np.sign(v - g**2) * g**2
        return m / (1 - b1**count) / (np.sqrt(v / (1 - b2**count)) + eps), (m, v)

    return step


def adagrad(start=0.1, eps=1e-7):
    """As optax.adagrad: s <- s + g^2 from s = 0.1, step g / sqrt(s + eps)."""

    def step(g, state, count):
        s = (np.full_like(g, start) if state is None else state) + g**2
        return g / np.sqrt(s + eps), s

    return step


def fedopt(a, b, x0, lr, local_steps, cohorts, optimiser, server_lr):
    """FedOpt (Reddi et al. 2021, Algorithm 1): FedAvg's clients, and a server optimiser on g = x - mean y_i.

    `optimiser` is one of the above; x <- x - server_lr step. With `momentum` it is FedAvgM (Hsu et al. 2019), with the
    others FedAdam, FedYogi and FedAdagrad as the library's users get them through optax (whose bias corrections, starts and
    places of eps are not those printed in the paper).
    """
    x, state, path = np.array(x0, float), None, []
    for count, cohort in enumerate(cohorts, 1):
        g = x - np.mean([descended(a, b, i, x, lr, local_steps) for i in cohort], axis=0)
        step, state = optimiser(g, state, count)
        x = x - server_lr * step
        path.append(x)
    return np.array(path)
