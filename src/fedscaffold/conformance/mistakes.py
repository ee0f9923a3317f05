"""Known mistakes in implementations of SCAFFOLD.

`Scaffold` is a correct implementation with a hook at every place where a mistake was found in
public code or threads; each of `MISTAKES` replaces one hook, or two if the mistake has two parts.
The suite is tested on them, and `diagnosis` compares failing implementations with each. All code
here is our own. Projects are named as sources, in the snapshot that was read; some have been fixed
since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.conformance.case import FEATURES, Adapter, Case, Trace
from fedscaffold.conformance.oracles import clipped

__all__ = ["MISTAKES", "RIGHT_IN_ANOTHER_WAY", "Scaffold"]

STEPS_IN_AN_EPOCH, SAMPLES_IN_A_STEP = 2, 8


class State:
    """State of the server and its clients between rounds."""

    def __init__(self, case: Case, c: Any, c_i: Any) -> None:
        self.x, self.c, self.c_i = case.x0, c, c_i
        self.momentum = np.zeros_like(c_i)
        self.statistics = np.zeros(0) if case.buffers is None else case.buffers
        self.round = 0
        self.met: set[int] = set()
        self.heard: set[int] = set()
        self.earlier_c = c


class Visit(NamedTuple):
    """A client's round: what it received, and the result of its local steps."""

    case: Case
    i: int
    x: Any
    c: Any
    c_i: Any
    y: Any
    round: int = 0
    mean: Any = None
    """Mean of its gradients: unscaled, clipped and noised if the case says so, not corrected."""
    raw: Any = None
    """Mean of its gradients, neither clipped nor unscaled nor noised."""
    statistics: Any = None

    @property
    def steps(self) -> int:
        """K."""
        return self.case.local_steps[self.i]

    @property
    def lr(self) -> tuple[float, ...]:
        """Its step sizes."""
        return self.case.lr[: self.steps]

    @property
    def weight(self) -> float:
        """p_i."""
        return float(self.case.weights[self.i])

    def at_x(self) -> Any:
        """Return its gradient at the model it received."""
        return self.case.gradient(self.i, self.x) / self.case.loss_scale

    def displaced(self, travel: float) -> Any:
        """Option II in the paper's form, where `travel` should be K lr and the steps plain SGD."""
        return self.c_i - self.c + (self.x - self.y) / travel


class Mail(NamedTuple):
    """A server's round: its state, the clients selected and heard, and the changes of their c_i."""

    case: Case
    x: Any
    c: Any
    statistics: Any
    sent: list[Visit]
    heard: list[Visit]
    changes: list[Any]
    before: float = 0.0
    """Weight of the clients met before this round (`before`) and including it (`after`)."""
    after: float = 0.0

    @property
    def share(self) -> float:
        """The weight heard: S/N."""
        return sum(v.weight for v in self.heard)

    @property
    def configured(self) -> float:
        """The weight of the clients selected."""
        return sum(v.weight for v in self.sent)

    def mean(self, values: list[Any]) -> Any:
        """Return the weighted mean over the clients heard; NaN if there are none."""
        total = sum(v.weight * value for v, value in zip(self.heard, values, strict=True))
        return np.divide(total, self.share)

    @property
    def move(self) -> Any:
        """The mean move of their models."""
        return self.mean([v.y - self.x for v in self.heard])

    @property
    def change(self) -> Any:
        """The mean change of their c_i."""
        return self.mean(self.changes)


