"""A private federation of three sites on least squares, and the same run by hand in NumPy."""

from pathlib import Path

import numpy as np

from fedscaffold.deploy import ArraysLearner, InProcess, Server, drive, parse
from fedscaffold.deploy.client import answer, greeting
from fedscaffold.privacy.site_ledger import SiteLedger
from fedscaffold.privacy.site_secret import SiteStream, load_secret

COUNTS = {"ant": 40, "bee": 25, "cow": 6}
SITES = tuple(COUNTS)
CLIP, LR, BATCH, STEPS = 0.7, 0.2, 8, 3
NOISE = 0.15  # little noise has a large epsilon, for which the accountant takes no time
START = {"b": np.array(0.3), "w": np.array([1.0, -2.0, 0.5])}  # flat: b, then w
X0 = np.array([0.3, 1.0, -2.0, 0.5])


def data(site):
    rng = np.random.default_rng(SITES.index(site))
    shift, n = SITES.index(site), COUNTS[site]
    return rng.normal(size=(n, 3)) + shift, rng.normal(size=n) * 2 - shift


def gradients_by_hand(z, x, y):
    """(n, 4) gradients of single records."""
    off = x @ z[1:] + z[0] - y
    return off[:, None] * np.column_stack([np.ones(len(x)), x])


def record_gradients(params, batch):
    made = gradients_by_hand(np.r_[params["b"], params["w"]], *batch)
    return {"b": made[:, 0], "w": made[:, 1:]}


def gradient(params, batch):
    return {name: rows.mean(axis=0) for name, rows in record_gradients(params, batch).items()}


def loss(params, batch):
    x, y = batch
    return float(((x @ params["w"] + params["b"] - y) ** 2).mean() / 2)


def learner(**more):
    given = {"loss": loss, "precision": "float64", "record_gradients": record_gradients} | more
    return ArraysLearner(gradient, START, data, **given)


def settings(
    privacy="",
    local=f"steps = {STEPS}\nlr = {LR}\nbatch_size = {BATCH}",
    deploy="",
    top="weights = 'records'",
    algorithm="name = 'scaffold'",
    table=f"clip = {CLIP}\nnoise = {NOISE}\ndelta = 1e-3",
):
    records = "\n".join(f"{site} = {n}" for site, n in COUNTS.items())
    return parse(
        f"precision = 'float64'\nrounds = 3\n{top}\n[algorithm]\n{algorithm}\n[local]\n{local}\n"
        f"[deploy]\nsites = {list(SITES)}\nwait = 0\nretries = 0\n{deploy}\n"
        f"[deploy.records]\n{records}\n[privacy]\n{table}\n{privacy}"
    )


def server_of(config, folder, one=None, **more):
    one = learner() if one is None else one
    return Server(config, one.schema, one.start, folder, buffers=one.buffers, **more)


def run(config, folder, rounds=3, one=None):
    """The whole run in this process; returns the server and its summary."""
    one = learner() if one is None else one
    server = server_of(config, folder, one)
    return server, drive(server, InProcess(one, config, folder), rounds)


def requests_of(config, folder, sites=SITES):
    """A server and the requests of its next round."""
    server = server_of(config, folder)
    for site in sites:
        server.hello(site, greeting(learner(), config, site))
    return server, server.open(set(sites))


def ask(request, config, folder, one=None, site=None):
    """A site's answer to a request."""
    return answer(
        request, one or learner(), config, site or request.facts["site"], folder / "sites"
    )


def place(folder, site):
    return Path(folder) / "sites" / "privacy" / site


def ledger_of(folder, site):
    return SiteLedger(place(folder, site) / "privacy.ledger", site)


def streams(folder, site):
    """The draws of each charge of a site."""
    secret = load_secret(place(folder, site) / "secret")
    return [SiteStream(secret, key) for _, key in ledger_of(folder, site).charges]


def private_gradient(z, stream, site, step, batch=BATCH):
    """By the definition."""
    x, y = data(site)
    n = len(x)
    rows = stream.rows(step, n, min(1.0, batch / n))
    g = gradients_by_hand(z, x[rows], y[rows])
    g = g / np.maximum(np.linalg.norm(g, axis=1, keepdims=True) / CLIP, 1)
    return (g.sum(axis=0) + NOISE * CLIP * stream.noise(step, 4)) / min(n, batch)


def by_hand(folder, heard, p, move=lambda: lambda d: LR * d, corrected=True):
    """SCAFFOLD with the sites' own draws: x, c and the c_i by site.

    heard: by round, the sites that counted; move: makes a local optimiser.
    """
    x, c = X0.copy(), np.zeros(4)
    c_i = {site: np.zeros(4) for site in SITES}
    draws = {site: iter(streams(folder, site)) for site in SITES}
    for cohort in heard:
        total, moves, changes = sum(p[site] for site in cohort), np.zeros(4), np.zeros(4)
        for site in cohort:
            y, sum_, stream, advance = x.copy(), np.zeros(4), next(draws[site]), move()
            for k in range(STEPS):
                g = private_gradient(y, stream, site, k)
                y = y - advance(g - c_i[site] + c if corrected else g)
                sum_ += g
            moves += p[site] * (x - y)
            changes += p[site] * (sum_ / STEPS - c_i[site])
            c_i[site] = sum_ / STEPS
        x, c = x - moves / total, c + changes
    return x, c, c_i
