"""FedBN (Li et al. 2021): FedAvg with layers that never leave the client.

With s the layers that are shared and l those that are local,

    client     y <- y - lr g_i(y)       K times from y = (x on s, v_i on l)               start
               v_i+ = y                                                     keep
    server     x+ = x - server_lr * move on s; on l it stays x0             message

so a client's model is x on s and its own v_i on l, where v_i begins at x0. Messages are of the
shared layers alone, in both directions. In the paper the local layers are those of batch
normalisation; any may be chosen here.

`local_layers` does the same to other methods: control variates of layers that are not shared stay
0.

The lines are those of the paper's Algorithm 1, from memory: all clients take part there, and weigh
the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from fedscaffold.algorithms.base import Algorithm, Vector, Walk, common_model
from fedscaffold.algorithms.fedavg import fedavg
from fedscaffold.algorithms.round import exchange
from fedscaffold.checks import InputError, memoised


class Own(NamedTuple):
    """What a client keeps for itself: its last model, of which the local layers count."""

    v: Vector


@memoised
def fedbn(local: Collection[str] = (), server_lr: float = 1.0) -> Algorithm:
    """FedBN with the layers `local`, by name or pattern (`bn*`).

    >>> fedbn(local=("bn*",)).name
    'fedbn'
    """
    if isinstance(local, list):
        return fedbn(tuple(local), server_lr)
    return local_layers(fedavg(server_lr), local, name="fedbn")


def local_layers(
    algorithm: Algorithm, local: Collection[str], name: str | None = None
) -> Algorithm:
    """Return the algorithm with some layers that each client keeps to itself.

    Args:
        algorithm: A method whose clients keep no models of their own so far.
        local: Names of layers or of parts of the model above them, or patterns such as `bn*`; the
            simulator and the deployment find them in the model, and refuse a name that is not
            there.
        name: Of the new algorithm; that of the old one unless given.

    >>> from fedscaffold.algorithms.scaffold import scaffold
    >>> local_layers(scaffold(), local=["head"]).name
    'scaffold'
    """
    if isinstance(local, str) or not all(isinstance(name, str) for name in local):
        wrong = (
            local
            if isinstance(local, str)
            else next(name for name in local if not isinstance(name, str))
        )
        raise InputError(f"local must be a list of layers' names such as ['bn*'], got {wrong!r}")
    if algorithm.has_own or algorithm.start is not common_model or algorithm.fit is not None:
        raise InputError(
            f"{algorithm.name}'s clients keep something of their own already; take another method"
        )
    if (
        algorithm.prepare is not None
        or "gradient" in exchange(algorithm).reads
        or _pulls(algorithm)
    ):
        raise InputError(
            f"{algorithm.name} looks at x itself, which has no local layers; take another method"
        )
    names, algorithm = tuple(local), algorithm._replace(name=name or algorithm.name)

    def fit(layout: Any) -> Algorithm:
        if layout is None:
            return _with_local(algorithm, (), False, True)._replace(fit=fit)
        return _with_local(algorithm, *layout.split(names))._replace(fit=fit)

    return fit(None) if not names else _unfitted(fit(None))


def _pulls(algorithm: Algorithm) -> bool:
    """Whether the local steps depend on x beside y."""
    shift = algorithm.shift(algorithm.init(0.5), algorithm.memory(0.5))
    at = [algorithm.direction(float, 1.0, x, 0.0 if shift is None else shift) for x in (2.0, 3.0)]
    return bool(at[0] != at[1])


def _with_local(algorithm: Algorithm, private: Any, local: Any, shared: Any) -> Algorithm:
    """The algorithm with local layers; `local` and `shared` are their masks."""

    def personal(x: Vector, own: Own) -> Vector:
        return shared * x + local * own.v

    def keep(own: Own, walk: Walk, shift: Vector) -> Own:
        return Own(walk.y)

    def message(walk: Walk, shift: Vector) -> Any:
        seen = Walk(
            x=lambda: walk.x,
            y=lambda: walk.y,
            move=lambda: shared * walk.move,
            travel=lambda: walk.travel,
            d=lambda: shared * walk.d,
            gradient=lambda: shared * walk.gradient,
            own=lambda: walk.own,
        )
        return algorithm.message(seen, shift)

    why = "sends part of the model, which compressors do not know yet; leave compression out"
    needs = (*algorithm.needs, *(() if private == () else (("exact messages", why),)))
    form = algorithm.form if private == () else None
    own: Any = {"own": Own, "start": personal, "keep": keep, "personal": personal}
    # it would take the gradient at x, which has no local layers
    renew = algorithm.renew if private == () else None
    return algorithm._replace(
        message=message, private=private, needs=needs, form=form, renew=renew, **own
    )


def _unfitted(algorithm: Algorithm) -> Algorithm:
    """The algorithm before it knows the model: its local steps cannot begin."""

    def start(x: Vector, own: Own) -> Vector:
        raise InputError(
            f"{algorithm.name} must know the model's layers first: algorithms.round.fitted"
        )

    return algorithm._replace(start=start, personal=start)