@dataclass(frozen=True)
class Scaffold:
    """A correct SCAFFOLD with replaceable parts; each mistake replaces one or two fields."""

    first_c: Callable[[Case], Any] = lambda case: np.zeros_like(case.x0)
    first_c_i: Callable[[Case], Any] = lambda case: np.zeros(
        (case.num_clients, len(case.x0)), case.x0.dtype
    )
    meet: Callable[[State, int], Any] = lambda state, i: state.c_i[i]
    buffer: Callable[[State, int], Any] = lambda state, i: 0.0
    unscale: Callable[[Any, Visit], Any] = lambda g, v: g / v.case.loss_scale
    clip: Callable[[Any, Visit], Any] = lambda g, v: clipped(g, v.case.clip)
    seed: Callable[[Visit, int], Any] = lambda v, step: (v.round, v.i, step)  # of the noise
    correct: Callable[[Any, Visit], Any] = lambda g, v: g - v.c_i + v.c
    clip_corrected: Callable[[Any, Visit], Any] = lambda d, v: clipped(d, v.case.clip_corrected)
    outside: Callable[[Visit], Any] = lambda v: 0.0  # a correction added after the optimiser's step
    forward: Callable[[State, Visit, Any], Any] = lambda state, v, b: v.case.forward(v.i, b)
    finish: Callable[[Visit], Any] = lambda v: v.y
    renew: Callable[[Visit], Any] = lambda v: v.at_x() if v.case.option == 1 else v.mean
    change: Callable[[Visit, Any], Any] = lambda v, new: new - v.c_i
    keep: Callable[[State, Visit, Any], None] = lambda state, v, new: state.c_i.__setitem__(
        v.i, new
    )
    commit_lost: bool = False
    quorum: Callable[[list[Visit]], bool] = bool
    model: Callable[[Mail], Any] = lambda mail: mail.x + mail.case.server_lr * mail.move
    control: Callable[[Mail], Any] = lambda mail: mail.c + mail.share * mail.change
    statistics: Callable[[Mail], Any] = lambda mail: mail.mean([v.statistics for v in mail.heard])
    restore: Callable[[State], None] = lambda state: None

    @property
    def offers(self) -> frozenset[str]:
        """All of the suite."""
        return frozenset(FEATURES)

    def __call__(self, case: Case) -> Trace:
        """Run a case."""
        state = State(case, self.first_c(case), self.first_c_i(case))
        states = [(state.x, state.c, state.c_i.copy(), state.statistics)]
        for r in range(case.rounds):
            earlier_c, state.round = state.c, r
            self.round(case, state, r)
            if case.restart == r + 1:
                self.restore(state)
            state.earlier_c = earlier_c
            states.append((state.x, state.c, state.c_i.copy(), state.statistics))
        return Trace(*(np.stack(column) for column in zip(*states, strict=True)))

    def round(self, case: Case, state: State, r: int) -> None:
        """Let the cohort train, and count those who are heard."""
        sent = [self.visit(case, state, i) for i in case.cohorts[r]]
        heard = [v for v in sent if v.i in case.heard(r)]
        new = {v.i: self.renew(v) for v in sent}
        before, state.heard = state.heard, state.heard | {v.i for v in heard}
        weights = (sum(case.weights[i] for i in some) for some in (before, state.heard))
        changes = [self.change(v, new[v.i]) for v in heard]
        mail = Mail(case, state.x, state.c, state.statistics, sent, heard, changes, *weights)
        if self.quorum(heard):
            state.x = self.model(mail)
            state.c = state.c if case.frozen else self.control(mail)
            state.statistics = self.statistics(mail) if heard else state.statistics
        for v in () if case.frozen else sent if self.commit_lost else heard:
            self.keep(state, v, new[v.i])

    def visit(self, case: Case, state: State, i: int) -> Visit:
        """Client i's local steps."""
        c_i = state.c_i[i].copy() if i in state.met else self.meet(state, i)
        state.met.add(i)
        v = Visit(case, i, state.x, state.c, c_i, y=state.x, round=state.round)
        y, m, seen, raw, b = state.x, self.buffer(state, i), 0.0, 0.0, state.statistics
        for step, lr in enumerate(v.lr):
            given = case.gradient(i, y)
            g = self.clip(self.unscale(given, v), v)
            if case.noise:
                draw = np.random.default_rng(self.seed(v, step)).standard_normal(len(g))
                g = g + (case.noise * draw).astype(g.dtype)
            m = case.momentum * m + self.clip_corrected(self.correct(g, v), v)
            y = y - lr * (m + self.outside(v))
            b = b if case.buffers is None else self.forward(state, v, b)
            seen, raw = seen + g, raw + given
        state.momentum[i] = m
        v = v._replace(y=y, mean=seen / v.steps, raw=raw / v.steps, statistics=b)
        return v._replace(y=self.finish(v))


def second_option(formula: Callable[[Visit], Any]) -> Callable[[Visit], Any]:
    """A formula for option II; option I stays right."""
    return lambda v: v.at_x() if v.case.option == 1 else formula(v)


