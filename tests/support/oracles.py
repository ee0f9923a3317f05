"""The algorithms written out on quadratics, as oracles for the bounds: one round, its linear map, its law.

And two problems that are no quadratics: records with labels, and a smooth network on them.
"""

import jax.numpy as jnp
import numpy as np
from scipy.linalg import block_diag, solve_discrete_lyapunov

from fedscaffold.problems import Problem

CONSTANTS = {
    "smoothness": 1.3,
    "mu": 0.2,
    "delta": 0.4,
    "noise_trace": 0.3,
    "big_g": 0.7,
    "big_b": 1.4,
    "distance": 1.1,
    "suboptimality": 0.9,
    "control_distance": 0.8,
    "local_steps": 5,
    "num_clients": 8,
    "cohort": 2,
}


# Exact dynamics: SCAFFOLD with all clients, as deviations u = theta - theta*, v_c = xi_c - xi_c*.


def random_hessians(rng, n, d, mu, smoothness):
    hessians = []
    for c in range(n):
        rotation, _ = np.linalg.qr(rng.normal(size=(d, d)))
        spectrum = np.exp(rng.uniform(np.log(mu), np.log(smoothness), d))
        if c == 0:
            spectrum[0], spectrum[-1] = mu, smoothness
        hessians.append((rotation * spectrum) @ rotation.T)
    return np.array(hessians)


def one_round(a, u, v, lr, steps):
    """The algorithm itself, on many states at once: u (d, m), v (N, d, m)."""
    y = np.broadcast_to(u, v.shape)
    for _ in range(steps):
        y = y - lr * (a @ y + v)
    x = y.mean(axis=0)
    return x, v + (y - x) / (lr * steps), y


def state_map(a, lr, steps):
    n, d, _ = a.shape
    columns = np.eye((n + 1) * d)
    x, xi, _ = one_round(a, columns[:d], columns[d:].reshape(n, d, -1), lr, steps)
    return np.concatenate([x, xi.reshape(n * d, -1)])


def lambda_frame(n, d, lr, steps):
    """Coordinates of {sum v = 0} in which the Lambda-norm is the plain one: state = out @ z, z = back @ state."""
    basis = np.linalg.qr(np.eye(n) - 1 / n)[0][:, : n - 1]
    scale = lr * steps / np.sqrt(n)
    out = block_diag(np.eye(d), np.kron(basis, np.eye(d)) / scale)
    return out, block_diag(np.eye(d), np.kron(basis.T, np.eye(d)) * scale)


def reduced_map(a, lr, steps):
    out, back = lambda_frame(*a.shape[:2], lr, steps)
    return back @ state_map(a, lr, steps) @ out


def accumulated(a, noise, lr, steps):
    """Covariance of sum_h (I - lr A)^h e_h for every client."""
    return np.array(
        [
            sum(
                g @ c @ g
                for g in (np.linalg.matrix_power(np.eye(len(h)) - lr * h, k) for k in range(steps))
            )
            for h, c in zip(a, noise, strict=True)
        ]
    )


def injected(a, noise, lr, steps):
    """Covariance that one round adds to the state."""
    n, d, _ = a.shape
    gains = np.concatenate([np.full((1, n), -lr / n), -(np.eye(n) - 1 / n) / steps])
    gains = np.kron(gains, np.eye(d))
    return gains @ block_diag(*accumulated(a, noise, lr, steps)) @ gains.T


def stationary(a, noise, lr, steps):
    out, back = lambda_frame(*a.shape[:2], lr, steps)
    added = back @ injected(a, noise, lr, steps) @ back.T
    return out @ solve_discrete_lyapunov(reduced_map(a, lr, steps), added) @ out.T


def mean_squared_error(a, noise, lr, steps, rounds, u, v):
    """Exact E||theta^T - theta*||^2 from a fixed start."""
    move, added = state_map(a, lr, steps), injected(a, noise, lr, steps)
    z, cov, d = np.concatenate([u, v.ravel()]), np.zeros_like(added), len(u)
    for _ in range(rounds):
        z, cov = move @ z, move @ cov @ move.T + added
    return float(z[:d] @ z[:d] + np.trace(cov[:d, :d]))


def lambda_norm2(u, v, reach):
    return float(np.sum(u**2) + reach**2 * np.mean(np.sum(v**2, axis=1)))


def zeta_2(a):
    return float(np.sqrt(np.mean(np.linalg.norm(a - a.mean(axis=0), 2, axis=(1, 2)) ** 2)))


def slope(x, y):
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def local_maps(a, lr, steps):
    """Upsilon_i and M_i: what K steps do to the start and to a constant gradient."""
    d = a.shape[1]
    powers = [
        np.array([np.linalg.matrix_power(np.eye(d) - lr * h, k) for h in a])
        for k in range(steps + 1)
    ]
    return powers[-1], lr * sum(powers[:-1])


def rescaled(constants, length, value):
    """The same federation in other units: x -> length x, f -> value f."""
    powers = {
        "smoothness": (-2, 1),
        "mu": (-2, 1),
        "delta": (-2, 1),
        "noise_trace": (-2, 2),
        "big_g": (-1, 1),
    }
    powers |= {"distance": (1, 0), "suboptimality": (0, 1), "control_distance": (-1, 1)}
    return {
        k: v * length ** powers[k][0] * value ** powers[k][1] if k in powers else v
        for k, v in constants.items()
    }


def records(sizes=(6, 11, 8), d=3, seed=1):
    rng = np.random.default_rng(seed)
    draw = [(rng.normal(size=(n, d)) + rng.normal(size=d), rng.random(n)) for n in sizes]
    return [(x, (y < 0.4).astype(float)) for x, y in draw]


def net_loss(params, batch):
    """A smooth network with nested parameters, so that all derivatives exist."""
    hidden = jnp.tanh(batch["x"] @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2) + 0.05 * jnp.sum(params["out"] ** 2)


def net():
    rng = np.random.default_rng(3)
    params = {
        "in": {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)},
        "out": rng.normal(size=2),
    }
    return Problem(net_loss, params, [{"x": x, "y": y} for x, y in records()])
