"""Exact second moments, round by round, of runs on quadratics whose cohorts are drawn at random.

Let u = x - x*, G_i = grad f_i(x*) and v_i = c_i - G_i, v = sum p_j v_j and s_i = v - v_i, so that
s_i + G_i is what a client is off its ideal shift by. With M_i = lr sum_{h<K} Gamma_i^h, Gamma_i = I
- lr (A_i + drag), client i ends at

    z_i = u - M_i (A_i u + s_i) - e_i                  SCAFFOLD
    z_i = u - M_i (A_i u + G_i) - e_i                  methods without memory

off x*, e_i being the noise that its steps gather (`error_dynamics.py`). With the shares q of
`cohorts.py` a round is

    u+ = u + eta_g sum q_i (z_i - u)
    v_i+ = (M_i A_i / K_i lr) u - B_i s_i + e_i / K_i lr       option II, if i is heard
    v_i+ = A_i u + noise at x                                  option I, if i is heard
    v_i+ = v_i                                                 else

with B_i = I - M_i / K_i lr. (sum q_i = 1, but for cohorts of weight 0, which leave x alone.) No
difference of large numbers is left in these lines. As who is heard, the noise and the state are
independent, the second moments of (u, v_1 .. v_N) follow from those of one round before and from
the moments of q and [i in A] up to order two. Each client may have a number of steps of its own. A
round costs 4 N^2 d^3 multiplications for SCAFFOLD and 2 N d^3 without memory; `drawn_curve`
estimates the same from runs that are drawn, for S d^2 each.

Symbols: M_i = moved, I - M_i A_i = kept, K_i lr = travel, eta_g = server_lr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.problems.problem import Floats
from fedscaffold.theory.cohorts import Cohorts, shares
from fedscaffold.theory.quadratics import Spectra, geometric, lag, power
from fedscaffold.theory.round_map import Form

__all__ = ["Noise", "Run", "StepMatrices", "drawn_curve", "error_curve", "root"]

SETTLED = 1e-14  # relative change of a round below which a curve goes on as it is
HOPELESS = 1e60  # times the error at the start: a run that diverges


class Noise(NamedTuple):
    """(N, d, d) covariances of the clients' gradients.

    `step` is that of a local step, `at_x` of the gradient at x that option I remembers.
    """

    step: Floats
    at_x: Floats


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on quadratics."""

    spectra: Spectra
    cohorts: Cohorts
    start: Floats
    form: Form
    lr: float
    steps: NDArray[np.int64]
    """(N,) local steps of each client."""
    rounds: int
    noise: Noise | None
    """None for exact gradients."""

    def step_matrices(self) -> StepMatrices:
        """Return the effect of the local steps, in closed form."""
        spectra, form, lr = self.spectra, self.form, self.lr
        count = (np.ones_like(self.steps) if form.one_step else self.steps)[:, None]
        rates = lr * (spectra.values + form.drag)
        total = geometric(rates, count)
        pairs = rates[:, :, None] + rates[:, None, :] - rates[:, :, None] * rates[:, None, :]
        back = np.swapaxes(spectra.vectors, 1, 2)
        turned = back @ self.covariances.step @ spectra.vectors
        gathered = turned * lr**2 * geometric(pairs, count[:, :, None])
        behind = np.stack([lag(row, int(k)) for row, k in zip(rates, count[:, 0], strict=True)])
        return StepMatrices(
            moved=_rebuilt(spectra, lr * total),
            kept=_rebuilt(spectra, power(rates, count) + form.drag * lr * total),
            travel=lr * count[:, 0].astype(np.float64),
            scatter=spectra.vectors @ gathered @ back,
            seen=_rebuilt(spectra, total * spectra.values / count),
            behind=_rebuilt(spectra, behind),
        )

    def measure(self, gap: bool) -> Floats:
        """Return W of the error u' W u: H / 2 for the excess loss, I for the squared distance."""
        return self.mean_hessian / 2 if gap else np.eye(self.spectra.dim)

    @property
    def covariances(self) -> Noise:
        """The noise, or zeros."""
        shape = (*self.spectra.values.shape, self.spectra.dim)
        return self.noise or Noise(np.zeros(shape), np.zeros(shape))

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

    def slopes(self, x: Floats) -> Floats:
        """Return the rows grad f_i(x)."""
        rows: Floats = self.hessians @ x - self.spectra.linear
        return rows


class StepMatrices(NamedTuple):
    """Effect of a round's local steps, as matrices (N, d, d)."""

    moved: Floats
    """M_i."""
    kept: Floats
    """I - M_i A_i."""
    travel: Floats
    """(N,) K_i lr."""
    scatter: Floats
    """Cov e_i."""
    seen: Floats
    """M_i A_i / K_i lr."""
    behind: Floats
    """B_i."""


