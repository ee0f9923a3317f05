"""Exact second moments, round by round, of runs on quadratics whose cohorts are drawn at random.

Let u = x - x*, G_i = grad f_i(x*) and v_i = c_i - G_i, v = sum p_j v_j and s_i = v - v_i, so that s_i + G_i is what a
client is off its ideal shift by. With M_i = lr sum_{h<K} Gamma_i^h, Gamma_i = I - lr (A_i + drag), client i moves by

    w_i = M_i (A_i u + s_i) + e_i                      SCAFFOLD
    w_i = M_i (A_i u + G_i) + e_i                      methods without memory

e_i being the noise that its steps gather (`law.py`), and with the shares q of `cohorts.py` a round is

    u+ = u - eta_g sum q_i w_i
    v_i+ = w_i / (K_i lr) - s_i (option II), or A_i u + noise at x (option I), if i is heard; else v_i

As who is heard, the noise and the state are independent, the second moments of (u, v_1 .. v_N) follow from those of one
round before and from the moments of q and [i in A] up to order two. Each client may have a number of steps of its own.
A round costs 4 N^2 d^3 multiplications for SCAFFOLD and 2 N d^3 without memory; `drawn_curve` estimates the same from
runs that are drawn, for S d^2 each.

Symbols: M_i = moved, M_i A_i = lost, K_i lr = travel, eta_g = server_lr.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.problems.problem import Floats
from fedscaffold.theory.cohorts import Cohorts, shares
from fedscaffold.theory.quadratics import Spectra, geometric
from fedscaffold.theory.round_map import Form

__all__ = ["Federation", "Noise", "Walk", "drawn_curve", "error_curve", "root", "walk"]

SETTLED = 1e-14  # relative change of a round below which a curve goes on as it is
HOPELESS = 1e60  # times the error at the start: a run that diverges


class Noise(NamedTuple):
    """(N, d, d) covariances of the clients' gradients: of a local step, and of the one at x that option I remembers."""

    step: Floats
    at_x: Floats


class Federation(NamedTuple):
    """Quadratics, who is heard, and where the run starts."""

    spectra: Spectra
    cohorts: Cohorts
    start: Floats

    @property
    def hessians(self) -> Floats:
        """A_i (N, d, d)."""
        return _rebuilt(self.spectra, self.spectra.values)

    @property
    def mean_hessian(self) -> Floats:
        """H = sum p_i A_i."""
        mean: Floats = np.tensordot(self.cohorts.p, self.hessians, 1)
        return mean

    @property
    def optimum(self) -> Floats:
        """x*."""
        best: Floats = np.linalg.solve(self.mean_hessian, self.cohorts.p @ self.spectra.linear)
        return best


class Walk(NamedTuple):
    """What the local steps of a round do."""

    moved: Floats
    """(N, d, d) M_i."""
    lost: Floats
    """(N, d, d) M_i A_i."""
    travel: Floats
    """(N,) K_i lr."""
    scatter: Floats
    """(N, d, d) Cov e_i."""


def walk(spectra: Spectra, form: Form, lr: float, steps: NDArray[np.int64], noise: Floats) -> Walk:
    """The local steps of every client in closed form, whatever their numbers.

    >>> import fedscaffold as fs
    >>> from fedscaffold.theory import spectra
    >>> from fedscaffold.theory.round_map import form_of
    >>> pair = spectra(fs.problems.lower_bound_pair())
    >>> walk(pair, form_of(fs.scaffold()), 0.1, np.array([2, 3]), np.ones((2, 1, 1))).moved.ravel()
    array([0.18, 0.3 ])
    """
    count = (np.ones_like(steps) if form.one_step else steps)[:, None]
    rates = lr * (spectra.values + form.drag)
    total = lr * geometric(rates, count)
    pairs = rates[:, :, None] + rates[:, None, :] - rates[:, :, None] * rates[:, None, :]
    turned = np.swapaxes(spectra.vectors, 1, 2) @ noise @ spectra.vectors
    gathered = turned * lr**2 * geometric(pairs, count[:, :, None])
    return Walk(
        _rebuilt(spectra, total),
        _rebuilt(spectra, total * spectra.values),
        lr * count[:, 0].astype(np.float64),
        spectra.vectors @ gathered @ np.swapaxes(spectra.vectors, 1, 2),
    )


def error_curve(
    given: Federation, form: Form, *, lr: float, steps: NDArray[np.int64], noise: Noise, rounds: int, measure: Floats
) -> Floats:
    """E u' W u for t = 0 .. rounds, W = `measure`; infinite from where it overflows on."""
    with np.errstate(over="ignore", invalid="ignore"):
        one = walk(given.spectra, form, lr, steps, noise.step)
        follow = _remembering if form.memory else _forgetful
        curve = follow(given, form, one, noise, rounds, measure)
    return np.where(np.isfinite(curve), curve, np.inf)


