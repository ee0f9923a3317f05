"""The live page under connections that mean it ill: the run that serves it keeps its files and goes on."""

import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from fedscaffold.runs import live_server as serve
from fedscaffold.runs.live import Simulated
from fedscaffold.runs.live_server import MAX_CONNECTIONS, Server

BEGIN = {"event": "begin", "after": 0, "clients": 3, "rounds": 9, "run": "a"}


@pytest.fixture
def server(tmp_path):
    (tmp_path / "rounds.jsonl").write_text(
        json.dumps(BEGIN) + '\n{"round": 1, "loss": 0.5, "heard": [0, 2]}\n'
    )
    with Server(tmp_path, Simulated(tmp_path)) as server:
        yield server


def connect(server):
    return socket.create_connection(("127.0.0.1", server.http.server_port), timeout=60)


def asked(server, place="state"):
    where = urlsplit(server.address)
    talk = http.client.HTTPConnection(where.netloc, timeout=60)
    talk.request("GET", where.path + place)
    answer = talk.getresponse()
    body = answer.read()
    talk.close()
    return answer.status, body


@pytest.mark.slow
def test_idle_connections_are_bounded_and_the_page_still_answers(server):
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(connect(server))
        status, body = asked(server)
        assert status == 200
        assert json.loads(body)["groups"][0]["runs"][0]["columns"]["loss"]["values"] == [0.5]
        assert len(server.http.open) <= MAX_CONNECTIONS
        while sum(t.name.startswith("Thread") for t in threading.enumerate()) > 2 * MAX_CONNECTIONS:
            time.sleep(0.01)  # those of the connections that were closed end by themselves


@pytest.mark.slow
def test_slow_large_and_broken_requests_do_not_keep_others_out(server):
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 5):
            slow = stack.enter_context(connect(server))
            slow.sendall(b"GET /")
        large = stack.enter_context(connect(server))
        large.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 70000 + b"\r\n\r\n")
        assert large.recv(100).split()[1] in (b"431", b"400")
        for bad in (
            b"\x00" * 100 + b"\r\n\r\n",
            b"GET http://[ HTTP/1.1\r\n\r\n",
            b"POST //[ HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
        ):
            odd = stack.enter_context(connect(server))
            odd.sendall(bad)
            assert odd.recv(100) != b"HTTP/1.1 200"
        gone = connect(server)  # and leaves before the answer
        gone.sendall(
            f"GET {urlsplit(server.address).path} HTTP/1.1\r\nHost: {urlsplit(server.address).netloc}\r\n\r\n".encode()
        )
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        gone.close()
        assert asked(server)[0] == 200
        assert asked(server, "state?held=" + "9" * 5000)[0] == 200


RUN = """
import resource, sys, tempfile, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
from fedscaffold.runs.live import Simulated
from fedscaffold.runs.live_server import Server
folder = Path(tempfile.mkdtemp())
with Server(folder, Simulated(folder)) as server:
    print(server.http.server_port, flush=True)
    sys.stdin.readline()
    for k in range(200):  # what a run does: it opens and writes files
        (folder / f"state-{k % 5}").write_text(str(k))
        time.sleep(0.005)
print("done")
"""


@pytest.mark.process
def test_a_run_with_few_files_outlives_more_idle_connections_than_it_may_open_files():
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 400, "the test itself needs files"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    port = int(run.stdout.readline())
    with ExitStack() as stack:
        for _ in range(120):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        out, err = run.communicate("\n", timeout=60)
    assert (run.returncode, out) == (0, "done\n"), err
    assert err == ""


def test_where_there_are_no_files_left_the_server_waits_instead_of_spinning(server, monkeypatch):
    """What accept() raises where the process has no files left, for a while; then the page answers again."""
    tries = []

    def refuse(self):
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise OSError(24, "Too many open files")
        return real(self)

    real = serve.ThreadingHTTPServer.get_request
    monkeypatch.setattr(serve.ThreadingHTTPServer, "get_request", refuse)
    assert asked(server)[0] == 200
    assert tries[3] - tries[0] >= 2.5 * serve.PAUSE
