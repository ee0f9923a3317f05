"""JAX starts with one thread, and blocks of large local steps have threads of their own."""

import os
from pathlib import Path

import forkserver
import pytest

SCRIPT = """
import os
os.environ.pop("PJRT_NPROC", None)
os.environ.update({environment})
import numpy as np
import fedscaffold as fs

records = [(np.ones(({rows}, 3)), np.zeros({rows})) for _ in range(2)]
problem = fs.Problem(lambda w, batch: ((batch[0] @ w[:3] - batch[1]) ** 2).mean(), np.ones({dim}), records)
{before}
fs.simulate(fs.fedavg(), problem, rounds=1, local_steps=1, lr=0.1, metrics=())
tasks = (open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task"))
print(sum(task == "tf_XLAEigen" for task in tasks), "PJRT_NPROC" in os.environ)
"""

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread"),
]


def threads(rows=4, dim=3, before="", **environment):
    script = SCRIPT.format(rows=rows, dim=dim, before=before, environment=environment)
    done = forkserver.run(script)  # which starts no backend before it forks
    assert done.returncode == 0, done.stderr
    number, left = done.stdout.split()
    return int(number), left == "True"


def test_small_steps_run_on_one_thread_and_the_environment_is_as_before():
    assert threads() == (1, False)


def test_each_core_has_a_thread_of_its_own_for_blocks_of_large_steps():
    assert threads(rows=2000, dim=100_000) == (1 + 2, False)


def test_the_environment_limits_the_cores():
    assert threads(rows=2000, dim=100_000, PJRT_NPROC="1") == (1 + 1, True)


def test_the_environment_takes_precedence():
    assert threads(PJRT_NPROC="2") == (2, True)


def test_a_process_that_used_jax_before_keeps_its_threads():
    assert threads(before="import jax; jax.devices()")[0] == os.cpu_count()
