"""The suite judges: right implementations pass every row, every known mistake is caught, nothing stops it.

`python tests/test_conformance.py` writes the generated tables of docs/conformance.md.
"""

import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from mutants import MUTANTS, OUR_MUTANTS, RIGHT_IN_ANOTHER_WAY, right

from fedscaffold.algorithms import fedavg
from fedscaffold.checks import InputError
from fedscaffold.conformance import (
    IDENTITIES,
    Trace,
    Unsupported,
    Verdict,
    conform,
    load_target,
    ours,
    run,
    table,
)
from fedscaffold.conformance.federations import CONDITIONS
from fedscaffold.conformance.oracles import optimum

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
EVERY_MUTANT = MUTANTS | OUR_MUTANTS


@cache
def verdicts(name: str) -> tuple[Verdict, ...]:
    return tuple(conform(EVERY_MUTANT[name]))


def failing(judged: list[Verdict] | tuple[Verdict, ...]) -> list[str]:
    return [verdict.name for verdict in judged if verdict.outcome == "fails"]


@pytest.mark.parametrize("adapter", [ours, right, *RIGHT_IN_ANOTHER_WAY.values()])
def test_right_implementations_pass_every_row(adapter):
    judged = conform(adapter)
    assert {verdict.outcome for verdict in judged} == {"holds"}, table(judged)


@pytest.mark.parametrize("name", EVERY_MUTANT)
def test_every_mistake_is_caught(name):
    assert failing(verdicts(name))


def test_no_verdict_hangs_on_the_last_digits():
    judged = [(name, verdict) for name in EVERY_MUTANT for verdict in verdicts(name)]
    measured = [(name, verdict) for name, verdict in judged if verdict.violation is not None and verdict.tolerance]
    assert not [one for one in measured if 0.99 < one[1].violation / one[1].tolerance < 1.01]


def test_every_row_catches_a_mistake():
    caught = {row for name in EVERY_MUTANT for row in failing(verdicts(name))}
    assert not {identity.name for identity in IDENTITIES} - caught


def test_rows_are_named_and_stated_once():
    assert len({identity.name for identity in IDENTITIES}) == len({i.statement for i in IDENTITIES}) == len(IDENTITIES)


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_optimum_is_no_gift(name):
    """FedAvg ends elsewhere in every federation in which SCAFFOLD must end at the optimum."""
    case = CONDITIONS[name].case
    assert np.abs(run(fedavg(case.server_lr), case).x[-1] - optimum(case)).max() > 0.05


def test_fedavg_fails_where_it_differs_and_only_there():
    judged = conform(lambda case: run(fedavg(case.server_lr), case))
    # The rest FedAvg shares with SCAFFOLD, or has for want of a memory.
    telling = {"optimum", "gradients seen", "gradient at x", "SAGA", "centred form", "golden"}
    families = {name.partition(":")[0] for name in failing(judged)}
    assert families == telling
    assert {name for name in failing(judged) if name.startswith("optimum")} == {
        f"optimum: {name}" for name in CONDITIONS
    }


def test_what_is_not_offered_neither_holds_nor_fails():
    def plain_sgd_only(case):
        if case.momentum:
            raise Unsupported("momentum")
        return ours(case)

    judged = {verdict.name: verdict for verdict in conform(plain_sgd_only)}
    missing = {name for name, verdict in judged.items() if verdict.outcome == "not offered"}
    assert missing == {name for name in judged if "momentum" in name or "together" in name}
    assert judged["mean: momentum"].note == "momentum"
    assert judged["mean: all"].outcome == "holds"
    assert table(list(judged.values())).endswith(
        f"{len(judged) - len(missing)} hold, 0 fail, {len(missing)} not offered"
    )


