"""Our own algorithm, broken in each of its functions. Public mistakes are in `fedscaffold.conformance.mistakes`."""

from typing import Any

from fedscaffold.algorithms import scaffold
from fedscaffold.algorithms.base import one_full_step
from fedscaffold.algorithms.scaffold import Memory, Server, message, message_at_x
from fedscaffold.conformance import Adapter, run


def broken(**changes: Any) -> Adapter:
    """Our own algorithm with some of its functions replaced."""
    return lambda case: run(scaffold(case.option, case.server_lr)._replace(**changes), case)


def update(c: Any) -> Adapter:
    """Our own algorithm with another c, and the whole mean move."""
    return broken(
        update=lambda server, sent, mean, heard: Server(
            server.x - mean.move, c(server, mean, heard)
        )
    )


OUR_MUTANTS: dict[str, Adapter] = {
    "update: c without heard": update(lambda server, mean, heard: mean.d),
    "update: c without D - c": update(lambda server, mean, heard: server.c + heard * mean.d),
    "update: c stays": update(lambda server, mean, heard: server.c),
    "update: no server step": update(
        lambda server, mean, heard: server.c + heard * (mean.d - server.c)
    ),
    "remember: d alone": broken(remember=lambda memory, shift, message: Memory(message.d)),
    "remember: d + shift": broken(
        remember=lambda memory, shift, message: Memory(message.d + shift)
    ),
    "shift: c_i - c": broken(shift=lambda server, memory: memory.c_i - server.c),
    "direction: g": broken(direction=lambda gradient, y, x, shift: gradient(y)),
    "message: at x, always": broken(message=message_at_x),
    "message: at x, never": broken(message=message),
    "work: one step": broken(work=one_full_step),
}
