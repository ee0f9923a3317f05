"""Several processes that run one simulation: how they begin, agree, and notice that one is gone.

Every process makes the same host decisions, from what all of them say: how many rounds come next, whether to commit,
whether somebody got a signal. They speak through the same collectives as the rounds.
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
from fedscaffold.simulation.identity import differences
from fedscaffold.simulation.setup import Ready

__all__ = ["Lost", "agree_on", "exchanged", "join", "least", "leave", "most", "several", "together", "tried"]

ROOM = 1024  # bytes of a sentence
ROLL = "fedscaffold roll call"
ROLL_CALL = 4  # seconds that those left have to answer
LOSS = re.compile("gloo|nccl|rendezvous|coordination service", re.IGNORECASE)


class Lost(RuntimeError):
    """Another process of the run is gone; what was committed before is whole."""


def several(ready: Ready) -> bool:
    """Whether the run is one of several processes."""
    return ready.shards is not None and jax.process_count() > 1


@contextmanager
def together() -> Iterator[None]:
    """Turn what a collective says when a peer is gone into one sentence."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # it comes as either
        if not LOSS.search(str(error)):
            raise
        gone = _absent()
        names = f"process {', '.join(map(str, gone))}" if gone else "another process"
        raise Lost(f"process {jax.process_index()} of {jax.process_count()} has lost {names}") from error


def _absent() -> list[int]:
    """The processes that do not answer a roll call, made through the coordinator; none where nobody can say."""
    if all(thread.name != ROLL for thread in threading.enumerate()):
        return []  # it was not `join` that brought them together
    try:
        client = _client()
        client.key_value_set(f"{ROLL}/called/{jax.process_index()}", "")
        time.sleep(ROLL_CALL)
        return _silent(client)
    except Exception as error:  # whatever is wrong with it, the loss itself is what is told
        return [0] if "UNAVAILABLE" in str(error) else []


def _client() -> Any:
    """The coordinator's key-value store, which JAX offers nowhere else; looked up only where there are several."""
    from jax._src import distributed

    return distributed.global_state.client


def _silent(client: Any) -> list[int]:
    """Who has not answered."""
    there = {int(name.rpartition("/")[2]) for name, _ in client.key_value_dir_get(f"{ROLL}/here/")}
    return [number for number in range(jax.process_count()) if number not in there]


def _answer(client: Any, number: int) -> None:
    """Wait for a roll call, answer it, and log who does not, in a thread of its own.

    A collective may wait for one who has noticed the loss and is about to end: then this line is all that is known.
    """
    with suppress(Exception):  # there is no coordinator any more
        while not client.key_value_dir_get(f"{ROLL}/called/"):
            time.sleep(ROLL_CALL / 8)
        client.key_value_set(f"{ROLL}/here/{number}", "")
        time.sleep(ROLL_CALL / 2)
        gone = ", ".join(map(str, _silent(client)))
        os.write(2, f"{ROLL}: process {gone} is gone\n".encode())
        threading.Event().wait()  # its name says that there is a roll call


def exchanged(text: str, room: int = ROOM) -> list[str]:
    """What every process says, by its number; of each as much as fits the room.

    >>> exchanged("here")
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


def least(number: int) -> int:
    """The smallest of all processes' numbers.

    >>> least(3)
    3
    """
    return min(int(other) for other in exchanged(str(number)))


def most(*numbers: int) -> list[int]:
    """The largest of all processes' numbers, one by one.

    >>> most(3, 0)
    [3, 0]
    """
    return [
        max(column) for column in zip(*(json.loads(other) for other in exchanged(json.dumps(numbers))), strict=True)
    ]


def tried(work: Callable[[], Any]) -> list[Any]:
    """What all processes' work comes to, as JSON; where one of them cannot do its own, all raise the reason.

    >>> tried(lambda: {"generation": 3})
    [{'generation': 3}]
    """
    answer, fault = None, ""
    try:
        answer = work()
    except InputError as error:
        fault = str(error)
    heard = [json.loads(other) for other in exchanged(json.dumps([fault[: ROOM // 2], answer], ensure_ascii=False))]
    for number, (wrong, _) in enumerate(heard):
        if wrong:
            raise InputError(fault if number == jax.process_index() else f"process {number}: {wrong}")
    return [answer for _, answer in heard]


def agree_on(facts: dict[str, Any]) -> None:
    """Refuse to start where a process was asked for another run than process 0.

    >>> agree_on({"lr": 0.1})
    """
    text = json.dumps(facts, sort_keys=True)
    digests = exchanged(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    room = max(int(size) for size in exchanged(str(len(text.encode()))))
    every = [json.loads(other) for other in exchanged(text, room)]
    number = next(i for i, other in enumerate(every) if other != every[0])
    changed = differences(every[0], every[number])
    raise InputError(f"process {number} was asked for another run than process 0 ({changed}); give all the same")


# Beginning and ending


def join(
    coordinator: str | None, processes: int = 1, process_id: int = 0, *, devices: int = 1, deadline: int = 60
) -> None:
    """Make this process one of several that run a simulation together; to be called before JAX starts.

    Process 0 listens at `coordinator`, HOST:PORT, an address of its own machine that the others reach; each process
    brings as many `devices`. `deadline` is how many seconds the processes wait for one another at the start, and after
    which one that is silent counts as gone. Then `simulate(..., devices=processes * devices)` in all of them.

    >>> join("localhost:7700", processes=2, process_id=2)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: process_id must be a whole number of at least 0 and at most 1, got 2
    """
    checks.whole("processes", processes)
    checks.whole("process_id", process_id, at_least=0, at_most=processes - 1)
    try:
        jax.config.update("jax_num_cpu_devices", checks.whole("devices", devices))
    except RuntimeError as error:
        raise InputError("join must come before JAX runs anything: its devices are fixed when it starts") from error
    if processes == 1:
        return
    host, port = _address(coordinator)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if process_id == 0:
        _refuse_taken(host, port)
    else:
        _reach(host, port, deadline)
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
    threading.Thread(target=_answer, args=(_client(), process_id), name=ROLL, daemon=True).start()
    if jax.process_count() != processes:
        raise InputError(
            f"process {process_id} was told of {processes} processes and process 0 of {jax.process_count()}: "
            "give all the same number"
        )


def leave() -> None:
    """End this process's part once all are at the end."""
    jax.distributed.shutdown()


def _address(text: str | None) -> tuple[str, int]:
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"coordinator must be HOST:PORT, an address of process 0's machine, got {text!r}")
    return host, int(port)


def _refuse_taken(host: str, port: int) -> None:
    """See that process 0 can listen there."""
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except OSError as error:
        raise InputError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror or error}): the coordinator must be a free "
            "port at an address of process 0's machine"
        ) from None


def _reach(host: str, port: int, deadline: int) -> None:
    """Wait until process 0 listens."""
    until = time.monotonic() + deadline
    while True:
        try:
            socket.create_connection((host.strip("[]"), port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"nobody answers at {host}:{port} within {deadline} s ({error.strerror or error}): start process 0 "
                    "there, with the same --coordinator"
                ) from None
            time.sleep(0.1)