def error_curve(run: Run, gap: bool) -> Floats:
    """Return E u' W u after 0 .. rounds rounds (see `Run.measure`); infinite after an overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        curve = _remembering(run, gap) if run.form.memory else _forgetful(run, gap)
    return np.where(np.isfinite(curve), curve, np.inf)


def _forgetful(run: Run, gap: bool) -> Floats:
    """Propagate mean and second moment of u for methods without memory.

    There, z_i = kept_i u - push_i - e_i.
    """
    heard, eta, one, measure = (
        run.cohorts,
        run.form.server_lr,
        run.step_matrices(),
        run.measure(gap),
    )
    best, d = run.optimum, run.spectra.dim
    push = np.einsum("iab,ib->ia", one.moved, run.slopes(best))
    # rows of an average that never leaves anything over: the clients, and x itself with what is
    # left of the weight
    q = _with_rest(heard, eta)
    kept = np.concatenate([one.kept, np.eye(d)[None]])
    push = np.concatenate([push, np.zeros((1, d))])
    mean_kept, mean_push = np.tensordot(q.first, kept, 1), q.first @ push
    partner_kept, partner_push = np.tensordot(q.second, kept, 1), q.second @ push
    added = eta**2 * np.einsum("ii,iab->ab", heard.shares, one.scatter) + np.einsum(
        "ia,ib->ab", push, partner_push
    )
    across = np.einsum("iab,ic->cab", kept, partner_push)  # sum_ij q_i q_j kept_i u push_j'
    u = run.start - best
    moment = np.outer(u, u)
    curve = np.empty(run.rounds + 1)
    curve[0] = np.sum(measure * moment)
    for t in range(1, run.rounds + 1):
        mixed = (across @ u).T
        moment = (
            np.sum(kept @ moment @ np.swapaxes(partner_kept, 1, 2), axis=0)
            - mixed
            - mixed.T
            + added
        )
        u = mean_kept @ u - mean_push
        curve[t] = np.sum(measure * moment)
        if _ends(curve, t):
            break
    return curve


class _Average(NamedTuple):
    """u+ = sum_i a_i y_i over the clients' ends z_1 .. z_N and, last, y_0 = u.

    The weights are a_i = eta_g q_i and a_0 = 1 - sum a_i.
    """

    first: Floats
    """(N + 1,) E a_i."""
    second: Floats
    """(N + 1, N + 1) E a_i a_j."""
    inside: Floats
    """(N + 1, N) E a_i [j in A]."""


def _with_rest(heard: Cohorts, eta: float) -> _Average:
    first, inside = eta * heard.share, eta * heard.share_with
    second = eta**2 * heard.shares
    rest = first - second.sum(axis=1)  # E a_i a_0
    own = 1 - 2 * first.sum() + second.sum()
    return _Average(
        np.append(first, 1 - first.sum()),
        np.block([[second, rest[:, None]], [rest[None], np.array([[own]])]]),
        np.vstack([inside, heard.one - inside.sum(axis=0)]),
    )


def _ends(curve: Floats, t: int) -> bool:
    """Return whether a curve has diverged or settled by round t, and fill its remainder if so."""
    if not curve[t] < HOPELESS * curve[0] and curve[0] > 0:
        curve[t:] = np.inf
        return True
    if (
        t > 1
        and max(abs(curve[t] - curve[t - 1]), abs(curve[t - 1] - curve[t - 2]))
        <= SETTLED * curve[t]
    ):
        curve[t:] = curve[t]
        return True
    return False


class _Recall(NamedTuple):
    """v_i+ = of_u_i u + of_s_i s_i + scale_i e_i + noise at x, for a client that is heard."""

    of_u: Floats
    of_s: Floats
    scale: Floats
    """(N,)."""
    own: Floats
    """(N, d, d) covariance of the noise at x."""


def _recall(run: Run, one: StepMatrices) -> _Recall:
    noise = run.covariances.at_x
    if run.form.at_x:
        return _Recall(run.hessians, np.zeros_like(one.behind), np.zeros_like(one.travel), noise)
    return _Recall(one.seen, -one.behind, 1 / one.travel, np.zeros_like(noise))


def _remembering(run: Run, gap: bool) -> Floats:
    """Propagate the second moments of (u, v_1 .. v_N) for SCAFFOLD."""
    one, measure, eta = run.step_matrices(), run.measure(gap), run.form.server_lr
    average, recall = _with_rest(run.cohorts, eta), _recall(run, one)
    d, best = run.spectra.dim, run.optimum
    z = np.concatenate([run.start - best, -run.slopes(best).ravel()])  # all c_i are 0
    moment = np.outer(z, z)
    curve = np.empty(run.rounds + 1)
    curve[0] = np.sum(measure * moment[:d, :d])
    for t in range(1, run.rounds + 1):
        moment = _round(moment, run.cohorts, average, eta, one, recall)
        curve[t] = np.sum(measure * moment[:d, :d])
        if _ends(curve, t):
            break
    return curve


def drawn_curve(run: Run, gap: bool, runs: int) -> tuple[Floats, float]:
    """Estimate `error_curve` from runs with Gaussian noise.

    Returns:
        The curve, and the standard error at its end.
    """
    heard, form, measure, one = run.cohorts, run.form, run.measure(gap), run.step_matrices()
    recall, best, rng = _recall(run, one), run.optimum, np.random.default_rng(0)
    slopes = run.slopes(best)
    u, v = np.tile(run.start - best, (runs, 1)), np.tile(-slopes, (runs, 1, 1))
    roots = root(one.scatter) if one.scatter.any() else None
    still = root(recall.own) if form.memory and recall.own.any() else None
    curve = np.empty(run.rounds + 1)
    values = np.einsum("ra,ab,rb->r", u, measure, u)
    curve[0] = values.mean()
    for t in range(1, run.rounds + 1):
        q = shares(heard, rng, runs)
        mean = np.einsum("j,rja->ra", heard.p, v)
        after = (1 - form.server_lr * q.sum(axis=1, keepdims=True)) * u
        for i in range(len(slopes)):
            inside = np.flatnonzero(q[:, i] > 0)
            off = (
                mean[inside] - v[inside, i] if form.memory else np.tile(slopes[i], (len(inside), 1))
            )
            e = np.zeros_like(off) if roots is None else rng.normal(size=off.shape) @ roots[i].T
            end = u[inside] @ one.kept[i].T - off @ one.moved[i].T - e
            after[inside] += form.server_lr * q[inside, i, None] * end
            if form.memory:
                v[inside, i] = (
                    u[inside] @ recall.of_u[i].T + off @ recall.of_s[i].T + recall.scale[i] * e
                )
            if still is not None:
                v[inside, i] += rng.normal(size=off.shape) @ still[i].T
        u = after
        values = np.einsum("ra,ab,rb->r", u, measure, u)
        curve[t] = values.mean()
        if not curve[t] < HOPELESS * curve[0] and curve[0] > 0:
            curve[t:] = np.inf
            break
    return curve, float(values.std(ddof=1) / np.sqrt(runs))


def _round(
    moment: Floats,
    heard: Cohorts,
    average: _Average,
    eta: float,
    one: StepMatrices,
    recall: _Recall,
) -> Floats:
    """Return the second moments one round later."""
    n, d = one.scatter.shape[:2]

    def applied(rows: Floats) -> tuple[Floats, Floats, Floats]:
        """Return E v_i y', E z_i y' and E new_i y' from E (u, v_1 .. v_N) y', noise apart.

        The last z is u itself.
        """
        u, v = rows[:d], rows[d:].reshape(n, d, -1)
        s = np.tensordot(heard.p, v, 1) - v
        ends = np.concatenate([one.kept @ u - one.moved @ s, u[None]])
        return v, ends, recall.of_u @ u + recall.of_s @ s

    _, ends, new = applied(moment)  # with (u, v)
    # E z_j z_i' as [j, b, (i, a)]; E new_j z_i'
    _, ends_ends, ends_new = applied(ends.reshape(-1, len(moment)).T)
    new_v, _, new_new = applied(new.reshape(-1, len(moment)).T)
    ends_ends, ends_new = ends_ends.reshape(n + 1, d, n + 1, d), ends_new.reshape(n, d, n + 1, d)
    # [j, b, i, a]: E v_j new_i', E new_j new_i'
    new_v, new_new = (a.reshape(n, d, n, d) for a in (new_v, new_new))
    v_v = moment[d:, d:].reshape(n, d, n, d)
    v_ends = np.moveaxis(ends[:, :, d:].reshape(n + 1, d, n, d), (2, 3), (0, 1))
    after = np.empty_like(moment)
    after[:d, :d] = np.einsum("ij,iajb->ab", average.second, ends_ends)
    after[:d, :d] += eta**2 * np.einsum("ii,iab->ab", heard.shares, one.scatter)
    down = np.einsum("ij,jbia->jba", average.inside, ends_new)  # E v_j+ u+'
    down += np.einsum("ij,jbia->jba", average.first[:, None] - average.inside, v_ends)
    down -= (eta * np.diag(heard.share_with) * recall.scale)[:, None, None] * one.scatter
    after[d:, :d] = down.reshape(n * d, d)
    after[:d, d:] = after[d:, :d].T
    lone = heard.one - heard.two
    block = (
        heard.two * new_new
        + lone * (new_v + new_v.transpose(2, 3, 0, 1))
        + (1 - heard.one - lone) * v_v
    )
    own = recall.scale[:, None, None] ** 2 * one.scatter + recall.own
    each = np.arange(n)
    block[each, :, each] = (
        heard.one * (new_new[each, :, each] + own) + (1 - heard.one) * v_v[each, :, each]
    )
    after[d:, d:] = block.reshape(n * d, n * d)
    symmetric: Floats = (after + after.T) / 2
    return symmetric


def root(covariances: Floats) -> Floats:
    """Return (N, d, d) matrices R with R R' the covariances.

    >>> root(np.array([[[4.0]]]))
    array([[[2.]]])
    """
    values, vectors = np.linalg.eigh(covariances)
    found: Floats = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    return found


def _rebuilt(spectra: Spectra, values: Floats) -> Floats:
    """Return (N, d, d) f(A_i), given the values f(a)."""
    matrices: Floats = (spectra.vectors * values[:, None, :]) @ np.swapaxes(spectra.vectors, 1, 2)
    return matrices
