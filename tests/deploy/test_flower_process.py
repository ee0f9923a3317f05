"""Processes of messages: forks of one that waits, as independent as new ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedscaffold.deploy import flower_process
from fedscaffold.deploy.flower_process import MESSAGE, launcher, write_command

SCRIPT = """
import os, signal, socket, subprocess, sys
from fedscaffold.deploy.flower_process import end_with, launcher, wait_for_message

def message():
    child = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode
    with open("/proc/self/comm") as name:
        print(*sys.argv[1:], child, name.read().strip(), os.getpid(), flush=True)
    if "odd" in sys.argv:
        raise ValueError("an odd message")
    sys.exit(7)

waiting, launching = socket.socketpair()
if (pid := os.fork()) == 0:
    launching.close()
    words = wait_for_message(waiting)
    if words is not None:
        sys.argv = words
        end_with(message)
    print("no more", flush=True)
    sys.exit(0)
waiting.close()
popen = launcher(launching, lambda: True)
for word in ("one", "odd", "two words", "\\u00fcber"):
    popen(["flwr-clientapp", word])
launching.close()
print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_every_message_has_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert {"no more", "ended 0"} < {*lines}
    told, pids = zip(*(one.rsplit(" ", 1) for one in lines if MESSAGE in one), strict=True)
    # each has its name, and can wait for processes of its own
    words = ("one", "odd", "two words", "\u00fcber")
    assert sorted(told) == sorted(f"{word} 3 {MESSAGE}" for word in words)
    assert len({*pids}) == len(words)
    assert done.stderr.count("ValueError: an odd message") == 1
    assert "SystemExit" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "code"),
    [("sys.exit(7)", 7), ("sys.exit()", 0), ("sys.exit('why')", 1), ("pass", 0), ("1 / 0", 1)],
)
def test_a_process_ends_with_the_code_of_its_command(body, code):
    script = (
        "import sys\nfrom fedscaffold.deploy.flower_process import end_with\n"
        f"def message():\n    print('said', end='')\n    {body}\nend_with(message)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "said")


def test_other_commands_and_messages_of_another_installation_are_started_as_flower_does(
    monkeypatch,
):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **more: started.append((words, more)))
    waiting, launching = socket.socketpair()
    with waiting, launching:
        current = [True]
        popen = launcher(launching, lambda: current[0])
        popen([MESSAGE, "--token", "a"])
        assert json.loads(waiting.recv(1000)) == [MESSAGE, "--token", "a"]
        assert started == []
        others = [
            (["flwr-serverapp"], {}),
            ([MESSAGE], {"stdout": subprocess.DEVNULL}),  # its output is not wanted
        ]
        for words, more in others:
            popen(words, **more)
        current[0] = False
        popen([MESSAGE, "later"])
        current[0] = True
        waiting.close()  # the waiting process died
        popen([MESSAGE, "last"])
        launcher(launching, Path("no such file").stat)([MESSAGE, "while it is installed"])
    words = "later", "last", "while it is installed"
    assert started == [*others, *(([MESSAGE, word], {}) for word in words)]


def test_the_commands_come_with_the_functions_they_call(tmp_path):
    write_command(tmp_path / "bin")
    for path in sorted((tmp_path / "bin").iterdir()):
        function = path.read_text().split()[-1].removesuffix("()")
        assert callable(getattr(flower_process, function))
        assert path.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in sorted((tmp_path / "bin").iterdir())] == [
        flower_process.EXECUTOR,
        MESSAGE,
    ]
