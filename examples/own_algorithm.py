"""Your own algorithm in one file, tested by the conformance suite.

    python examples/own_algorithm.py
    cd examples; fedscaffold conform --target own_algorithm:damped

`damped` is SCAFFOLD with control variates that are running means: c_i moves only part of the way to
the latest mean gradient. `slipped` is a wrong version of it.
"""

from collections import Counter

import fedscaffold as fs
from fedscaffold.algorithms.scaffold import Memory, Message, Server, init, memory
from fedscaffold.conformance import conform


def damped(damping=0.8, server_lr=1.0):
    """d = g - c_i + c;   c_i+ = c_i + damping (d_i - c);   damping = 1 is SCAFFOLD."""

    def shift(server, memory):
        return server.c - memory.c_i

    def direction(gradient, y, x, shift):
        return gradient(y) + shift

    def message(walk, shift):
        return Message(walk.d, walk.move)

    def remember(memory, shift, message):
        return Memory(memory.c_i + damping * (message.d - shift - memory.c_i))

    def update(server, sent, mean, heard):
        return Server(
            server.x - server_lr * mean.move, server.c + damping * heard * (mean.d - sent.c)
        )

    return fs.Algorithm(
        "damped", direction, message, update, init, memory, shift, remember, means=(("c", "c_i"),)
    )


def slipped(damping=0.8, server_lr=1.0):
    """`damped` with a few letters lost: the new c_i is made of d, not of d - c."""

    def remember(memory, shift, message):
        return Memory(memory.c_i + damping * message.d)

    return damped(damping, server_lr)._replace(name="slipped", remember=remember)


if __name__ == "__main__":
    problem = fs.problems.quadratic(num_clients=10, dim=20, mu=0.1, seed=0)
    settings = {"rounds": 300, "local_steps": 10, "lr": 0.1, "cohort": 0.5, "precision": "float64"}
    runs, fails = {}, {}
    for make in (fs.scaffold, damped, slipped):
        name = make.__name__
        runs[name] = run = fs.simulate(
            make(), problem, **settings, metrics=["distance", "grad_norm"]
        )
        fails[name] = Counter(
            one.name.split(":")[0] for one in conform(make) if one.outcome == "fails"
        )
        far, slope = run.history["distance"][-1], run.history["grad_norm"][-1]
        print(
            f"{name}: ends {far:.0e} from the optimum, where the gradient is {slope:.0e}; gauge "
            f"{run.residual:.0e}"
        )
        print(
            f"    fails: "
            f"{', '.join(f'{what} ({n})' for what, n in fails[name].items()) or 'nothing'}"
        )
