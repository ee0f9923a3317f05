"""A server that lies to the sites of a secure sum: each lie is refused by the site itself, and nothing is revealed."""

import json

import numpy as np
import pytest
from deploy_case import SITES
from secure_case import Case, settings

from fedscaffold.deploy.packets import Packet
from fedscaffold.deploy.schema import blob
from fedscaffold.deploy.secure_site import names_blob
from fedscaffold.deploy.settings import parse


def refused(reply, said):
    """That a reply is a refusal with no array in it."""
    assert reply.facts["kind"] == "refusal", reply.facts
    assert said in reply.facts["reason"]
    assert reply.blobs == {}


def lie(request, facts=None, **blobs):
    return Packet(request.facts | (facts or {}), request.blobs | blobs)


def rows(request, name):
    held = request.blobs[name]
    return np.frombuffer(held.data, np.uint8).reshape(held.shape).copy()


def names(request):
    return json.loads(request.blobs["sites"].data)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def test_it_asks_for_both_kinds_of_shares(case):
    """First with elk among the survivors, then as if elk had dropped out: seed and key of elk would bare its vector."""
    requests = case.play_until("survivors")
    case.exchange(requests)
    reveal = case.server.advance()
    without = names_blob([site for site in SITES if site != "elk"])
    for site in SITES[:4]:
        refused(case.ask(site, lie(requests[site], sites=without)), "another list of survivors")
    first = {site: case.ask(site, request) for site, request in reveal.items()}
    for site in SITES[:4]:  # nor after it has revealed
        refused(case.ask(site, lie(requests[site], sites=without)), "another list of survivors")
        assert case.ask(site, reveal[site]) == first[site]


def test_it_sends_different_lists_of_survivors(case):
    """Each list gets fewer signatures than the threshold, and a site reveals only for the list that it signed."""
    requests = case.play_until("survivors")
    without = names_blob(SITES[:4])
    signed = {site: case.ask(site, requests[site]) for site in ("ant", "bee")}
    signed |= {site: case.ask(site, lie(requests[site], sites=without)) for site in ("cow", "dog")}
    facts = requests["ant"].facts | {"exchange": "reveal"}
    for chosen in (("ant", "bee", "cow", "dog"), ("ant", "bee"), ("ant",) * 1):
        data = b"".join(signed[site].blobs["signature"].data for site in chosen)
        blobs = {
            "sites": names_blob(chosen),
            "signatures": blob(np.frombuffer(data, np.uint8).reshape(-1, 96)),
        }
        for site in SITES[:4]:
            reply = case.ask(site, Packet({**facts, "site": site}, blobs))
            refused(
                reply,
                "signatures where 3"
                if len(chosen) < 3 and site in ("ant", "bee")
                else "has not signed",
            )


def test_it_asks_to_mask_another_vector_with_the_same_masks(case):
    """The difference of two would be that of the site's replies to two models."""
    requests = case.play_until("masked")
    first = case.ask("ant", requests["ant"])
    assert set(first.blobs) == {"masked"}
    other = lie(requests["ant"], x=blob(np.array([9.0, 9.0])))
    refused(case.ask("ant", other), "masked already")


def test_it_replays_the_keys_of_an_old_round(case):
    old = case.play_until("shares")
    case.server.close()
    new = case.play_until("shares")
    mixed = rows(new["ant"], "keys")
    mixed[2] = rows(old["ant"], "keys")[2]
    refused(case.ask("ant", lie(new["ant"], keys=blob(mixed))), "keys of 'cow' are not signed")
    # the requests of the old round, whole: its secrets are gone
    refused(case.ask("ant", old["ant"]), "no such attempt is under way here")
    refused(case.ask("ant", lie(new["ant"], {"round": 7})), "no such attempt")
    refused(case.ask("ant", lie(new["ant"], {"kind": "resync"})), "no such attempt")


def test_it_replaces_a_key_or_swaps_two(case):
    requests = case.play_until("shares")
    keys = rows(requests["ant"], "keys")
    forged = keys.copy()
    forged[1, :32] = 7
    refused(
        case.ask("ant", lie(requests["ant"], keys=blob(forged))), "keys of 'bee' are not signed"
    )
    refused(case.ask("ant", lie(requests["ant"], keys=blob(keys[[0, 2, 1, 3, 4]]))), "'bee'")
    mine = keys.copy()
    mine[0] = keys[1]
    refused(case.ask("ant", lie(requests["ant"], keys=blob(mine))), "'ant'")


def test_it_invents_a_site(case):
    requests = case.play_until("shares")
    more = {
        "sites": names_blob([*SITES, "fox"]),
        "keys": blob(np.vstack([rows(requests["ant"], "keys"), np.zeros((1, 192), np.uint8)])),
    }
    refused(
        case.ask("ant", lie(requests["ant"], {"threshold": 4}, **more)), "'fox' is not on the list"
    )


def test_it_asks_for_a_sum_of_one(case):
    requests = case.play_until("shares")
    alone = {"sites": names_blob(["ant"]), "keys": blob(rows(requests["ant"], "keys")[:1])}
    said = "a sum of 1 sites; this one takes part from 3 on"
    refused(case.ask("ant", lie(requests["ant"], {"threshold": 1}, **alone)), said)
    pair = {"sites": names_blob(SITES[:2]), "keys": blob(rows(requests["ant"], "keys")[:2])}
    refused(case.ask("ant", lie(requests["ant"], {"threshold": 2}, **pair)), "a sum of 2 sites")
    for low in (2, 1, 0, -3, 9):
        refused(case.ask("ant", lie(requests["ant"], {"threshold": low})), "more than half")