def _forgetful(given: Federation, form: Form, one: Walk, noise: Noise, rounds: int, measure: Floats) -> Floats:
    """Methods without memory: mean and second moment of u."""
    heard, eta = given.cohorts, form.server_lr
    best = given.optimum
    slopes = np.einsum("iab,b->ia", given.hessians, best) - given.spectra.linear
    push = np.einsum("iab,ib->ia", one.moved, slopes)  # w_i = lost_i u + push_i + e_i
    mean_lost, mean_push = np.tensordot(heard.share, one.lost, 1), heard.share @ push
    partner_lost, partner_push = np.tensordot(heard.shares, one.lost, 1), heard.shares @ push
    added = np.einsum("ii,iab->ab", heard.shares, one.scatter) + np.einsum("ia,ib->ab", push, partner_push)
    across = np.einsum("iab,ic->cab", one.lost, partner_push)  # sum_ij q_i q_j lost_i u push_j'
    u = given.start - best
    moment = np.outer(u, u)
    curve = np.empty(rounds + 1)
    curve[0] = np.sum(measure * moment)
    for t in range(1, rounds + 1):
        first = moment @ mean_lost.T + np.outer(u, mean_push)  # E u w'
        mixed = (across @ u).T
        both = np.sum(one.lost @ moment @ np.swapaxes(partner_lost, 1, 2), axis=0) + mixed + mixed.T + added
        moment = moment - eta * (first + first.T) + eta**2 * both
        u = u - eta * (mean_lost @ u + mean_push)
        curve[t] = np.sum(measure * moment)
        if _ends(curve, t):
            break
    return curve


def _ends(curve: Floats, t: int) -> bool:
    """Whether a curve has diverged or settled by round t; then it is filled up to its end."""
    if not curve[t] < HOPELESS * curve[0] and curve[0] > 0:
        curve[t:] = np.inf
        return True
    if t > 1 and max(abs(curve[t] - curve[t - 1]), abs(curve[t - 1] - curve[t - 2])) <= SETTLED * curve[t]:
        curve[t:] = curve[t]
        return True
    return False


class _Recall(NamedTuple):
    """v_i+ = scale_i w_i + slope_i u - turn s_i, for a client that is heard; and the noise in it."""

    scale: Floats
    slope: Floats | None
    turn: float
    own: Floats
    """(N, d, d) covariance of the noise at x."""


def _remembering(given: Federation, form: Form, one: Walk, noise: Noise, rounds: int, measure: Floats) -> Floats:
    """SCAFFOLD: second moments of (u, v_1 .. v_N)."""
    heard = given.cohorts
    n, d = given.spectra.linear.shape
    if form.at_x:
        recall = _Recall(np.zeros(n), given.hessians, 0.0, noise.at_x)
    else:
        recall = _Recall(1 / one.travel, None, 1.0, np.zeros_like(noise.at_x))
    best = given.optimum
    slopes = np.einsum("iab,b->ia", given.hessians, best) - given.spectra.linear
    z = np.concatenate([given.start - best, -slopes.ravel()])  # all c_i are 0
    moment = np.outer(z, z)
    curve = np.empty(rounds + 1)
    curve[0] = np.sum(measure * moment[:d, :d])
    for t in range(1, rounds + 1):
        moment = _round(moment, heard, form.server_lr, one, recall)
        curve[t] = np.sum(measure * moment[:d, :d])
        if _ends(curve, t):
            break
    return curve


def drawn_curve(
    given: Federation,
    form: Form,
    *,
    lr: float,
    steps: NDArray[np.int64],
    noise: Noise,
    rounds: int,
    measure: Floats,
    runs: int,
    seed: int = 0,
) -> tuple[Floats, float]:
    """`error_curve` as the mean over runs drawn with Gaussian noise, and the standard error at its end."""
    one, rng = walk(given.spectra, form, lr, steps, noise.step), np.random.default_rng(seed)
    heard, hessians, best = given.cohorts, given.hessians, given.optimum
    slopes = np.einsum("iab,b->ia", hessians, best) - given.spectra.linear
    u, v = np.tile(given.start - best, (runs, 1)), np.tile(-slopes, (runs, 1, 1))
    loud, loud_at_x = noise.step.any(), form.at_x and noise.at_x.any()
    roots, still = root(one.scatter) if loud else None, root(noise.at_x) if loud_at_x else None
    curve = np.empty(rounds + 1)
    values = np.einsum("ra,ab,rb->r", u, measure, u)
    curve[0] = values.mean()
    for t in range(1, rounds + 1):
        q = shares(heard, rng, runs)
        mean, move = np.einsum("j,rja->ra", heard.p, v), np.zeros_like(u)
        for i in range(len(slopes)):
            inside = np.flatnonzero(q[:, i] > 0)
            off = mean[inside] - v[inside, i] if form.memory else slopes[i]
            w = u[inside] @ one.lost[i].T + off @ one.moved[i].T
            if roots is not None:
                w = w + rng.normal(size=w.shape) @ roots[i].T
            move[inside] += q[inside, i, None] * w
            if form.memory and form.at_x:
                v[inside, i] = u[inside] @ hessians[i]
                if still is not None:
                    v[inside, i] += rng.normal(size=w.shape) @ still[i].T
            elif form.memory:
                v[inside, i] = w / one.travel[i] - off
        u = u - form.server_lr * move
        values = np.einsum("ra,ab,rb->r", u, measure, u)
        curve[t] = values.mean()
        if not curve[t] < HOPELESS * curve[0] and curve[0] > 0:
            curve[t:] = np.inf
            break
    return curve, float(values.std(ddof=1) / np.sqrt(runs))