def travelling(travel: Callable[[Visit], float]) -> Callable[[Visit], Any]:
    """Return option II by displacement over some travel.

    It is right under momentum, which is a mistake of its own.
    """
    return second_option(lambda v: v.mean if v.case.momentum else v.displaced(travel(v)))


def nominal(v: Visit, new: Any) -> Any:
    """The change as of a client that took all the steps it was asked for."""
    slow = v.steps < max(v.case.local_steps)
    return v.displaced(max(v.case.local_steps) * v.case.lr[0]) - v.c_i if slow else new - v.c_i


def by_steps(m: Mail) -> Any:
    """Clients that took more steps count for more."""
    total = sum(v.steps for v in m.heard)
    return m.x + m.case.server_lr * sum(v.steps * (v.y - m.x) for v in m.heard) / total


def over_cohort(mail: Mail) -> Any:
    """The mean of the new c_i of this round's clients."""
    return mail.mean([v.c_i + change for v, change in zip(mail.heard, mail.changes, strict=True)])


def over_met(mail: Mail) -> Any:
    """The mean of the c_i of all clients heard so far: c times what it weighs, and the changes."""
    return (mail.before * mail.c + mail.share * mail.change) / mail.after


def by_smallest(mail: Mail) -> Any:
    """The moves are summed and divided by the smallest number of clients that a round has."""
    smallest = min(len(cohort) for cohort in mail.case.cohorts)
    return mail.x + mail.case.server_lr * mail.move * len(mail.heard) / smallest


def first_tensor(values: Any, v: Visit) -> Any:
    """The values of the model's first tensor, and zeros for the others."""
    first = int(np.prod(v.case.shapes[0])) if v.case.shapes else len(values)
    return np.where(np.arange(len(values)) < first, values, 0.0)


def shuffled(values: Any, v: Visit) -> Any:
    """The values with the tensors in the opposite order, end to end."""
    return v.case.join(v.case.split(values)[::-1]) if v.case.shapes else values


def shifted_by_buffers(values: Any, v: Visit) -> Any:
    """The values as a zip with parameters and buffers would pair them: one entry late."""
    return values if v.case.buffers is None else np.roll(values, 1)


def corrected_statistics(state: State, v: Visit, b: Any) -> Any:
    """Move running statistics by the control variate of the parameters beside them."""
    return v.case.forward(v.i, b) - v.lr[0] * (v.c - v.c_i)[: len(b)]


def clip_tensor(tensor: Any, v: Visit) -> Any:
    """One tensor of a gradient, clipped without the others."""
    return clipped(tensor.reshape(-1), v.case.clip)


def forget(*names: str) -> Callable[[State], None]:
    """A restart that finds zeros where these were."""

    def restore(state: State) -> None:
        for name in names:
            setattr(state, name, np.zeros_like(getattr(state, name)))

    return restore


def random_like(name: str) -> Callable[[Case], Any]:
    """Random numbers of the shape of a field of the case."""
    return lambda case: noise.standard_normal(np.shape(getattr(case, name)))


noise = np.random.default_rng(0)
right = Scaffold()


def mutant(**changes: Any) -> Scaffold:
    """The right implementation with some of its hooks replaced."""
    return replace(right, **changes)


RIGHT_IN_ANOTHER_WAY: dict[str, Adapter] = {
    "c_i by displacement, where the steps are plain SGD": mutant(
        renew=travelling(lambda v: sum(v.lr))
    ),
    "x by the unbiased mean over the cohort": mutant(
        model=lambda m: (
            m.x + m.case.server_lr * m.move * m.share * m.case.num_clients / len(m.heard)
        )
    ),
    "c as the mean over the clients heard so far": mutant(control=over_met),
}

