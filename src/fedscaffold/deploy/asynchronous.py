"""Asynchronous rounds of a deployment (`mode = "async"`): a reply counts when it comes.

A round is one step of the server. It opens with requests to sites that have no task, up to the
cohort's size together with those at work, and closes when `buffer` replies are here; the tasks of
the other sites go on into the next round. So no site waits for a slow one, but for the replies that
fill the buffer.

    one task        a site is asked again when its reply was counted or refused, or when its task is
                    older than `deadline`. Its c_i does not change while it works, so the server
                    makes c_i+ and the change of c from the record that it sent: c = sum p_i c_i
                    whatever the delays
    late, repeated  a reply must carry round and nonce of the site's present task, as in synchronous
                    rounds; any other is refused as stale
    crash           tasks at work are not part of the committed state. A server that restarts asks
                    all sites anew, and replies to its former self are stale; what a site keeps
                    follows the digests in the requests (`client_state.py`)
    everybody       an evaluation or a resync asks all sites at once, and gives up the tasks at work
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import refuse_asynchronous
from fedscaffold.checks import InputError
from fedscaffold.damping import damping_of

if TYPE_CHECKING:
    from fedscaffold.deploy.settings import Settings

__all__ = ["refuse_settings"]


def refuse_settings(settings: Settings, algorithm: Algorithm) -> None:
    """Raise an InputError for settings that do not go together with the mode of the rounds."""
    deploy = settings.deploy
    damped = damping_of(deploy.staleness) is not None
    if deploy.mode == "sync":
        if deploy.buffer is not None or damped:
            given = "buffer" if deploy.buffer is not None else "staleness"
            raise InputError(f'deploy.{given} is for deploy.mode = "async": leave it out')
        return
    if deploy.buffer is None:
        raise InputError(
            'deploy.mode = "async" needs deploy.buffer: the number of replies that make a step'
        )
    refuse_asynchronous(algorithm, damped)
    most = len(deploy.sites) or deploy.buffer
    most = min(most, settings.cohort) if isinstance(settings.cohort, int) else most
    if deploy.buffer > most:
        raise InputError(
            f"deploy.buffer must be at most the number of sites at work, {most}, got "
            f"{deploy.buffer}"
        )
    if damped and deploy.state == "client":
        raise InputError(
            'deploy.staleness needs deploy.state = "server": a client whose move was damped must '
            "know it"
        )
    if settings.robust is not None:
        raise InputError(
            'robust needs deploy.mode = "sync": it compares the replies of a round, which are to '
            "one model"
        )
    if deploy.secure:
        raise InputError(
            'deploy.secure needs deploy.mode = "sync": a sum that hides single replies is one over '
            "a round"
        )
    if settings.privacy is not None:
        raise InputError(
            'deploy.mode = "async" does not go together with [privacy]: sites are charged for the '
            "rounds that they are asked in, and a task that is given up would be charged too"
        )
