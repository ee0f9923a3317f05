"""The deployed filter is the simulator's, and whoever it refuses changes nothing but its own standing."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.deploy import outliers, parse
from fedscaffold.deploy.schema import Schema
from fedscaffold.deploy.server import Server
from fedscaffold.deploy.server_state import peek_state
from tests.faults.crowd import CENTRE, CURVATURE, LIARS, SITES, START, Crowd

HESSIANS = np.stack([np.diag(row) for row in CURVATURE])
TWIN = fs.problems.quadratic(hessians=HESSIANS, linear=CURVATURE * CENTRE, x0=START)
FLIP = fs.attacks.sign_flip(LIARS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filter", "attack"),
    [
        ("krum:0.2", fs.attacks.alie(LIARS)),
        ("geometric_median:3", fs.attacks.inner_product(LIARS)),
        ("norm_bound:3", FLIP),
    ],
)
def test_simulated_and_deployed_refuse_the_same_and_end_at_the_same_model(filter, attack, tmp_path):
    crowd, refused = Crowd(filter, folder=tmp_path), np.zeros(10, int)
    for _ in range(8):
        for site in crowd.round(attack).refused:
            refused[SITES.index(site)] += 1
    given = {"rounds": 8, "local_steps": 3, "lr": 0.3, "precision": "float64", "metrics": ()}
    run = fs.simulate(fs.scaffold(), TWIN, robust=filter, attack=attack, **given)
    assert run.refused.tolist() == refused.tolist()
    assert refused.any()
    np.testing.assert_allclose(crowd.server.state.x, run.vector, rtol=1e-12)
    np.testing.assert_allclose(crowd.server.state.server.c, run.server.c, atol=1e-13)


def test_where_nobody_is_refused_the_bits_are_those_without_a_filter(tmp_path):
    on, off = (
        Crowd(robust, folder=tmp_path / name).rounds(4)
        for name, robust in (("on", "norm_bound:9"), ("off", None))
    )
    for a, b in zip(on.server.state.server, off.server.state.server, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_refused_site_is_told_and_keeps_its_control_variate(tmp_path):
    crowd = Crowd("norm_bound:3", folder=tmp_path).rounds(2)
    before = {site: memory.c_i.copy() for site, memory in crowd.server.state.memory.items()}
    norms = crowd.server.roster[SITES[3]].norms
    outcome = crowd.round(fs.attacks.scaling(LIARS, factor=100))
    bad = {SITES[i] for i in LIARS}
    assert outcome.committed
    assert set(outcome.refused) == bad
    for site, memory in crowd.server.state.memory.items():
        assert np.array_equal(memory.c_i, before[site]) == (site in bad)
    assert crowd.sound
    assert "times as long as its bound (norm_bound:3)" in crowd.server.roster[SITES[3]].told
    # what did not count is not history, and history outlives the server
    assert crowd.reborn().roster[SITES[3]].norms == norms
    assert crowd.round().refused == {}
    assert peek_state(tmp_path / "state").state.roster[SITES[3]].norms != norms


def test_the_quorum_is_of_replies(tmp_path):
    """All ten must reply, Krum refuses two of them in every round, and the round counts."""
    outcome = Crowd("krum:0.2", folder=tmp_path).round()
    assert outcome.committed
    assert len(outcome.refused) == 2


def test_pieces_of_vectors_are_the_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr(outliers, "PIECE", 2)
    pieces = Crowd("krum:0.2", folder=tmp_path / "a").rounds(2, FLIP).server.state
    monkeypatch.setattr(outliers, "PIECE", 1 << 18)
    whole = Crowd("krum:0.2", folder=tmp_path / "b").rounds(2, FLIP).server.state
    assert pieces.x.tobytes() == whole.x.tobytes()
    for site in SITES:
        np.testing.assert_allclose(pieces.roster[site].norms, whole.roster[site].norms, rtol=1e-15)


def test_what_does_not_go_together_is_refused_by_name(tmp_path):
    with pytest.raises(fs.InputError, match=r"robust needs deploy.state = \"server\""):
        parse("robust = 'krum:0.2'\n[deploy]\nstate = 'client'")
    with pytest.raises(fs.InputError, match=r"robust does not go with deploy\.secure"):
        parse(
            "robust = 'krum:0.2'\n[deploy]\nstate = 'client'\nsecure = true\n"
            "sites = ['a', 'b', 'c']"
        )
    config = parse("robust = 'krum:0.2'\n[deploy]\nsites = ['a', 'b']")
    assert config.robust == "krum:0.2"
    assert parse("robust = 'none'").robust is None
    schema = Schema(("w",), ((2,),), "float32", buffers=(("mean", (2,), "float32"),))
    with pytest.raises(fs.InputError, match=r'write local.buffers = "local"'):
        Server(config, schema, np.zeros(2), tmp_path, {"mean": np.zeros(2)})


def test_a_site_with_more_weight_than_the_dishonest_may_have_is_shown(tmp_path):
    crowd = Crowd("krum:0.2", folder=tmp_path)
    assert not any("trusts" in warning for warning in crowd.server.warnings)
    roster = crowd.server.roster
    roster[SITES[0]] = roster[SITES[0]]._replace(mass=3.0)
    (warning,) = (one for one in crowd.server.warnings if "trusts" in one)
    assert warning.startswith("site0 has 25% of all weight, and robust = 'krum:0.2'")
