"""SCAFFOLD as people write it, one public mistake at a time.

`Scaffold` is a right implementation with a hook at every place where a mistake was seen in public code or in
a public thread; each mutant replaces one hook, or two where the mistake has two halves. None of it is
anybody's code: the mistakes are told in our own words. Projects are named as sources, in the snapshot that
was read; some have been mended since.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.algorithms import scaffold
from fedscaffold.conformance import Adapter, Case, Trace, run

STEPS_IN_AN_EPOCH, SAMPLES_IN_A_STEP = 2, 8


class State:
    """What a server and its clients hold between rounds."""

    def __init__(self, case: Case, c: Any, c_i: Any) -> None:
        self.x, self.c, self.c_i = case.x0, c, c_i
        self.buffers = np.zeros_like(c_i)
        self.met: set[int] = set()
        self.earlier_c = c


class Visit(NamedTuple):
    """A client's round: what it was given, and what it has in its hands when its local steps are done."""

    case: Case
    i: int
    x: Any
    c: Any
    c_i: Any
    y: Any
    mean: Any = None  # of the raw gradients it saw

    @property
    def steps(self) -> int:
        return self.case.local_steps[self.i]

    @property
    def lr(self) -> tuple[float, ...]:
        return self.case.lr[: self.steps]

    @property
    def weight(self) -> float:
        return float(self.case.weights[self.i])

    def at_x(self) -> Any:
        return self.case.gradient(self.i, self.x)

    def displaced(self, travel: float) -> Any:
        """Option II in the paper's form, where `travel` should be K lr and the steps plain SGD."""
        return self.c_i - self.c + (self.x - self.y) / travel


class Mail(NamedTuple):
    """A server's round: what it has, whom it sent for, whom it heard, and what they say of their c_i."""

    case: Case
    x: Any
    c: Any
    sent: list[Visit]
    heard: list[Visit]
    changes: list[Any]

    @property
    def share(self) -> float:
        return sum(v.weight for v in self.heard)

    @property
    def configured(self) -> float:
        return sum(v.weight for v in self.sent)

    def mean(self, values: list[Any]) -> Any:
        return sum(v.weight * value for v, value in zip(self.heard, values, strict=True)) / self.share

    @property
    def move(self) -> Any:
        return self.mean([v.y - self.x for v in self.heard])

    @property
    def change(self) -> Any:
        return self.mean(self.changes)


class Scaffold(NamedTuple):
    """A right SCAFFOLD; every field is a place to go wrong."""

    first_c: Callable[[Case], Any] = lambda case: np.zeros_like(case.x0)
    first_c_i: Callable[[Case], Any] = lambda case: np.zeros_like(case.linear)
    meet: Callable[[State, int], Any] = lambda state, i: state.c_i[i]
    buffer: Callable[[State, int], Any] = lambda state, i: 0.0
    correct: Callable[[Any, Visit], Any] = lambda g, v: g - v.c_i + v.c
    outside: Callable[[Visit], Any] = lambda v: 0.0  # a correction added after the optimiser's step
    finish: Callable[[Visit], Any] = lambda v: v.y
    renew: Callable[[Visit], Any] = lambda v: v.at_x() if v.case.option == 1 else v.mean
    change: Callable[[Visit, Any], Any] = lambda v, new: new - v.c_i
    keep: Callable[[State, Visit, Any], None] = lambda state, v, new: state.c_i.__setitem__(v.i, new)
    commit_lost: bool = False
    quorum: Callable[[list[Visit]], bool] = bool
    model: Callable[[Mail], Any] = lambda mail: mail.x + mail.case.server_lr * mail.move
    control: Callable[[Mail], Any] = lambda mail: mail.c + mail.share * mail.change
    restore: Callable[[State], None] = lambda state: None

    def __call__(self, case: Case) -> Trace:
        state = State(case, self.first_c(case), self.first_c_i(case))
        states = [(state.x, state.c, state.c_i.copy())]
        for r in range(case.rounds):
            earlier_c = state.c
            self.round(case, state, r)
            if case.restart == r + 1:
                self.restore(state)
            state.earlier_c = earlier_c
            states.append((state.x, state.c, state.c_i.copy()))
        return Trace(*(np.stack(column) for column in zip(*states, strict=True)))

    def round(self, case: Case, state: State, r: int) -> None:
        sent = [self.visit(case, state, i) for i in case.cohorts[r]]
        heard = [v for v in sent if v.i in case.heard(r)]
        new = {v.i: self.renew(v) for v in sent}
        mail = Mail(case, state.x, state.c, sent, heard, [self.change(v, new[v.i]) for v in heard])
        if self.quorum(heard):
            state.x = self.model(mail)
            state.c = state.c if case.frozen else self.control(mail)
        for v in () if case.frozen else sent if self.commit_lost else heard:
            self.keep(state, v, new[v.i])

    def visit(self, case: Case, state: State, i: int) -> Visit:
        c_i = state.c_i[i].copy() if i in state.met else self.meet(state, i)
        state.met.add(i)
        v = Visit(case, i, state.x, state.c, c_i, y=state.x)
        y, m, total = state.x, self.buffer(state, i), 0.0
        for lr in v.lr:
            g = case.gradient(i, y)
            m = case.momentum * m + self.correct(g, v)
            y = y - lr * (m + self.outside(v))
            total = total + g
        state.buffers[i] = m
        v = v._replace(y=y, mean=total / v.steps)
        return v._replace(y=self.finish(v))


