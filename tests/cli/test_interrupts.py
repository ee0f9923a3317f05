"""Ctrl-C and SIGTERM at any moment of a command: one line, the right exit code, nothing half done."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# whoever started the tests may ignore Ctrl-C
HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
# 'begun' is said once signals are heard: before, there is nothing but Python's own start
BEGUN = """
import contextlib
from fedscaffold import cli
heard = cli.interruptible
@contextlib.contextmanager
def begun():
    with heard():
        print("begun", flush=True)
        yield
cli.interruptible = begun
"""
START = BEGUN + "from fedscaffold.cli import main; main()"
CONFIG = """
rounds = 10_000_000
[problem]
dataset = "quadratic"
[local]
steps = 5
lr = 0.1
[output]
dir = "runs/first"
checkpoint_every = 100_000
"""


def begun(folder, *words, start=START):
    """A command that has just begun, in a process of its own."""
    (folder / "first.toml").write_text(CONFIG)
    process = subprocess.Popen(
        [sys.executable, "-c", HEARING + start, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    assert process.stdout.readline() == "begun\n"
    return process


def signalled(process, number, seconds=120):
    """Send a signal; returns the exit code and the lines on stderr."""
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, said.splitlines()


# 5 ms to 2.5 s: before JAX is imported, while it is, compiling, in the first rounds
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGINT, 0.6),
        (signal.SIGTERM, 1.2),
        pytest.param(signal.SIGINT, 0.1, marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, 0.3, marks=pytest.mark.soak),
    ],
)
def test_a_run_can_be_interrupted_at_any_moment_of_its_start(number, step, tmp_path):
    for k in range(int(2.5 / step)):
        run = begun(tmp_path, "run", "first.toml", "--fresh")
        time.sleep(0.005 + step * k)
        code, said = signalled(run, number)
        assert code == 128 + number, (k, said)
        assert len(said) == 1, (k, said)
        opened = (tmp_path / "runs/first/config.toml").exists()
        assert said[0] == "fedscaffold: interrupted" or (
            "go on with: fedscaffold resume runs/first" in said[0] and opened
        )


LONG = {
    "compare": ["compare", "--dataset", "quadratic", "--rounds", "10000000", "--local-steps", "5"],
    "demo": ["demo"],
    "exercise": ["momentum"],
    "bench": ["--only", "W1"],
    "papers": ["quadratics-fig1", "--fresh"],
}
MODULES = {"exercise": "papers.exercises", "bench": "benchmarks", "papers": "papers"}


@pytest.mark.process
@pytest.mark.parametrize("verb", LONG)
@pytest.mark.parametrize("moments", [(0.9,), pytest.param((0.2, 0.9, 2.0), marks=pytest.mark.soak)])
def test_every_long_verb_can_be_interrupted(verb, moments, tmp_path):
    for seconds in moments:
        module = MODULES.get(verb)
        start = BEGUN + f"from {module}.__main__ import main; main()" if module else START
        work = begun(tmp_path, *LONG[verb], start=start)
        time.sleep(seconds)
        code, said = signalled(work, signal.SIGINT)
        assert code == 130, (seconds, said)
        assert len(said) == 1, said
        assert said[0].startswith(("fedscaffold: interrupted", "fedscaffold: stopped")), said


@pytest.mark.process
def test_an_interrupt_inside_a_callback_of_the_garbage_collector_is_not_forgotten(tmp_path):
    collected = """
import gc, os, signal
def callback(phase, info):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
from fedscaffold.cli import main, interrupts
print("begun", flush=True)
usual = interrupts.threading.Thread.start
def start(thread):
    usual(thread)
    gc.callbacks.append(callback)  # as JAX does when it is imported
interrupts.threading.Thread.start = start
main()
"""
    work = begun(tmp_path, "conform", start=collected)
    _, said = work.communicate(timeout=120)
    assert work.returncode == 130, said
    assert said == "fedscaffold: interrupted\n"


# says when a round begins: from then on the first interrupt waits for its end
TELLING = (
    BEGUN
    + """
from fedscaffold.simulation import engine
compiled = engine._compile
def telling(*given):
    program = compiled(*given)
    return lambda *arguments: (print("in a round", flush=True), program(*arguments))[1]
engine._compile = telling
cli.main()
"""
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_second_interrupt_ends_a_long_round_at_once(tmp_path):
    words = (
        "run",
        "first.toml",
        "--fresh",
        "--set",
        "local.steps=2_000_000_000",
    )  # a round takes minutes
    run = begun(tmp_path, *words, start=TELLING)
    assert run.stdout.readline() == "in a round\n"
    run.send_signal(signal.SIGINT)
    while "ShdPnd:\t0000000000000000" not in Path(f"/proc/{run.pid}/status").read_text():
        time.sleep(0.01)  # two signals that wait are one
    time.sleep(0.5)
    assert run.poll() is None
    code, said = signalled(run, signal.SIGINT)
    assert code == 130
    assert said == []


@pytest.mark.process
def test_ctrl_c_ends_a_live_page_in_peace(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rounds.jsonl").write_text(
        '{"event": "begin", "after": 0, "clients": 3, "rounds": 9}\n'
    )
    page = begun(tmp_path, "watch", "run", "--no-open")
    assert page.stdout.readline().startswith("live page: ")
    assert page.stdout.readline() == "Ctrl-C ends it; the run goes on.\n"
    time.sleep(0.2)
    assert signalled(page, signal.SIGINT) == (0, [])


@pytest.mark.process
def test_ignored_signals_stay_ignored(tmp_path):
    start = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + START
    work = begun(tmp_path, "data", "list", start=start)
    code, said = signalled(work, signal.SIGINT)
    assert (code, said) == (0, [])
