"""Large models: block by block and with vectors in files, a server has the same bits in a bounded memory."""

import gc
import shutil
import tracemalloc

import numpy as np
import pytest
from deploy_case import SITES, deployed_server, play, server_of, settings

from fedscaffold.deploy import Server, blocks, parse
from fedscaffold.deploy.aggregation import residual
from fedscaffold.deploy.gate import Update
from fedscaffold.deploy.schema import Packet, Schema, blob, digest_of
from fedscaffold.state.vectors import FileVector

# records of one vector, of two memories and a number, with an own record, local layers, a momentum
ALGORITHMS = (
    "name = 'scaffold'",
    "name = 'amplified-scaffold'\nwindow = 2",
    "name = 'scafcom'",
    "name = 'fedbn'\nlocal = ['w']",
    "name = 'scaffold-m'",
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Every coordinate is a block, and every model is large."""
    monkeypatch.setattr(blocks, "SIZE", 1)
    monkeypatch.setattr(blocks, "LARGE", 0)


def bits(server):
    """All vectors that a server keeps, as bytes."""
    found = {name: np.asarray(value) for name, value in server.state.server._asdict().items()}
    for site, memory in server.state.memory.items():
        found |= {f"{name}.{site}": np.asarray(v) for name, v in memory._asdict().items()}
    return {name: (value.dtype, value.tobytes()) for name, value in found.items()}


@pytest.mark.parametrize("keeper", ["server", "client"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_bits_do_not_depend_on_blocks(algorithm, keeper, tmp_path, monkeypatch):
    """Over lost replies and restarts, which read vectors back from their files."""
    config = settings(deploy=f"state = '{keeper}'\nquorum = 1", algorithm=algorithm)
    config = config._replace(precision="float32")
    whole = deployed_server(config, tmp_path / "whole")
    monkeypatch.setattr(blocks, "SIZE", 1)
    monkeypatch.setattr(blocks, "LARGE", 0)
    parts = deployed_server(config, tmp_path / "parts")
    assert bits(parts) == bits(whole)
    assert parts.residual == pytest.approx(whole.residual, abs=1e-15)
    held = [value for memory in parts.state.memory.values() for value in memory if value.ndim]
    assert all(isinstance(value, FileVector) for value in held)
    assert bool(held) == (keeper == "server" and parts.algorithm.has_memory)


def test_clipping_is_the_same_up_to_the_rounding_of_a_norm(tmp_path, small_blocks, monkeypatch):
    config = settings(deploy="clip = 0.7\nquorum = 1")
    parts = deployed_server(config, tmp_path / "parts")
    monkeypatch.undo()
    whole = deployed_server(config, tmp_path / "whole")
    assert whole.audit.path.read_text().count('"clipped"') > 3
    np.testing.assert_allclose(parts.state.x, whole.state.x, rtol=0, atol=1e-14)
    assert parts.residual < 1e-15


def test_a_resync_reads_reports_from_files(tmp_path, small_blocks):
    config = settings(deploy="state = 'client'\nquorum = 1")
    server = deployed_server(config, tmp_path)
    shutil.rmtree(tmp_path / "sites" / server.run / "ant")
    kinds = [play(server, config, tmp_path).kind for _ in range(4)]
    assert kinds.count("resync") == 1
    assert kinds[-1] == "train"


def test_a_site_is_dropped_after_the_fact(tmp_path, small_blocks, monkeypatch):
    """The sum without it is that of a round in which it was never asked."""
    config = settings(deploy="quorum = 1")
    dropped, other = (
        deployed_server(config, tmp_path / "a"),
        deployed_server(config, tmp_path / "b"),
    )
    for server in (dropped, other):
        requests = server.open(SITES if server is dropped else SITES[:4])
        for site, request in requests.items():
            facts = {name: request.facts[name] for name in ("site", "round", "nonce", "schema")}
            records = server.roster[site].records
            d = np.full(2, 1e200 if site == "elk" else 0.5)
            reply = Packet({**facts, "records": records, "steps": 3}, {"d": blob(d)})
            assert server.receive(site, reply).counted
        outcome = server.close()
        assert outcome.committed
        assert outcome.heard == SITES[:4]
    assert bits(dropped) == bits(other)
    assert residual(dropped.algorithm, dropped.state) < 1e-14


def test_replies_are_on_disk_while_the_round_is_open_and_no_longer(tmp_path, small_blocks):
    config = settings(deploy="quorum = 1")
    server = deployed_server(config, tmp_path)
    (tmp_path / "replies" / ".draft-0-0-0").write_bytes(b"left by a process that was killed")
    server = server_of(config, tmp_path)
    assert list((tmp_path / "replies").iterdir()) == []
    requests = server.open(SITES)
    for site in SITES:
        facts = {name: requests[site].facts[name] for name in ("site", "round", "nonce", "schema")}
        facts |= {"records": server.roster[site].records, "steps": 3}
        server.receive(site, Packet(facts, {"d": blob(np.ones(2))}))
    assert len(list((tmp_path / "replies").iterdir())) == len(SITES)
    server.close()
    gc.collect()
    assert list((tmp_path / "replies").iterdir()) == []


def test_only_memories_that_changed_are_written(tmp_path, small_blocks):
    config = settings(deploy="quorum = 1")
    server = deployed_server(config, tmp_path)
    before = {site: memory.c_i.path.stat().st_ino for site, memory in server.state.memory.items()}
    play(server, config, tmp_path, present=("ant", "bee"))
    after = {site: memory.c_i.path.stat().st_ino for site, memory in server.state.memory.items()}
    assert {site for site in SITES if before[site] != after[site]} == {"ant", "bee"}


def test_requests_share_what_all_sites_are_sent(tmp_path):
    server = deployed_server(settings(deploy="quorum = 1"), tmp_path / "server")
    requests = server.open(SITES)
    assert len({id(requests[site].blobs["x"].data) for site in SITES}) == 1
    server = deployed_server(settings(deploy="state = 'client'\nquorum = 1"), tmp_path / "client")
    requests = server.open(SITES)
    assert len({id(requests[site].blobs["c"].data) for site in SITES}) == 1


DIM, BLOCK = 1 << 17, 1 << 12


def peak_of_a_round(sites, state, folder):
    """The most bytes held in the second of two rounds of so many sites, beyond those held before."""
    names = [f"site{i:02}" for i in range(sites)]
    config = parse(
        f"rounds = 9\n[algorithm]\nname = 'scaffold'\n[local]\nsteps = 1\nlr = 0.1\n"
        f"[deploy]\nsites = {names}\nstate = '{state}'\nquorum = 1"
    )
    schema = Schema(("w",), ((DIM,),), "float32")
    server = Server(config, schema, np.zeros(DIM, np.float32), folder)
    hello = {"kind": "hello", "schema": schema.digest, "settings": config.digest, "records": 5}
    hello["app"] = digest_of(config.app)
    server.welcome({name: Packet({**hello, "site": name}, {}) for name in names})
    most = 0
    for number in range(2):
        tracemalloc.start()
        requests = server.open(names)
        for name in names:
            request = requests[name]
            facts = {key: request.facts[key] for key in ("site", "round", "nonce", "schema")}
            facts |= {"records": 5, "steps": 1}
            if state == "client":
                facts["memory"] = digest_of([name, number]) * 2
            d = np.full(DIM, 0.5, np.float32)
            assert server.receive(name, Packet(facts, {"d": blob(d)})).counted
            del request, d
        del requests
        assert server.close().committed
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("state", ["server", "client"])
def test_memory_does_not_grow_with_the_number_of_sites(state, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "SIZE", BLOCK)
    monkeypatch.setattr(blocks, "LARGE", 0)
    model = 4 * DIM
    few, many = (peak_of_a_round(n, state, tmp_path / str(n)) for n in (2, 12))
    # a new x (1) and c (2), x serialised (1), what one site is sent (2) and sends (2)
    assert few < 8.5 * model
    # a dozen of sites hold a dictionary, a block or two each
    assert many - few < 10 * 3 * 4 * BLOCK


def test_the_control_without_files_memory_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "SIZE", BLOCK)
    few, many = (peak_of_a_round(n, "server", tmp_path / str(n)) for n in (2, 12))
    assert many - few > 10 * 4 * DIM


def test_a_vector_of_a_reply_can_be_read_whole(tmp_path):
    values = np.arange(5, dtype=np.float32)
    update = Update({"d": blocks.spill(values, tmp_path)}, 1.0, {})
    assert np.asarray(update.vectors["d"]).tobytes() == values.tobytes()
    assert blocks.norm(update.vectors["d"]) == blocks.norm(values)