def test_it_names_fewer_parties_or_survivors(case):
    requests = case.play_until("masked")
    few = {"sites": names_blob(SITES[:2]), "shares": blob(rows(requests["ant"], "shares")[:2])}
    refused(case.ask("ant", lie(requests["ant"], **few)), "shares of 2 sites where 3 are needed")
    case.exchange(requests)
    survivors = case.server.advance()
    refused(
        case.ask("ant", lie(survivors["ant"], sites=names_blob(["ant"]))), "1 survivors where 3"
    )


def test_it_skips_exchanges_or_asks_in_the_clear(case):
    requests = case.play_until("masked")
    for name in ("survivors", "reveal"):
        reply = case.ask(
            "ant",
            lie(requests["ant"], {"exchange": name}, signatures=blob(np.zeros((5, 96), np.uint8))),
        )
        refused(reply, "no vector" if name == "survivors" else "no list")
    facts = {k: v for k, v in requests["ant"].facts.items() if k != "exchange"}
    refused(case.ask("ant", Packet(facts, requests["ant"].blobs)), "exchange must be a short text")
    refused(case.ask("ant", lie(requests["ant"], {"exchange": "plain"})), "is no exchange")
    for kind in ("train", "evaluate", "resync"):
        refused(case.ask("ant", Packet({**facts, "kind": kind}, requests["ant"].blobs)), "exchange")


@pytest.mark.parametrize("attempt", ["", "0" * 31, "g" * 32, 7, "../" * 8])
def test_it_names_no_proper_attempt(case, attempt):
    requests = case.server.open(SITES)
    refused(case.ask("ant", lie(requests["ant"], {"attempt": attempt})), "attempt must be")


def test_it_sends_settings_without_secure_sums_or_a_lower_threshold(case):
    """The rules are the site's own: whatever app and settings the server sends."""
    requests = case.server.open(SITES)
    one = case.config
    clear = one._replace(deploy=one.deploy._replace(secure=False))
    asked = lie(requests["ant"], {"settings": clear.digest})
    refused(case.ask("ant", asked, clear), "ant takes part in secure sums only")
    hello = case.ask("ant", Packet({"kind": "hello"}, {}), clear)
    refused(hello, "ant takes part in secure sums only")
    coarse = settings("limit = 1e12")
    refused(case.ask("ant", requests["ant"], coarse), "the settings here differ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"[1]",
        b'["b", "a"]',
        b'["a", "a"]',
        b'["../a"]',
        b"[" * 9999,
        b"\xff",
    ],
)
def test_lists_of_sites_that_are_none(case, data):
    requests = case.play_until("shares")
    bad = blob(np.frombuffer(data, np.uint8))
    reply = case.ask("ant", lie(requests["ant"], sites=bad))
    assert reply.facts["kind"] == "refusal"
    assert "failed" not in reply.facts["reason"]  # no exception: each is understood


def test_secrets_stay_in_files_of_their_owner_and_go_with_the_next_attempt(case):
    case.play()
    place = case.folder / "sites" / case.server.run / "ant" / "secure"
    held = [json.loads(text) for text in _facts(place)]
    assert held
    said = repr(case.seen)
    for record in held:
        for name in ("mask", "cipher", "seed"):
            assert record[name] not in said
            assert repr(bytes.fromhex(record[name]))[2:-1] not in said
    for path in place.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    case.play()
    assert not {r["seed"] for r in held} & {json.loads(text)["seed"] for text in _facts(place)}


def _facts(place):
    from fedscaffold.state.commit import load

    return [json.dumps(load(path).facts) for path in place.glob("state-*")]


def test_a_list_that_lacks_a_site_keeps_its_owner_out_of_sums_with_it(tmp_path):
    """The others go on; the reason that the site gives names whom it does not know."""
    case = Case(tmp_path)
    path = tmp_path / "sites" / "secure" / "ant" / "identities.toml"
    path.write_text("\n".join(s for s in path.read_text().splitlines() if not s.startswith("elk")))
    outcome = case.play()
    assert outcome.heard == SITES[1:]
    assert outcome.refused["ant"] == "secure: 'elk' is not on the list of identities here"


def test_the_minimum_is_the_sites_own(tmp_path):
    case = Case(tmp_path)
    path = tmp_path / "sites" / "secure" / "ant" / "secure.toml"
    path.write_text(path.read_text().replace("minimum = 3", "minimum = 5"))
    outcome = case.play()
    assert "this one takes part from 5 on" in outcome.refused["ant"]
    stricter = Case(tmp_path / "other", settings("threshold = 5"))
    assert stricter.play().heard == SITES
    assert not stricter.play(answers=lambda step, site: site != "cow").committed


def test_the_settings_are_part_of_what_all_must_share():
    text = "[deploy]\nsites = ['a', 'b', 'c']\nstate = 'client'\n"
    digests = {
        parse(text + more).digest
        for more in ("", "secure = true", "secure = true\nlimit = 9.0", "secure = true\nclip = 2.0")
    }
    assert len(digests) == 4
