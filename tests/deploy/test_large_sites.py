"""A site with a large model that keeps its c_i: the same bits block by block, in a bounded memory."""

import tracemalloc

import numpy as np
import pytest

from fedscaffold.deploy import ArraysLearner, InProcess, Server, blocks, drive, parse
from fedscaffold.deploy.client import answer, greeting

SIZE = 1 << 18
MODEL = 4 * SIZE  # bytes
SETTINGS = """
rounds = 2
[local]
steps = 1
lr = 0.1
[deploy]
sites = ["ant"]
state = "client"
"""


def learner():
    start = np.random.default_rng(0).random(SIZE, np.float32)
    return ArraysLearner(
        lambda params, batch: {"w": params["w"] - batch[0].mean()},
        {"w": start},
        lambda site: (np.ones((1, 1), np.float32),),
    )


def peak_of_a_reply(folder):
    """The most bytes that a site holds while it answers, beside its request and its model."""
    settings, one = parse(SETTINGS), learner()
    server = Server(settings, one.schema, one.start, folder)
    server.hello("ant", greeting(one, settings, "ant"))
    request = server.open(["ant"])["ant"]
    tracemalloc.start()
    reply = answer(request, one, settings, "ant", folder / "sites")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reply.facts["kind"] == "train"
    return peak / MODEL


def test_what_a_site_remembers_is_made_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "SIZE", SIZE)
    whole = peak_of_a_reply(tmp_path / "whole")
    monkeypatch.setattr(blocks, "SIZE", 1 << 12)
    # c_i and its shift, the walk from x to y, the direction and the new c_i, which is being written
    assert peak_of_a_reply(tmp_path / "parts") < 8.5 < 14 < whole


@pytest.mark.parametrize("algorithm", ["scaffold", "scaffold-m", "scafcom"])
def test_the_bits_of_a_site_do_not_depend_on_blocks(algorithm, tmp_path, monkeypatch):
    settings, one, found = parse(SETTINGS + f"[algorithm]\nname = '{algorithm}'"), learner(), []
    for place in ("whole", "parts"):
        server = Server(settings, one.schema, one.start, tmp_path / place, token="same")
        drive(server, InProcess(one, settings, tmp_path / place), 2)
        found.append((server.state.x.tobytes(), server.roster["ant"].digest))
        monkeypatch.setattr(blocks, "SIZE", 1 << 12)
    assert found[0] == found[1]
    assert found[0][1] != ""