@pytest.mark.parametrize(
    ("adapter", "note"),
    [
        (lambda case: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda case: sys.exit("two\nlines"), "SystemExit: two lines"),
        (lambda case: {}, "the adapter returned a dict, not a Trace"),
        (lambda case: Trace(*(states[1:] for states in ours(case))), "x has shape (75, 3), not (76, 3)"),
        (lambda case: Trace(*(states.astype("f4") for states in ours(case))), "x is float32"),
        (
            lambda case: ours(case)._replace(c=np.full((case.rounds + 1, 3), np.nan)),
            "c is not finite after round 0",
        ),
        (lambda case: ours(case._replace(lr=(1e4,) * 4)), "x is not finite after round"),
    ],
)
def test_nothing_stops_the_suite(adapter, note):
    verdict = conform(adapter, [IDENTITIES[0]])[0]
    assert (verdict.outcome, verdict.violation) == ("fails", None)
    assert note in verdict.note
    assert "\n" not in table([verdict]).partition("\n")[0]


def test_numbers_too_large_to_compare_are_a_failure():
    verdict = conform(lambda case: ours(case)._replace(c_i=np.full((case.rounds + 1, 4, 3), 1e308)), [IDENTITIES[0]])[0]
    assert verdict.outcome == "fails"


def test_an_adapter_may_write_into_its_case():
    def greedy(case):
        trace = ours(case)
        for array in case[:3]:
            array[...] = np.nan
        return trace

    assert failing(conform(greedy)) == []


def test_gradients_need_not_be_asked_for():
    """A compiled program evaluates its own; the suite then walks the same steps."""
    assert failing(conform(lambda case: ours(case._replace(calls=None)))) == []


def test_targets_are_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text("from fedscaffold.conformance import ours as mine\nnumber = 3\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "loud.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_target("somebodys:mine") is ours
    for target, message in {
        "somebodys": "a target is written module:name, got 'somebodys'",
        "somebodys:min": "unknown adapter in somebodys 'min' (did you mean 'mine'?); known: mine",
        "somebodys:number": "'somebodys:number' must be a function from Case to Trace or an Algorithm, got a int",
        "nobodys:mine": "no module 'nobodys' in this folder or among those installed",
        "broken:mine": "module 'broken' cannot be imported: No module named 'nothing_of_that_name'",
        "loud:mine": "module 'loud' cannot be imported: RuntimeError: two lines",
    }.items():
        with pytest.raises(InputError) as error:
            load_target(target)
        assert str(error.value) == message


def test_the_room_needs_numpy_only():
    code = "import sys, fedscaffold.conformance; print(sorted({'jax', 'torch', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def families(names: list[str]) -> str:
    """Row names in short: the conditions of a family together."""
    everything = [identity.name for identity in IDENTITIES]
    parts = []
    for family, rows in groupby(names, key=lambda name: name.partition(": ")[0]):
        members = [name for name in everything if name.partition(": ")[0] == family]
        caught = list(rows)
        spared = [name.partition(": ")[2] or "plain" for name in members if name not in caught]
        conditions = ", ".join(name.partition(": ")[2] or "plain" for name in caught)
        if len(members) == 1:
            parts.append(f"**{family}**")
        elif not spared:
            parts.append(f"**{family}** (everywhere)")
        elif len(spared) < min(3, len(caught)):
            parts.append(f"**{family}** (all but {', '.join(spared)})")
        else:
            parts.append(f"**{family}** ({conditions})")
    return ", ".join(parts)


def generated() -> dict[str, str]:
    """The tables of the page, by the name of their markers."""
    rows = [f"| {identity.name} | {identity.statement} |" for identity in IDENTITIES]
    caught = [f"| {name} | {families(failing(verdicts(name)))} |" for name in MUTANTS]
    return {
        "identities": "\n".join(["| identity | what must be so |", "|---|---|", *rows]),
        "mistakes": "\n".join(["| mistake | caught by |", "|---|---|", *caught]),
    }


def filled(page: str) -> str:
    """The page with its tables written anew."""
    for name, text in generated().items():
        head, begin, rest = page.partition(f"<!-- begin {name} -->\n")
        _, end, tail = rest.partition(f"\n<!-- end {name} -->")
        assert begin, f"docs/conformance.md has lost its marker: begin {name}"
        assert end, f"docs/conformance.md has lost its marker: end {name}"
        page = f"{head}{begin}{text}{end}{tail}"
    return page


def test_the_tables_of_the_page_are_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    print(generated()["mistakes"])
    assert page == filled(page), "the tables have changed: run `python tests/test_conformance.py`, look, and commit"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
