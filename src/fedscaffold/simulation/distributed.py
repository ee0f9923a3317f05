"""Simulation on several processes: start-up, collective decisions, detection of lost processes.

All processes take the same host decisions (rounds in the next chunk, whether to commit, whether a
signal arrived) from values exchanged with the same collectives as the rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.simulation.fingerprint import differences

__all__ = [
    "Lost",
    "allgather",
    "allreduce_max",
    "allreduce_min",
    "check_same_run",
    "detect_cluster",
    "detect_lost_processes",
    "join",
    "leave",
    "run_everywhere",
]

ROOM = 1024  # bytes of a message
ROLL = "fedscaffold roll call"
ROLL_CALL = 4  # seconds to wait for answers
LOSS = re.compile("gloo|nccl|rendezvous|coordination service", re.IGNORECASE)


class Lost(RuntimeError):
    """Another process of the run is lost; earlier checkpoints are intact."""


@contextmanager
def detect_lost_processes() -> Iterator[None]:
    """Convert collective failures to `Lost`, naming the missing processes."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises either
        if not LOSS.search(str(error)):
            raise
        gone = _find_lost_processes()
        names = f"process {', '.join(map(str, gone))}" if gone else "another process"
        raise Lost(
            f"process {jax.process_index()} of {jax.process_count()} has lost {names}"
        ) from error


def _find_lost_processes() -> list[int]:
    """Return the processes that do not answer a roll call through the coordinator.

    Empty if unknown.
    """
    if all(thread.name != ROLL for thread in threading.enumerate()):
        return []  # not started by `join`: there is no roll call
    try:
        client = _key_value_store()
        client.key_value_set(f"{ROLL}/called/{jax.process_index()}", "")
        time.sleep(ROLL_CALL)
        return _unanswered(client)
    except Exception as error:  # a failed roll call must not hide the loss itself
        return [0] if "UNAVAILABLE" in str(error) else []


def _key_value_store() -> Any:
    """Return the coordinator's key-value store, for which JAX has no public API."""
    from jax._src import distributed

    return distributed.global_state.client


def _unanswered(client: Any) -> list[int]:
    """Return the processes that have not answered."""
    there = {int(name.rpartition("/")[2]) for name, _ in client.key_value_dir_get(f"{ROLL}/here/")}
    return [number for number in range(jax.process_count()) if number not in there]


def _answer_roll_call(client: Any, number: int) -> None:
    """Wait for a roll call, answer it, and log the processes that do not; runs in a thread.

    The main thread may be blocked in a collective until the process ends; then this line is the
    only message.
    """
    with suppress(Exception):  # the coordinator is gone
        while not client.key_value_dir_get(f"{ROLL}/called/"):
            time.sleep(ROLL_CALL / 8)
        client.key_value_set(f"{ROLL}/here/{number}", "")
        time.sleep(ROLL_CALL / 2)
        gone = ", ".join(map(str, _unanswered(client)))
        os.write(2, f"{ROLL}: process {gone} is gone\n".encode())
        # stay alive: `_find_lost_processes` looks for a thread of this name
        threading.Event().wait()


def allgather(text: str, room: int = ROOM) -> list[str]:
    """Gather a text from every process, each cut to `room` bytes, in order of process number.

    >>> allgather("here")
    ['here']
    """
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    said = np.zeros(room, np.uint8)
    data = text.encode()[:room]
    said[: len(data)] = np.frombuffer(data, np.uint8)
    heard = np.asarray(multihost_utils.process_allgather(said))
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in heard]


def allreduce_min(number: int) -> int:
    """Return the minimum of a number over all processes.

    >>> allreduce_min(3)
    3
    """
    return min(int(other) for other in allgather(str(number)))


def allreduce_max(*numbers: int) -> list[int]:
    """Return the elementwise maximum of numbers over all processes.

    >>> allreduce_max(3, 0)
    [3, 0]
    """
    return [
        max(column)
        for column in zip(
            *(json.loads(other) for other in allgather(json.dumps(numbers))), strict=True
        )
    ]


