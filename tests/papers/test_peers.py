"""Other projects' SCAFFOLD: the catalogue, the runner on a project of the test's own, and the page of the recorded verdicts."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedscaffold.checks import InputError
from fedscaffold.conformance.identities import IDENTITIES
from papers.peers.catalogue import PEERS, Peer, find
from papers.peers.command import judge_peers
from papers.peers.judge import (
    VERDICTS,
    _versions,
    judge,
    load_verdicts,
    prepare_environment,
    save_verdicts,
)
from papers.peers.page import BEGIN, END, changes, count, failing, generate, right_with

ROOT = Path(__file__).parents[2]

# a project of one file: SCAFFOLD without momentum, restarts and lost replies, wrong where the server step is not 1
PROJECT = """
import numpy as np
from fedscaffold.conformance import Trace, Unsupported

def adapter(case):
    if case.momentum or case.frozen or case.restart or case.option == 1 or any(case.lost):
        raise Unsupported("plain SGD only")
    if len(set(case.lr)) > 1 or len(set(case.weights)) > 1:
        raise Unsupported("schedules, weights")
    x, c, c_i = case.x0, np.zeros_like(case.x0), np.zeros_like(case.linear)
    states = [(x, c, c_i)]
    for cohort in case.cohorts:
        moves, changes, kept = [], [], c_i.copy()
        for i in cohort:
            y, steps = x, case.local_steps[i]
            for _ in range(steps):
                y = y - case.lr[0] * (case.gradient(i, y) - c_i[i] + c)
            kept[i] = c_i[i] - c + (x - y) / (steps * case.lr[0])
            moves.append(y - x)
            changes.append(kept[i] - c_i[i])
        x = x + np.mean(moves, axis=0)
        c, c_i = c + np.sum(changes, axis=0) / case.num_clients, kept
        states.append((x, c, c_i))
    return Trace(*map(np.array, zip(*states)))
