"""Kits with secure sums: every site holds the list of all identities, which only a change of the kit changes."""

import pytest

from fedscaffold.deploy import apps
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.secure_rules import digest_identities, open_identity, read_identities
from fedscaffold.secure.signatures import sign, verify

pytest.importorskip("flwr")
from fedscaffold.deploy import provisioning
from fedscaffold.deploy.local_cluster import Federation

APP = """
import numpy as np
from fedscaffold.deploy import ArraysLearner

def learner(settings):
    return ArraysLearner(lambda p, b: p, {"w": np.ones(2)}, lambda site: (np.ones((3, 2)),), precision="float64")
"""
SITES = ("ant", "bee", "cow")


def toml(sites=SITES, secure="true"):
    return f"precision = 'float64'\n[deploy]\nsites = {list(sites)}\nstate = 'client'\nsecure = {secure}\n"


@pytest.fixture
def kit(tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    (app / "app.py").write_text(APP)
    (app / "federation.toml").write_text(toml())
    (tmp_path / "sites.toml").write_text("server = 'localhost'\nport = 8123\n")
    provisioning.make_kit(tmp_path / "sites.toml", tmp_path / "kits")
    return tmp_path / "sites.toml", tmp_path / "kits", app


def listed(out, site):
    return read_identities(out / site / "state" / "secure" / site / "identities.toml")


def test_every_site_knows_all_and_signs_by_its_own_key(kit):
    _, out, app = kit
    settings = apps.read_settings(app)
    server = digest_identities(read_identities(out / "server" / "run" / "identities.toml"))
    for site in SITES:
        own = open_identity(settings, site, out / site / "state")
        assert set(own.rules.identities) == set(SITES)
        assert own.rules.minimum == 2  # of three
        assert digest_identities(own.rules.identities) == server
        for other in SITES:
            assert verify(listed(out, other)[site], b"word", sign(own.key, b"word"))
    for path in out.rglob("secure/*/*"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_rotated_added_or_revoked_key_changes_every_list(kit):
    path, out, app = kit
    before = listed(out, "ant")
    changed = provisioning.rotate(path, out, "bee")
    assert {folder.name for folder in changed} == {"server", *SITES}
    settings = apps.read_settings(app)
    own = open_identity(settings, "bee", out / "bee" / "state")
    assert verify(listed(out, "ant")["bee"], b"word", sign(own.key, b"word"))
    assert not verify(before["bee"], b"word", sign(own.key, b"word"))
    (app / "federation.toml").write_text(toml((*SITES, "dog")))
    changed = provisioning.add_site(path, out, "dog")
    assert {folder.name for folder in changed} == {"server", *SITES, "dog"}
    assert set(listed(out, "ant")) == {*SITES, "dog"}
    open_identity(apps.read_settings(app), "ant", out / "ant" / "state")  # agrees to the new app
    (app / "federation.toml").write_text(toml(("ant", "cow", "dog")))
    provisioning.revoke(path, out, "bee")
    assert set(listed(out, "ant")) == {"ant", "cow", "dog"}


def test_what_the_operator_of_a_site_wrote_is_kept(kit):
    path, out, _ = kit
    rules = out / "ant" / "state" / "secure" / "ant" / "secure.toml"
    rules.write_text(rules.read_text().replace("minimum = 2", "minimum = 3"))
    provisioning.rotate(path, out, "bee")
    assert "minimum = 3" in rules.read_text()


def test_check_tells_of_the_list_and_of_what_is_wrong_with_it(kit):
    _, out, _ = kit
    place = out / "ant" / "state" / "secure" / "ant"

    def found():
        return next(f for f in provisioning.check(out / "ant") if f.what == "secure sums")

    good = found()
    assert good.good
    assert digest_identities(listed(out, "bee")) in good.said
    lines = (place / "identities.toml").read_text().splitlines()
    (place / "identities.toml").write_text("\n".join(s for s in lines if not s.startswith("cow")))
    assert found() == ("secure sums", False, "identities.toml lacks cow")
    mine, theirs = (next(s for s in lines if s.startswith(site)) for site in ("ant", "bee"))
    swapped = [
        f"ant{theirs[3:]}" if s == mine else f"bee{mine[3:]}" if s == theirs else s for s in lines
    ]
    (place / "identities.toml").write_text("\n".join(swapped))
    assert "does not have the public key" in found().said
    double = [f"bee{mine[3:]}" if s == theirs else s for s in lines]
    (place / "identities.toml").write_text("\n".join(double))
    assert "the same key for two sites" in found().said
    (place / "identities.toml").write_text("[sites]\nant = 'ssh-rsa AAAA'")
    assert "public key on P-384" in found().said
    (place / "identities.toml").unlink()
    assert "not found" in found().said


def test_a_site_with_rules_refuses_to_work_in_the_clear_or_for_another_app(kit):
    _, out, app = kit
    place = out / "ant" / "state"
    settings = apps.read_settings(app)
    open_identity(settings, "ant", place)
    other = settings._replace(app={**settings.app, "app.py": "0" * 32})
    with pytest.raises(Refused, match="another app is asked of ant"):
        open_identity(other, "ant", place)
    clear = settings._replace(deploy=settings.deploy._replace(secure=False))
    with pytest.raises(Refused, match="ant takes part in secure sums only"):
        open_identity(clear, "ant", place)
    with pytest.raises(Refused, match="has no rules of secure sums"):
        open_identity(settings, "fox", place)


def test_a_federation_on_one_machine_has_them_too(kit, tmp_path):
    _, _, app = kit
    with Federation(app, tmp_path / "home") as federation:
        settings = federation.settings
    for site in SITES:
        own = open_identity(settings, site, tmp_path / "home" / "sites" / site)
        assert set(own.rules.identities) == set(SITES)
    assert set(read_identities(tmp_path / "home" / "server" / "identities.toml")) == set(SITES)


def test_a_kit_without_secure_sums_has_no_such_files(tmp_path, kit):
    path, _, app = kit
    (app / "federation.toml").write_text(toml(secure="false"))
    folders = provisioning.make_kit(path, tmp_path / "other")
    assert not [file for folder in folders for file in folder.rglob("secure*") if file.is_dir()]
