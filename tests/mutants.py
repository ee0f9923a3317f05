"""Our own algorithm, broken in each of its functions. Public mistakes are in `fedscaffold.conformance.mistakes`."""

from typing import Any

from fedscaffold.algorithms import scaffold
from fedscaffold.conformance import Adapter, run


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