def _round(moment: Floats, heard: Cohorts, eta: float, one: Walk, recall: _Recall) -> Floats:
    """The second moments one round later."""
    n, d = one.scatter.shape[:2]
    u, v = moment[:d], moment[d:].reshape(n, d, -1)  # E u z', E v_i z'
    s = np.tensordot(heard.p, v, 1) - v
    w = one.lost @ u + one.moved @ s
    new = recall.scale[:, None, None] * w - recall.turn * s
    if recall.slope is not None:
        new = new + recall.slope @ u

    def with_(rows: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """(E r_i u', E r_i v_j', E r_i w_j', E r_i new_j') for rows r whose moments with z are given."""
        columns = rows.reshape(-1, d + n * d).T
        to_u, to_v = columns[:d], columns[d:].reshape(n, d, -1)
        to_s = np.tensordot(heard.p, to_v, 1) - to_v
        to_w = one.lost @ to_u + one.moved @ to_s
        to_new = recall.scale[:, None, None] * to_w - recall.turn * to_s
        if recall.slope is not None:
            to_new = to_new + recall.slope @ to_u
        back = [to_v, to_w, to_new]
        return to_u.T, *(np.moveaxis(part, 2, 0) for part in back)

    w_u, w_v, w_w, w_new = with_(w)
    _, new_v, _, new_new = with_(new)
    w_v, w_w, w_new = (a.reshape(n, d, n, d) for a in (w_v, w_w, w_new))
    new_v, new_new, v_v = (a.reshape(n, d, n, d) for a in (new_v, new_new, v[:, :, d:]))
    each = np.arange(n)
    after = np.empty_like(moment)
    mean_w = np.tensordot(heard.share, w_u.reshape(n, d, d), 1)  # sum E q_i w_i u'
    both = np.einsum("ij,iajb->ab", heard.shares, w_w) + np.einsum("ii,iab->ab", heard.shares, one.scatter)
    after[:d, :d] = moment[:d, :d] - eta * (mean_w + mean_w.T) + eta**2 * both
    u_new = np.moveaxis(new[:, :, :d], 2, 0)
    u_v = moment[:d, d:].reshape(d, n, d)
    pulled = np.einsum("ij,iajb->ajb", heard.share_with, w_new)
    pulled += np.einsum("ij,iajb->ajb", heard.share[:, None] - heard.share_with, w_v)
    pulled += np.moveaxis((np.diag(heard.share_with) * recall.scale)[:, None, None] * one.scatter, 0, 1)
    after[:d, d:] = (heard.one * u_new + (1 - heard.one) * u_v - eta * pulled).reshape(d, -1)
    after[d:, :d] = after[:d, d:].T
    mixed = new_v + new_v.transpose(2, 3, 0, 1)
    lone = heard.one - heard.two
    block = heard.two * new_new + lone * mixed + (1 - heard.one - lone) * v_v
    own = recall.scale[:, None, None] ** 2 * one.scatter + recall.own
    block[each, :, each] = heard.one * (new_new[each, :, each] + own) + (1 - heard.one) * v_v[each, :, each]
    after[d:, d:] = block.reshape(n * d, n * d)
    return after


def root(covariances: Floats) -> Floats:
    """(N, d, d) matrices R with R R' the covariances.

    >>> root(np.array([[[4.0]]]))
    array([[[2.]]])
    """
    values, vectors = np.linalg.eigh(covariances)
    found: Floats = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    return found


def _rebuilt(spectra: Spectra, values: Floats) -> Floats:
    """(N, d, d) f(A_i), given the values f(a)."""
    matrices: Floats = (spectra.vectors * values[:, None, :]) @ np.swapaxes(spectra.vectors, 1, 2)
    return matrices