"""


def one_file(**changes):
    peer = Peer("one-file", "One file", "abc", "onefile:adapter", "here", (), repository="some/one")
    return peer._replace(**changes)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_adapter_is_a_function_of_a_case(peer):
    module, name = peer.target.split(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    [function] = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    assert [one.arg for one in function.args.args] == ["case"]
    assert peer.requirements
    assert all("==" in one or "<" in one for one in peer.requirements[:2])
    pinned = peer.repository and len(peer.version) == 40
    assert pinned or any(
        one.endswith(f"=={peer.version}") for one in (*peer.requirements, *peer.alone)
    )


def test_an_unknown_peer_is_refused():
    with pytest.raises(InputError, match="no peer 'fedlib'; there are fedlab"):
        find("fedlib")


@pytest.mark.process
def test_a_project_is_judged_from_its_checkout(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for words in (["init", "-q"], ["commit", "-qm", "above the project", "--allow-empty"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "onefile.py").write_text(PROJECT)
    verdicts = judge(one_file(), Path(sys.executable), tmp_path)
    save_verdicts(verdicts, tmp_path / "verdicts")
    [kept] = load_verdicts(tmp_path / "verdicts").values()
    assert kept == json.loads(json.dumps(verdicts))
    # the mistake shows in all rows with a server step, and in no other
    assert {"moves: server step", "first round: server step", "server step"} <= {*failing(kept)}
    assert {"moves: all", "golden: all", "kept: sampling"}.isdisjoint(failing(kept))
    assert kept["rows"]["optimum: sampling"][0] == "holds"
    assert kept["rows"]["mean: momentum"][0] == "not offered"
    assert any("server step" in sentence for sentence in kept["diagnosis"])
    assert set(kept["versions"]) == {"Python", "numpy", "torch"}
    assert kept["version"] == "unknown, as it is no checkout of git"


@pytest.mark.process
def test_the_version_of_a_checkout_is_its_commit(tmp_path):
    """Not the one that the catalogue has: a newer checkout must not pass for it."""
    checkout = tmp_path / "one"
    checkout.mkdir()
    (checkout / "onefile.py").write_text("def adapter(case): raise ValueError\n")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    peer = one_file(version=head)
    verdicts = judge(peer, Path(sys.executable), tmp_path)
    assert verdicts["version"] == head
    with (checkout / "onefile.py").open("a") as file:
        file.write("# changed\n")
    changed = judge(peer, Path(sys.executable), tmp_path)
    assert changed["version"] == f"{head}-dirty"
    assert changes(changed, verdicts) == f"recorded of another version, {head}"


def test_the_packages_that_a_peer_asks_for_are_recorded():
    peer = one_file(requirements=("numpy<3", "scipy"), alone=("pytest==9",))
    assert set(_versions(Path(sys.executable), peer)) == {
        "Python",
        "numpy",
        "torch",
        "scipy",
        "pytest",
    }


@pytest.mark.process
def test_what_cannot_be_judged_is_said(tmp_path):
    with pytest.raises(InputError, match=r"one-file has no package: git clone .*some/one"):
        judge(one_file(), Path(sys.executable))
    with pytest.raises(InputError, match=r"there is no .*one: git clone"):
        judge(one_file(), Path(sys.executable), tmp_path)
    (tmp_path / "one").mkdir()
    with pytest.raises(InputError, match=r"one-file: the suite could not be run: .*onefile"):
        judge(one_file(), Path(sys.executable), tmp_path)


def test_a_missing_checkout_is_said_before_anything_is_installed(tmp_path):
    with pytest.raises(InputError, match=r"plato: there is no .*plato: git clone"):
        judge_peers(
            ["fedlab", "plato"], checkouts=tmp_path, environments=tmp_path / "made", out=tmp_path
        )
    assert not (tmp_path / "made").exists()


@pytest.mark.soak  # it makes an environment
def test_packages_that_cannot_be_installed_are_named(tmp_path):
    nowhere = one_file(requirements=(str(tmp_path / "nowhere"),))
    with pytest.raises(InputError, match=r"one-file: its packages cannot be installed: .*nowhere"):
        prepare_environment(nowhere, tmp_path / "environments")


@pytest.mark.soak
def test_a_release_is_judged_from_the_index(tmp_path):
    peer = find("fedlab")
    verdicts = judge(peer, prepare_environment(peer, tmp_path))
    assert failing(verdicts) == []


def test_recorded_verdicts_are_of_the_catalogue_and_the_suite():
    recorded, rows = load_verdicts(VERDICTS), {identity.name for identity in IDENTITIES}
    assert recorded
    for name, one in recorded.items():
        assert one["version"] == PEERS[name].version
        assert set(one["rows"]) == rows, f"judge {name} again: the suite has changed"
        assert bool(PEERS[name].findings) == bool(failing(one)), name


def test_the_page_is_that_of_the_recorded_verdicts():
    page = (ROOT / "docs" / "judged.md").read_text()
    recorded = load_verdicts(VERDICTS)
    assert (
        page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == generate(recorded).strip()
    )
    firsts = page[page.index(BEGIN) :].splitlines()[3:]
    assert "right in all it offers" in firsts[0]
    for name, one in recorded.items():
        assert f"`python -m papers.peers {name}" in page
        assert count(one) in page


def test_what_is_right_is_said_beside_what_is_wrong():
    recorded = load_verdicts(VERDICTS)
    for one in recorded.values():
        wrong = {name.partition(": ")[2] for name in failing(one)}
        assert not wrong & {*right_with(one)}
    # all clients, plain SGD: where most experiments are
    assert "all" in right_with(recorded["nvflare"])
    assert right_with(recorded["pfl"]) == []


def test_rows_that_end_with_an_error_are_named_apart_from_those_that_fail():
    recorded = {name: load_verdicts(VERDICTS)[name] for name in ("fluke", "fl-bench")}
    page = generate(recorded)
    raising = [name for name, row in recorded["fluke"]["rows"].items() if row[0] == "error"]
    assert raising
    assert f"Rows that end with an error: {', '.join(raising)}." in page
    assert page.count("end with an error") == 1
    rows = page.splitlines()[2:4]
    assert [row.endswith("; ends with an error (restart) |") for row in rows] == [True, False]


def test_a_verdict_is_compared_with_the_recorded_one():
    one = load_verdicts(VERDICTS)["fluke"]
    assert changes(one | {"date": "later", "seconds": 1}, one) == f"as recorded on {one['date']}"
    worse = one | {"rows": one["rows"] | {"start": ["fails", 1.0, 0.0, ""]}}
    assert changes(worse, one) == f"recorded on {one['date']} otherwise: start (holds)"
    few = one | {"rows": {"start": one["rows"]["start"]}}
    assert "conserved (no longer a row)" in changes(few, one)
    assert "another version, 0.8.1" in changes(one | {"version": "9"}, one)
    assert changes(one, None) == "nothing is recorded of it"