def second_option(formula: Callable[[Visit], Any]) -> Callable[[Visit], Any]:
    """A formula for option II; option I stays right."""
    return lambda v: v.at_x() if v.case.option == 1 else formula(v)


def travelling(travel: Callable[[Visit], float]) -> Callable[[Visit], Any]:
    """Option II by displacement over some travel; right under momentum, which is a mistake of its own."""
    return second_option(lambda v: v.mean if v.case.momentum else v.displaced(travel(v)))


def nominal(v: Visit, new: Any) -> Any:
    """The change as of a client that took all the steps it was asked for."""
    slow = v.steps < max(v.case.local_steps)
    return v.displaced(max(v.case.local_steps) * v.case.lr[0]) - v.c_i if slow else new - v.c_i


def by_steps(m: Mail) -> Any:
    total = sum(v.steps for v in m.heard)
    return m.x + m.case.server_lr * sum(v.steps * (v.y - m.x) for v in m.heard) / total


def over_cohort(mail: Mail) -> Any:
    return mail.mean([v.c_i + change for v, change in zip(mail.heard, mail.changes, strict=True)])


def forget(*names: str) -> Callable[[State], None]:
    def restore(state: State) -> None:
        for name in names:
            setattr(state, name, np.zeros_like(getattr(state, name)))

    return restore


def random_like(name: str) -> Callable[[Case], Any]:
    return lambda case: noise.standard_normal(np.shape(getattr(case, name)))


noise = np.random.default_rng(0)
right = Scaffold()
mutant = right._replace

RIGHT_IN_ANOTHER_WAY: dict[str, Adapter] = {
    "c_i by displacement, where the steps are plain SGD": mutant(renew=travelling(lambda v: sum(v.lr))),
    "x by the unbiased mean over the cohort": mutant(
        model=lambda m: m.x + m.case.server_lr * m.move * m.share * m.case.num_clients / len(m.heard)
    ),
}

