"""Table of identities: each with its statement, its federations and its measure.

Rows added here are run on every target. Numbers in brackets label invariants: I2 is "c is the mean
of the c_i", I9 "c_i is the mean gradient seen", and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.conformance import measures, oracles
from fedscaffold.conformance.case import Array, Case, Run
from fedscaffold.conformance.federations import (
    CONDITIONS,
    GOLDEN_CENTRED,
    GOLDEN_SAMPLING,
    NOISED,
    brief,
)
from fedscaffold.conformance.measures import Measure

__all__ = ["ABOUT_C", "IDENTITIES", "Identity", "select"]


class Identity(NamedTuple):
    """One row: `check` is called with the runs of `cases`, in their order."""

    name: str
    statement: str
    cases: tuple[Case, ...]
    check: Callable[..., Measure]

    @property
    def family(self) -> str:
        """The part of the name before the colon."""
        return self.name.partition(":")[0]


def row(name: str, check: Callable[..., Measure], statement: str, *cases: Case) -> Identity:
    """Return a row; the argument order keeps the table readable."""
    return Identity(name, statement, cases, check)


def families() -> list[Identity]:
    """Return the identities that are checked under many conditions, one row for each."""
    everywhere = set(CONDITIONS)
    # A restart comes after the first round; with weights and sampling two averages of x are both
    # right.
    early = everywhere - {"changing cohorts", "weights and sampling", "restart", "together"}
    steady = {"all", "sampling", "weights", "server step", "momentum", "unequal steps", "schedule"}
    rows = (
        ("mean", measures.mean, "c is the mean of the c_i after every round (I2)", everywhere),
        ("moves", measures.moves, "every round moves x as its state demands", everywhere),
        ("optimum", measures.optimum, "the last model is the optimum (I11)", everywhere),
        ("first round", measures.first_round, "the first round is FedAvg's (I5)", early),
        (
            "gradients seen",
            measures.gradients_seen,
            "c_i is the mean gradient of its last round (I9)",
            steady,
        ),
    )
    return [
        row(f"{family}: {name}", check, f"With {words}, {sentence}.", case)
        for family, check, sentence, chosen in rows
        for name, (words, case) in CONDITIONS.items()
        if name in chosen
    ]


def memories() -> list[Identity]:
    """Return the identities on control variates and on what persists between rounds."""
    base, sampling, lost = (CONDITIONS[name].case for name in ("all", "sampling", "lost replies"))
    option, again = CONDITIONS["option I"].case, CONDITIONS["restart"].case
    silent = brief(base, rounds=4)._replace(lost=((), base.cohorts[1], (), ()))
    at_x = "With option I, c_i is the gradient at the model that the client received."
    goes_on = "A run restored from what it had saved goes on as if nothing had happened."
    return [
        row("start", measures.start, "Before the first round c and every c_i are zero.", sampling),
        row(
            "conserved",
            measures.conserved,
            "c - sum p_i c_i never changes, zero or not (I1, I3).",
            sampling,
        ),
        row("gradient at x", measures.gradients_at_x, at_x, option),
        row("kept: sampling", measures.kept, "Who is not in the cohort keeps its c_i.", sampling),
        row("kept: lost replies", measures.kept, "Whose reply is lost keeps its c_i.", lost),
        row(
            "silence", measures.silence, "A round in which nobody is heard changes nothing.", silent
        ),
        row("restart changes nothing", measures.same, goes_on, base, again),
    ]


def relatives() -> list[Identity]:
    """Return the cases in which SCAFFOLD equals another method or another form of itself."""
    base, sampling, server = (CONDITIONS[name].case for name in ("all", "sampling", "server step"))
    single = brief(server)._replace(local_steps=(1,) * 4, lr=(0.3,))
    heavy = single._replace(momentum=0.5)
    weighted = single._replace(weights=CONDITIONS["weights"].case.weights)
    alone = single._replace(cohorts=((0,), (1,), (2,), (1,), (3,)) * 4, server_lr=1.0)
    twins = brief(base)._replace(hessians=base.hessians[[0] * 4], linear=base.linear[[0] * 4])
    zero = "With control variates held at zero, x is FedAvg's all along (I5)."
    batch = (
        "With one local step of all clients{}, x is large-batch SGD with step lr * server_lr (I6)."
    )
    table = "With one local step of one client and option {}, x, c and c_i are SAGA's (I7)."
    form = "With all clients{}, x and c - c_i are those of the centred form (I8)."
    same = "Where all clients are the same, x is gradient descent and c_i = c (I11)."
    return [
        row("frozen is FedAvg", measures.frozen, zero, brief(sampling)._replace(frozen=True)),
        row("large batch", measures.large_batch, batch.format(""), single),
        row(
            "large batch: weights",
            measures.large_batch,
            batch.format(", of unequal weight"),
            weighted,
        ),
        row(
            "large batch: momentum",
            measures.large_batch,
            batch.format(", the buffer being fresh"),
            heavy,
        ),
        row("SAGA: option I", measures.saga, table.format("I"), alone._replace(option=1)),
        row("SAGA: option II", measures.saga, table.format("II"), alone),
        row("centred form", measures.centred, form.format(""), base),
        row(
            "centred form: server step", measures.centred, form.format(" and a server step"), server
        ),
        row("equal clients", measures.equal_clients, same, twins),
        row("golden: all", golden_centred, "The golden values G1, of two clients.", GOLDEN_CENTRED),
        row(
            "golden: sampling",
            golden_sampling,
            "The golden values G3, of two clients in three.",
            GOLDEN_SAMPLING,
        ),
    ]


def symmetries() -> list[Identity]:
    """Return the invariances: changes of a federation with a known effect."""
    base, sampling = brief(CONDITIONS["all"].case), brief(CONDITIONS["sampling"].case)
    alike = base._replace(hessians=base.hessians[[0] * 4])
    pulls = np.array([[5.0, 0.0, -1.0], [-5.0, 2.0, 0.0], [0.0, -2.0, 3.0], [0.0, 0.0, -2.0]])
    backwards = sampling._replace(cohorts=tuple(cohort[::-1] for cohort in sampling.cohorts))
    steps = CONDITIONS["all"].case, CONDITIONS["server step"].case
    pulled = "Where all Hessians are equal, linear terms that cancel leave x as it is (I12, I16)."
    units = "Losses in other units, with lr to match, leave x, and give c and c_i in these units."
    scale = "The server step scales the move of x, and leaves c and c_i."
    return [
        row("shift", measures.same_x, pulled, alike, alike._replace(linear=alike.linear + pulls)),
        row(
            "replication",
            measures.replicated,
            "Every client twice changes nothing (I13).",
            base,
            doubled(base),
        ),
        row(
            "translation",
            measures.translated,
            "A problem moved in space moves x along, and leaves c and c_i.",
            sampling,
            moved(sampling, np.array([1.0, 4.0, -2.0])),
        ),
        row("units", measures.rescaled, units, sampling, in_units(sampling, 3.0)),
        row(
            "order",
            measures.same,
            "The order in which clients reply changes nothing.",
            sampling,
            backwards,
        ),
        row(
            "repeatable",
            measures.repeatable,
            "One case twice gives the same bits.",
            sampling,
            sampling._replace(),
        ),
        row("server step", measures.server_step, scale, *steps),
    ]


def moved(case: Case, by: Array) -> Case:
    """Return the case with functions f_i(x - by)."""
    return case._replace(x0=case.x0 + by, linear=case.linear + case.hessians @ by)


def doubled(case: Case) -> Case:
    """Return the case with every client twice in a row, at half the weight."""
    n = 2 * case.num_clients
    return case._replace(
        hessians=np.repeat(case.hessians, 2, axis=0),
        linear=np.repeat(case.linear, 2, axis=0),
        weights=np.repeat(case.weights, 2) / 2,
        cohorts=(tuple(range(n)),) * case.rounds,
        local_steps=tuple(np.repeat(case.local_steps, 2).tolist()),
    )


def in_units(case: Case, unit: float) -> Case:
    """Return the case with losses multiplied by `unit` and step sizes divided by it."""
    lr = tuple(one / unit for one in case.lr)
    return case._replace(hessians=unit * case.hessians, linear=unit * case.linear, lr=lr)


def features() -> list[Identity]:
    """Return the rows on features of real models, for adapters that `offers` them."""
    whole, sampling = CONDITIONS["all"].case, CONDITIONS["sampling"].case
    base, server = brief(whole), brief(sampling)._replace(server_lr=1.3)
    tensors = base._replace(shapes=((1,), (2, 1)))
    buffered = server._replace(buffers=np.array([0.5, 2.0]))
    scaled = base._replace(loss_scale=1024.0)
    clip, corrected = base._replace(clip=1.5), whole._replace(clip_corrected=1.5)
    same = "{} leaves x, c and c_i as they are without."
    clipping = "With gradients clipped before they are corrected, {}."
    after = "With corrected gradients clipped, {}."
    moves = "every round moves x as its state demands"
    averaged = (
        "Running statistics are averaged: they are neither corrected nor scaled by the server step."
    )
    return [
        row("tensors", measures.same, same.format("A model in several tensors"), base, tensors),
        row(
            "buffers",
            measures.same,
            same.format("A model with running statistics"),
            server,
            buffered,
        ),
        row("buffers: averaged", measures.statistics, averaged, buffered),
        row("loss scaling", measures.same, same.format("A loss that is scaled"), base, scaled),
        row("clipping: moves", measures.moves, clipping.format(moves), clip),
        row(
            "clipping: gradients seen",
            measures.gradients_seen,
            clipping.format("c_i is the mean of the clipped ones"),
            clip,
        ),
        row("clipping corrected: moves", measures.moves, after.format(moves), corrected),
        row(
            "clipping corrected: mean",
            measures.mean,
            after.format("c = sum p_i c_i after every round (I2)"),
            corrected,
        ),
        row(
            "clipping corrected: optimum",
            measures.optimum,
            after.format("the last model is the optimum (I11)"),
            corrected,
        ),
    ]


def privacy() -> list[Identity]:
    """Return the rows on private optimisers, for adapters that `offers` them."""
    base = brief(CONDITIONS["all"].case)
    clip, joint = (
        base._replace(clip=1.5),
        base._replace(clip=1.5, private=True, shapes=((1,), (2, 1))),
    )
    noised = "With a private optimiser that adds noise, {}."
    return [
        row(
            "private optimiser",
            measures.same,
            "A private optimiser without noise leaves x, c and c_i as they are without.",
            base,
            base._replace(private=True),
        ),
        row(
            "private clip",
            measures.same_clipped,
            "A private optimiser clips all tensors jointly: x, c and c_i are those of one vector.",
            clip,
            joint,
        ),
        row(
            "private noise: independent",
            measures.noise_independent,
            noised.format("each client draws noise of its own, anew in every round"),
            NOISED,
        ),
        row(
            "private noise: size",
            measures.noise_size,
            noised.format("c_i is a mean of noised gradients, whose noise is new in every step"),
            NOISED,
        ),
        row(
            "private noise: moves",
            measures.noised_moves,
            noised.format("the model steps by what c_i remembers, and by the correction"),
            NOISED,
        ),
        row(
            "private noise: mean",
            measures.mean,
            noised.format("c = sum p_i c_i after every round (I2)"),
            NOISED,
        ),
    ]


def golden_centred(run: Run) -> Measure:
    """G1: x, and xi_1 = c - c_1, after each of three rounds."""
    x = np.array([[0.10970625], [0.2223905251171875], [0.29687218118230296]])
    xi = np.array([[0.6008671875], [0.6736086467285156], [0.6572591878249924]])
    trace = run.trace
    shifts = trace.c[1:, None] - trace.c_i[1:]
    differences = trace.x[1:] - x, shifts[:, 0] - xi, shifts[:, 1] + xi
    return Measure(measures.largest(*differences), oracles.rounding(run.case))


def golden_sampling(run: Run) -> Measure:
    """G3: x, c, c_1, c_2, c_3 after each of four rounds."""
    found = np.hstack([run.trace.x[1:], run.trace.c[1:], run.trace.c_i[1:, :, 0]])
    wanted = np.array(G3_MET if run.met else G3)
    return Measure(measures.largest(found - wanted), oracles.rounding(run.case))


G3 = (
    (0.095, -0.31666666666666665, -0.95, 0.0, 0.0),
    (0.035143749999999974, 0.09396527777777791, -0.95, 0.20266666666666672, 1.0292291666666669),
    (
        0.019603363715277745,
        0.083123046875,
        -0.968811701388889,
        0.20266666666666672,
        1.015514175347222,
    ),
    (
        0.020037563389756922,
        0.02626035004340274,
        -0.9839735418836806,
        0.04724041666666659,
        1.015514175347222,
    ),
)
"""With c the mean over all three clients."""
G3_MET = (
    (0.095, -0.475, -0.95, 0.0, 0.0),
    (0.06483125, 0.1005625, -0.95, 0.2185, 1.0331875),
    (0.0441392578125, 0.102494140625, -0.9409384375, 0.2185, 1.029920859375),
    (0.0383153943359375, 0.053577591796875, -0.960239333984375, 0.09105125, 1.029920859375),
)
"""With c the mean over the clients met so far: two after the first round, then all."""

IDENTITIES: tuple[Identity, ...] = (
    *families(),
    *memories(),
    *relatives(),
    *symmetries(),
    *features(),
    *privacy(),
)

ABOUT_C: tuple[Callable[..., Measure], ...] = (
    measures.mean,
    measures.conserved,
    measures.saga,
    golden_sampling,
)
"""Checks that depend on whether c is the mean over all clients or over those met."""


def select(names: Iterable[str]) -> tuple[Identity, ...]:
    """Return the rows with these names or families, or all rows if none is given.

    The family `mean` has all rows that begin with `mean:`.

    >>> [identity.name for identity in select(["golden", "start"])]
    ['start', 'golden: all', 'golden: sampling']
    """
    known = {identity.name for identity in IDENTITIES} | {
        identity.family for identity in IDENTITIES
    }
    chosen = {checks.choice("row", name, known) for name in names}
    return tuple(one for one in IDENTITIES if not chosen or chosen & {one.name, one.family})