MISTAKES: dict[str, Adapter] = {
    # How the control variates begin: niid_bench of Flower; NIID-Bench #8; FL4Health.
    "c_i starts as the model": mutant(first_c=lambda case: case.x0, meet=lambda state, i: state.x),
    "c and c_i start at random": mutant(first_c=random_like("x0"), first_c_i=random_like("linear")),
    "a late joiner copies c": mutant(meet=lambda state, i: state.c),
    # How the correction is applied: FedLab; NVFlare for TensorFlow; Fed-BioMed #734; pfl-research;
    # flame.
    "the correction never reaches the parameters": mutant(correct=lambda g, v: g),
    "the correction comes once, at the end of the epoch": mutant(
        correct=lambda g, v: g, finish=lambda v: v.y - sum(v.lr) * (v.c - v.c_i)
    ),
    "the correction has the wrong sign": mutant(correct=lambda g, v: g + v.c_i - v.c),
    "the correction lacks c": mutant(correct=lambda g, v: g - v.c_i),
    "the correction lacks c_i": mutant(correct=lambda g, v: g + v.c),
    "the correction is added to loss-scaled gradients": mutant(
        correct=lambda g, v: g + (v.c - v.c_i) / v.case.loss_scale
    ),
    "a private optimiser overwrites the corrected gradient": mutant(
        correct=lambda g, v: g if v.case.private else g - v.c_i + v.c
    ),
    # Noise and clips of private optimisers: the code that came with DP-SCAFFOLD.
    "every client draws the same noise": mutant(seed=lambda v, step: (v.round, step)),
    "noise is drawn once, for all rounds": mutant(seed=lambda v, step: (v.i, step)),
    "noise is drawn once a round, for all steps": mutant(seed=lambda v, step: (v.round, v.i)),
    "c_i is the mean of the gradients before noise": mutant(
        renew=second_option(lambda v: v.raw / v.case.loss_scale if v.case.noise else v.mean)
    ),
    "each tensor is clipped by itself": mutant(
        clip=lambda g, v: v.case.join([clip_tensor(one, v) for one in v.case.split(g)])
    ),
    "the gradient is clipped after the correction": mutant(
        clip=lambda g, v: g,
        clip_corrected=lambda d, v: clipped(d, v.case.clip or v.case.clip_corrected),
    ),
    "the gradient is clipped before the correction": mutant(
        clip=lambda g, v: clipped(g, v.case.clip or v.case.clip_corrected),
        clip_corrected=lambda d, v: d,
    ),
    "clipping asked for and not done": mutant(clip=lambda g, v: g, clip_corrected=lambda d, v: d),
    "a client's weight is in the correction only": mutant(
        correct=lambda g, v: g - v.c_i + v.c / (v.case.num_clients * v.weight),
        renew=travelling(lambda v: sum(v.lr)),
    ),
    # How c_i is renewed: pfl-research (signs); Plato; ki-ljl #1 and PFLlib #160; FL4Health #64;
    # PFLlib and the example of NVFlare (schedules); PFLlib (slow clients).
    "option I with the wrong sign": mutant(
        renew=lambda v: -v.at_x() if v.case.option == 1 else v.mean
    ),
    "option II with the wrong sign": mutant(renew=travelling(lambda v: -sum(v.lr))),
    "option II where option I was asked for": mutant(renew=lambda v: v.mean),
    "1 / epochs instead of 1 / (K lr)": mutant(
        renew=travelling(lambda v: v.steps / STEPS_IN_AN_EPOCH)
    ),
    "K counted in epochs": mutant(
        renew=travelling(lambda v: sum(v.lr) / min(v.steps, STEPS_IN_AN_EPOCH))
    ),
    "K counted in samples": mutant(renew=travelling(lambda v: sum(v.lr) * SAMPLES_IN_A_STEP)),
    "the first lr of a schedule": mutant(renew=travelling(lambda v: v.steps * v.lr[0])),
    "the last lr of a schedule": mutant(renew=travelling(lambda v: v.steps * v.lr[-1])),
    "the nominal K for slow clients": mutant(
        renew=travelling(lambda v: sum(v.lr) / v.steps * max(v.case.local_steps))
    ),
    "the nominal K for slow clients, in the change only": mutant(change=nominal),
    "c_i is the mean of the gradients before they are clipped": mutant(
        renew=second_option(lambda v: v.raw / v.case.loss_scale)
    ),
    "c_i is the mean of loss-scaled gradients": mutant(
        renew=second_option(lambda v: v.mean * v.case.loss_scale)
    ),
    # Momentum: FL-bench, Fed-BioMed, FL4Health, FLGo, fluke; Flower, NVFlare, FedML, SubstraFL,
    # NIID-Bench; the example of NVFlare.
    "momentum, c_i by displacement": mutant(renew=second_option(lambda v: v.displaced(sum(v.lr)))),
    "momentum, the correction outside": mutant(
        correct=lambda g, v: g,
        outside=lambda v: v.c - v.c_i,
        renew=second_option(lambda v: v.displaced(sum(v.lr))),
    ),
    "momentum, the buffer outlives the round": mutant(
        buffer=lambda state, i: state.momentum[i].copy()
    ),
    "momentum asked for and not used": lambda case: right(case._replace(momentum=0.0)),
    # What is sent and stored: FedML and FL-bench; FL_PyTorch; YanshiShield #91 and FedML; PFLlib;
    # Plato #382; SCAFFOLD-PyTorch #1.
    "c_i is never stored": mutant(keep=lambda state, v, new: None),
    "c_i is never stored, the change is from c": mutant(
        keep=lambda state, v, new: None, change=lambda v, new: new - v.c
    ),
    "all clients share one c_i": mutant(
        keep=lambda state, v, new: state.c_i.__setitem__(slice(None), new)
    ),
    "a client that was lost advances its c_i": mutant(commit_lost=True),
    "c_i is sent instead of its change": mutant(change=lambda v, new: new),
    "the change is always zero": mutant(change=lambda v, new: new - new),
    # What the server does: FedML; NVFlare; FL4Health; fluke and declearn; Flower; fluke; PFLlib;
    # NVFlare.
    "the last client's update only": mutant(
        model=lambda m: m.x + m.case.server_lr * (m.heard[-1].y - m.x),
        control=lambda m: m.c + m.share * m.changes[-1],
    ),
    "c without S/N": mutant(control=lambda m: m.c + m.change),
    "c with S/N as configured, not as heard": mutant(
        control=lambda m: m.c + m.configured * m.change
    ),
    "c by the sum of the changes": mutant(control=lambda m: m.c + sum(m.changes)),
    "c as the mean over the cohort": mutant(control=over_cohort),
    "x weighted, c not": mutant(control=lambda m: m.c + sum(m.changes) / m.case.num_clients),
    "c weighted within the cohort, times S/N": mutant(
        control=lambda m: m.c + len(m.heard) / m.case.num_clients * m.change
    ),
    "the server step on c as well": mutant(
        control=lambda m: m.c + m.case.server_lr * m.share * m.change
    ),
    "c from the server's own move": mutant(
        control=lambda m: m.c + m.share * (m.case.server_lr * (m.c + m.change) - m.c)
    ),
    "the server step on the model's weights": mutant(
        model=lambda m: m.case.server_lr * m.mean([v.y for v in m.heard])
    ),
    "x divided by the cohort, not by who was heard": mutant(
        model=lambda m: m.x + m.case.server_lr * m.move * m.share / m.configured
    ),
    "x divided by the smallest cohort": mutant(model=by_smallest),
    "x weighted by the number of steps": mutant(model=by_steps),
    "an empty round is averaged": mutant(quorum=lambda heard: True),
    # Models of several tensors, and their buffers: FL4Health #37 and Flower (a zip that pairs or
    # cuts wrongly); NIID-Bench and NVFlare for TensorFlow (statistics among the parameters).
    "only the first tensor is corrected": mutant(
        correct=lambda g, v: g + first_tensor(v.c - v.c_i, v)
    ),
    "only the first tensor's c_i is renewed": mutant(
        renew=lambda v: (
            v.c_i + first_tensor((v.at_x() if v.case.option == 1 else v.mean) - v.c_i, v)
        )
    ),
    "the tensors of c and the model are in different orders": mutant(
        correct=lambda g, v: g + shuffled(v.c - v.c_i, v)
    ),
    "control variates are paired with buffers": mutant(
        correct=lambda g, v: g + shifted_by_buffers(v.c - v.c_i, v)
    ),
    "running statistics are corrected as parameters are": mutant(forward=corrected_statistics),
    "the server step on running statistics": mutant(
        statistics=lambda m: (
            m.case.server_lr * m.mean([v.statistics for v in m.heard])
            + (1 - m.case.server_lr) * m.statistics
        )
    ),
    # What outlives the process: NVFlare; whoever keeps it in memory only; fluke.
    "c is lost on restart": mutant(restore=forget("c")),
    "c_i is lost on restart": mutant(restore=forget("c_i")),
    "c and c_i are lost on restart": mutant(restore=forget("c", "c_i")),
    "c is restored from an older round": mutant(
        restore=lambda state: setattr(state, "c", state.earlier_c)
    ),
}