MUTANTS: dict[str, Adapter] = {
    # How the control variates begin: niid_bench of Flower; NIID-Bench #8; FL4Health.
    "c_i starts as the model": mutant(first_c=lambda case: case.x0, meet=lambda state, i: state.x),
    "c and c_i start at random": mutant(first_c=random_like("x0"), first_c_i=random_like("linear")),
    "a late joiner copies c": mutant(meet=lambda state, i: state.c),
    # How the correction is applied: FedLab; NVFlare for TensorFlow; Fed-BioMed #734; pfl-research; flame.
    "the correction never reaches the parameters": mutant(correct=lambda g, v: g),
    "the correction comes once, at the end of the epoch": mutant(
        correct=lambda g, v: g, finish=lambda v: v.y - sum(v.lr) * (v.c - v.c_i)
    ),
    "the correction has the wrong sign": mutant(correct=lambda g, v: g + v.c_i - v.c),
    "the correction lacks c": mutant(correct=lambda g, v: g - v.c_i),
    "the correction lacks c_i": mutant(correct=lambda g, v: g + v.c),
    "the correction is added to loss-scaled gradients": mutant(correct=lambda g, v: (1024 * g - v.c_i + v.c) / 1024),
    "a client's weight is in the correction only": mutant(
        correct=lambda g, v: g - v.c_i + v.c / (v.case.num_clients * v.weight),
        renew=travelling(lambda v: sum(v.lr)),
    ),
    # How c_i is renewed: pfl-research (signs); Plato; ki-ljl #1 and PFLlib #160; FL4Health #64; PFLlib and
    # the example of NVFlare (schedules); PFLlib (slow clients).
    "option I with the wrong sign": mutant(renew=lambda v: -v.at_x() if v.case.option == 1 else v.mean),
    "option II with the wrong sign": mutant(renew=travelling(lambda v: -sum(v.lr))),
    "option II where option I was asked for": mutant(renew=lambda v: v.mean),
    "1 / epochs instead of 1 / (K lr)": mutant(renew=travelling(lambda v: v.steps / STEPS_IN_AN_EPOCH)),
    "K counted in epochs": mutant(renew=travelling(lambda v: sum(v.lr) / min(v.steps, STEPS_IN_AN_EPOCH))),
    "K counted in samples": mutant(renew=travelling(lambda v: sum(v.lr) * SAMPLES_IN_A_STEP)),
    "the first lr of a schedule": mutant(renew=travelling(lambda v: v.steps * v.lr[0])),
    "the last lr of a schedule": mutant(renew=travelling(lambda v: v.steps * v.lr[-1])),
    "the nominal K for slow clients": mutant(renew=travelling(lambda v: sum(v.lr) / v.steps * max(v.case.local_steps))),
    "the nominal K for slow clients, in the change only": mutant(change=nominal),
    # Momentum: FL-bench, Fed-BioMed, FL4Health, FLGo, fluke; Flower, NVFlare, FedML, SubstraFL, NIID-Bench;
    # the example of NVFlare.
    "momentum, c_i by displacement": mutant(renew=second_option(lambda v: v.displaced(sum(v.lr)))),
    "momentum, the correction outside": mutant(
        correct=lambda g, v: g,
        outside=lambda v: v.c - v.c_i,
        renew=second_option(lambda v: v.displaced(sum(v.lr))),
    ),
    "momentum, the buffer outlives the round": mutant(buffer=lambda state, i: state.buffers[i].copy()),
    "momentum asked for and not used": lambda case: right(case._replace(momentum=0.0)),
    # What is sent and stored: FedML and FL-bench; FL_PyTorch; YanshiShield #91 and FedML; PFLlib; Plato #382;
    # SCAFFOLD-PyTorch #1.
    "c_i is never stored": mutant(keep=lambda state, v, new: None),
    "c_i is never stored, the change is from c": mutant(
        keep=lambda state, v, new: None, change=lambda v, new: new - v.c
    ),
    "all clients share one c_i": mutant(keep=lambda state, v, new: state.c_i.__setitem__(slice(None), new)),
    "a client that was lost advances its c_i": mutant(commit_lost=True),
    "c_i is sent instead of its change": mutant(change=lambda v, new: new),
    "the change is always zero": mutant(change=lambda v, new: new - new),
    # What the server does: FedML; NVFlare; FL4Health; fluke and declearn; Flower; fluke; PFLlib; NVFlare.
    "the last client's update only": mutant(
        model=lambda m: m.x + m.case.server_lr * (m.heard[-1].y - m.x),
        control=lambda m: m.c + m.share * m.changes[-1],
    ),
    "c without S/N": mutant(control=lambda m: m.c + m.change),
    "c with S/N as configured, not as heard": mutant(control=lambda m: m.c + m.configured * m.change),
    "c by the sum of the changes": mutant(control=lambda m: m.c + sum(m.changes)),
    "c as the mean over the cohort": mutant(control=over_cohort),
    "x weighted, c not": mutant(control=lambda m: m.c + sum(m.changes) / m.case.num_clients),
    "c weighted within the cohort, times S/N": mutant(
        control=lambda m: m.c + len(m.heard) / m.case.num_clients * m.change
    ),
    "the server step on c as well": mutant(control=lambda m: m.c + m.case.server_lr * m.share * m.change),
    "c from the server's own move": mutant(
        control=lambda m: m.c + m.share * (m.case.server_lr * (m.c + m.change) - m.c)
    ),
    "the server step on the model's weights": mutant(model=lambda m: m.case.server_lr * m.mean([v.y for v in m.heard])),
    "x divided by the cohort, not by who was heard": mutant(
        model=lambda m: m.x + m.case.server_lr * m.move * m.share / m.configured
    ),
    "x weighted by the number of steps": mutant(model=by_steps),
    "an empty round is averaged": mutant(quorum=lambda heard: True),
    # What outlives the process: NVFlare; whoever keeps it in memory only; fluke.
    "c is lost on restart": mutant(restore=forget("c")),
    "c_i is lost on restart": mutant(restore=forget("c_i")),
    "c and c_i are lost on restart": mutant(restore=forget("c", "c_i")),
    "c is restored from an older round": mutant(restore=lambda state: setattr(state, "c", state.earlier_c)),
}


def broken(**changes: Any) -> Adapter:
    """Our own algorithm with some of its functions replaced."""
    return lambda case: run(scaffold(case.option, case.server_lr)._replace(**changes), case)


OUR_MUTANTS: dict[str, Adapter] = {
    "server: c without heard": broken(server=lambda x, c, move, d, heard: (x - move, d)),
    "server: c without D - c": broken(server=lambda x, c, move, d, heard: (x - move, c + heard * d)),
    "server: c stays": broken(server=lambda x, c, move, d, heard: (x - move, c)),
    "server: no server step": broken(server=lambda x, c, move, d, heard: (x - move, c + heard * (d - c))),
    "remember: d alone": broken(remember=lambda c, c_i, d: d),
    "remember: c - c_i + d": broken(remember=lambda c, c_i, d: c - c_i + d),
    "shift: c_i - c": broken(shift=lambda c, c_i: c_i - c),
    "direction: g": broken(direction=lambda g, y, x, shift: g),
    "at_x: always": broken(at_x=True),
    "at_x: never": broken(at_x=False),
    "one_step": broken(one_step=True),
}