def run_everywhere(work: Callable[[], Any]) -> list[Any]:
    """Run on every process and gather the results, as JSON; raise everywhere if any fails.

    >>> run_everywhere(lambda: {"generation": 3})
    [{'generation': 3}]
    """
    answer, fault = None, ""
    try:
        answer = work()
    except InputError as error:
        fault = str(error)
    heard = [
        json.loads(other)
        for other in allgather(json.dumps([fault[: ROOM // 2], answer], ensure_ascii=False))
    ]
    for number, (wrong, _) in enumerate(heard):
        if wrong:
            raise InputError(
                fault if number == jax.process_index() else f"process {number}: {wrong}"
            )
    return [answer for _, answer in heard]


def check_same_run(facts: dict[str, Any]) -> None:
    """Raise an InputError on all processes if one was started with another run than process 0.

    >>> check_same_run({"lr": 0.1})
    """
    text = json.dumps(facts, sort_keys=True)
    digests = allgather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    room = max(int(size) for size in allgather(str(len(text.encode()))))
    every = [json.loads(other) for other in allgather(text, room)]
    number = next(i for i, other in enumerate(every) if other != every[0])
    changed = differences(every[0], every[number])
    raise InputError(
        f"process {number} was asked for another run than process 0 ({changed}); give all the same"
    )


def detect_cluster() -> tuple[str, int, int] | None:
    """Return what SLURM or Open MPI say of a run, as JAX reads it from the environment.

    Returns:
        HOST:PORT of process 0, the number of processes, and the number of this one; None if neither
        of the two has started this process, or no other beside it.
    """
    from jax._src import clusters

    known = clusters.SlurmCluster, clusters.OmpiCluster
    here = next((cluster for cluster in known if cluster.is_env_present()), None)
    if here is None or here.get_process_count() == 1:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    address = here.get_coordinator_address(None, port)
    return address, here.get_process_count(), here.get_process_id()


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    devices: int = 1,
    deadline: int = 60,
) -> None:
    """Join a simulation on several processes; call this before JAX starts.

    Then call `simulate(..., devices=processes * devices)` in all of them. Without the first three
    arguments, processes that SLURM or Open MPI have started find one another.

    Args:
        coordinator: HOST:PORT at which process 0 listens, reachable by the others.
        processes: Number of processes.
        process_id: Number of this process, from 0.
        devices: Number of devices of each process.
        deadline: Seconds that processes wait for one another at the start, and after which a silent
            one is lost.

    Raises:
        InputError: An argument is invalid, JAX has started already, or the processes cannot
            connect.

    >>> join("localhost:7700", processes=2, process_id=2)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: process_id must be a whole number of at least 0 and at most 1,
        got 2
    """
    if coordinator is None and processes is None and process_id is None:
        coordinator, processes, process_id = detect_cluster() or (None, 1, 0)
    processes = 1 if processes is None else checks.whole("processes", processes)
    process_id = 0 if process_id is None else process_id
    checks.whole("process_id", process_id, at_least=0, at_most=processes - 1)
    try:
        jax.config.update("jax_num_cpu_devices", checks.whole("devices", devices))
    except RuntimeError as error:
        raise InputError(
            "join must come before JAX runs anything: its devices are fixed when it starts"
        ) from error
    if processes == 1:
        return
    host, port = _parse_address(coordinator)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if process_id == 0:
        _check_port_free(host, port)
    else:
        _wait_for_coordinator(host, port, deadline)
    try:
        jax.distributed.initialize(
            f"{host}:{port}",
            processes,
            process_id,
            initialization_timeout=deadline,
            heartbeat_timeout_seconds=deadline,
            shutdown_timeout_seconds=deadline,
            coordinator_bind_address=f"{host}:{port}",
        )
    except RuntimeError as error:
        raise InputError(f"process {process_id} could not meet the others: {error}") from error
    threading.Thread(
        target=_answer_roll_call, args=(_key_value_store(), process_id), name=ROLL, daemon=True
    ).start()
    if jax.process_count() != processes:
        raise InputError(
            f"process {process_id} was told of {processes} processes and process 0 of "
            f"{jax.process_count()}: "
            "give all the same number"
        )


def leave() -> None:
    """Disconnect this process, after waiting for the others."""
    jax.distributed.shutdown()


def _parse_address(text: str | None) -> tuple[str, int]:
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"coordinator must be HOST:PORT, an address of process 0's machine, got {text!r}"
        )
    return host, int(port)


def _check_port_free(host: str, port: int) -> None:
    """Raise an InputError unless process 0 can listen at the address."""
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except OSError as error:
        raise InputError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror or error}): the "
            "coordinator must be a free "
            "port at an address of process 0's machine"
        ) from None


def _wait_for_coordinator(host: str, port: int, deadline: int) -> None:
    """Wait until process 0 listens; raise an InputError after `deadline` seconds."""
    until = time.monotonic() + deadline
    while True:
        try:
            socket.create_connection((host.strip("[]"), port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"nobody answers at {host}:{port} within {deadline} s "
                    f"({error.strerror or error}): start process 0 "
                    "there, with the same --coordinator"
                ) from None
            time.sleep(0.1)
