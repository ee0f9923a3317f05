"""The largest stable step size of asynchronous rounds whose replies are equally late."""

from __future__ import annotations

import math

from fedscaffold import checks

__all__ = ["delayed_step_limit"]


def delayed_step_limit(
    curvature: float, staleness: int, *, local_steps: int = 1, server_lr: float = 1.0
) -> float:
    """Return the step size below which asynchronous rounds are stable.

    All clients have the same quadratic, and every reply is to the model of `staleness` server steps
    ago. For FedAvg (FedBuff, without damping) the error along an eigenvector of the Hessian is

        e_{t+1} = e_t - a e_{t-staleness},    a = server_lr (1 - (1 - lr * curvature)^local_steps),

    which is stable for 0 < a < 2 sin(pi / (2 (2 staleness + 1))) (Levin and May, 1976). Smaller
    eigenvalues are stable with the largest one. SCAFFOLD's shifts are late as well, and what they
    add differs from group to group of replies; the limit is a guide there.

    Args:
        curvature: Largest eigenvalue of the Hessian.
        staleness: Server steps between a reply and the model that it is to; with all clients at
            work and equally fast, cohort / buffer - 1.
        local_steps: Local steps of a task.
        server_lr: Server step size.

    Returns:
        The limit of the step size of local steps.

    >>> delayed_step_limit(1.0, 0), round(delayed_step_limit(1.0, 2), 3)
    (2.0, 0.618)
    """
    curvature = checks.number("curvature", curvature, above=0)
    staleness = checks.whole("staleness", staleness, at_least=0)
    local_steps = checks.whole("local_steps", local_steps, at_least=1)
    server_lr = checks.number("server_lr", server_lr, above=0)
    most = 2 * math.sin(math.pi / (2 * (2 * staleness + 1))) / server_lr
    if most <= 1:
        return (1 - math.pow(1 - most, 1 / local_steps)) / curvature
    if local_steps % 2:
        return (1 + math.pow(most - 1, 1 / local_steps)) / curvature
    return 2 / curvature  # an even power never takes a beyond server_lr, and to 0 at this step
