"""The suite judges: right implementations pass every row, every known mistake is caught, nothing stops it.

`make tables` writes the generated tables of docs/conformance.md.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from mutants import OUR_MUTANTS

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.checks import InputError
from fedscaffold.conformance import (
    IDENTITIES,
    Judgement,
    Trace,
    Unsupported,
    Verdict,
    conform,
    diagnose,
    identities,
    judge,
    load_target,
    measures,
    offers,
    ours,
    run,
    select,
    table,
)
from fedscaffold.conformance.federations import CONDITIONS
from fedscaffold.conformance.mistakes import MISTAKES, RIGHT_IN_ANOTHER_WAY, right, travelling
from fedscaffold.conformance.oracles import optimum

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
SIGNATURES = ROOT / "src" / "fedscaffold" / "conformance" / "signatures.json"
EVERY_MUTANT = MISTAKES | OUR_MUTANTS
FEATURE_ROWS = [
    "tensors",
    "buffers",
    "loss scaling",
    "private optimiser",
    "private clip",
    "private noise",
    "clipping",
    "clipping corrected",
]
FEW = select(["mean: all", "mean: sampling", "moves: all", "moves: sampling", "optimum: all"])


def failing(judged: list[Verdict]) -> list[str]:
    return [verdict.name for verdict in judged if verdict.outcome in ("fails", "error")]


IN_WORDS = {
    "the correction never reaches the parameters": "x equals FedAvg's: the correction never reaches the model",
    "c_i is never stored": "c_i is never written back (everywhere)",
    "c without S/N": "c is not scaled by S/N",
    "the correction has the wrong sign": "the sign of the correction is wrong",
    "the correction lacks c": "the correction is",
    "option II with the wrong sign": "the sign of c_i is wrong: y - x is taken for x - y",
    "K counted in samples": "c_i is renewed with 0.125 (x - y) / (K lr), not (x - y) / (K lr): steps counted as records?",
    "K counted in epochs": "steps counted as epochs",
    "all clients share one c_i": "all clients share one c_i (everywhere)",
    "c by the sum of the changes": "the changes of c_i are summed",
    "the change is always zero": "c never moves (everywhere)",
    "the server step on c as well": "the server step is applied to c as well (server step",
    "c with S/N as configured, not as heard": "c is scaled by the clients sent for, not by those heard (lost replies",
    "x divided by the smallest cohort": "the moves of x are divided by 1, whatever the number of replies (changing",
    "update: no server step": "the server step is not used (server step",
    "c is lost on restart": "c leaves the mean of the c_i in round 3, in which server and clients were restarted",
    "a client that was lost advances its c_i": "in which replies were lost",
}
RIGHT = {"ours": ours, "right": right} | RIGHT_IN_ANOTHER_WAY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "float64") for name in RIGHT),
        *(  # tolerances of single precision are met by one loop or by none: the rows are the same
            pytest.param(name, "float32", marks=pytest.mark.soak if other else ())
            for name in RIGHT
            for other in [name in RIGHT_IN_ANOTHER_WAY]
        ),
    ],
)
def test_right_implementations_pass_every_row(name, precision):
    judgement = judge(RIGHT[name], precision=precision)
    offered = [verdict for verdict in judgement.verdicts if verdict.outcome != "not offered"]
    assert {verdict.outcome for verdict in offered} == {"holds"}, table(judgement.verdicts)
    assert len(offered) == len(IDENTITIES) - (
        9 if name == "ours" else 0
    )  # one vector, no buffers, no privacy
    assert judgement.met == ("heard so far" in name)
    assert diagnose(judgement) == []


class Mutant(NamedTuple):
    name: str
    judgement: Judgement

    @property
    def failing(self) -> list[str]:
        return failing(self.judgement.verdicts)


# Runs towards the optimum are prolonged, and take half of the time: `test_every_row_catches_a_mistake` has their rows.
BRIEF = [identity for identity in IDENTITIES if identity.check is not measures.optimum]


def to_judge(names):
    """Those that the diagnosis has words for, by `BRIEF`; `make soak`: all, by all rows.

    That every other one is caught, by a row of its signature, is `test_every_mistake_is_caught`.
    """
    brief = [pytest.param((name, BRIEF), id=name) for name in names if name in IN_WORDS]
    whole = [
        pytest.param((name, IDENTITIES), id=f"{name}, all rows", marks=pytest.mark.soak)
        for name in names
    ]
    return brief + whole


@pytest.fixture(scope="module", params=to_judge(EVERY_MUTANT))
def mutant(request) -> Mutant:
    """A mistake, judged once for all tests of it, which pytest runs one after the other."""
    name, rows = request.param
    return Mutant(name, judge(EVERY_MUTANT[name], rows))


@pytest.mark.slow
def test_the_rows_that_catch_a_mistake_are_its_signature(mutant):
    """The page's table is made of signatures."""
    assert mutant.failing
    if mutant.name in MISTAKES:
        judged = {verdict.name for verdict in mutant.judgement.verdicts}
        signature = [row for row in signatures()[mutant.name] if row in judged]
        assert signature == mutant.failing, "run `make tables`"


def caught(name, rows, precision):
    """Whether one of the rows fails; those of the shortest runs are tried first."""
    quickest = sorted(rows, key=lambda one: sum(case.rounds for case in one.cases))
    return any(failing(conform(EVERY_MUTANT[name], [row], precision)) for row in quickest)


# In single precision tolerances are wider: a mistake of each part of the round (steps, memory, server), and `make soak` all.
IN_SINGLE = (
    "the correction has the wrong sign",
    "c_i is never stored",
    "c without S/N",
    "K counted in epochs",
)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "float64") for name in EVERY_MUTANT),
        *(
            pytest.param(name, "float32", marks=() if name in IN_SINGLE else pytest.mark.soak)
            for name in EVERY_MUTANT
        ),
    ],
)
def test_every_mistake_is_caught(name, precision):
    signature = signatures().get(name)
    rows = [one for one in IDENTITIES if signature is None or one.name in signature]
    assert caught(name, rows, precision)


def test_no_verdict_hangs_on_the_last_digits(mutant):
    for verdict in mutant.judgement.verdicts:
        if verdict.violation is not None and verdict.tolerance:
            assert not 0.99 < verdict.violation / verdict.tolerance < 1.01, verdict


@pytest.mark.slow
@pytest.mark.parametrize("mutant", to_judge(MISTAKES | IN_WORDS), indirect=True)
def test_the_diagnosis_names_every_mistake(mutant):
    said = "\n".join(diagnose(mutant.judgement))
    if (
        mutant.name == "an empty round is averaged"
    ):  # the only federation that has one is not compared
        assert f"most like those of the mistake {mutant.name!r} (100%)" in said
    elif mutant.name == "c and c_i start at random":  # other numbers each time
        assert "c and the c_i do not begin at zero (everywhere)" in said
    elif mutant.name in MISTAKES:
        assert f"the numbers are those of the mistake {mutant.name!r}" in said
    assert IN_WORDS.get(mutant.name, "") in said


@pytest.mark.slow
def test_every_row_catches_a_mistake():
    """The first mistake that has the row in its signature."""
    first = {}
    for name, rows in signatures().items():
        for row in rows:
            first.setdefault(row, name)
    for name in set(first.values()):
        rows = [identity for identity in IDENTITIES if first[identity.name] == name]
        assert failing(conform(MISTAKES[name], rows)) == [identity.name for identity in rows]


def test_rows_are_named_and_stated_once():
    assert (
        len({identity.name for identity in IDENTITIES})
        == len({i.statement for i in IDENTITIES})
        == len(IDENTITIES)
    )


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
    features = {one.name for one in select(FEATURE_ROWS)}
    assert (
        missing == {name for name in judged if "momentum" in name or "together" in name} | features
    )
    assert judged["mean: momentum"].note == "momentum"
    assert judged["mean: all"].outcome == "holds"
    assert table(list(judged.values())).endswith(
        f"{len(judged) - len(missing)} hold, 0 fail, {len(missing)} not offered"
    )


@pytest.mark.parametrize(
    ("adapter", "note"),
    [
        (lambda case: 1 / 0, "error ZeroDivisionError: division by zero (" + __file__),
        (lambda case: sys.exit("two\nlines"), "error SystemExit: two lines (" + __file__),
        (lambda case: case.gradient(0, [1.0]), "error ValueError: matmul"),
        (lambda case: {}, "error the adapter returned a dict, not a Trace"),
        (
            lambda case: Trace(*(states[1:] for states in ours(case).vectors)),
            "error x has shape (75, 3), not (76, 3)",
        ),
        (
            lambda case: Trace(*(states.astype("f4") for states in ours(case).vectors)),
            "error x is float32, not float64",
        ),
        (
            lambda case: ours(case)._replace(c=np.full((case.rounds + 1, 3), np.nan)),
            "fails diverged: c is not finite after round 0",
        ),
        (
            lambda case: ours(case._replace(lr=(1e4,) * 4)),
            "fails diverged: x is not finite after round",
        ),
    ],
)
def test_nothing_stops_the_suite(adapter, note):
    verdict = conform(adapter, [IDENTITIES[0]])[0]
    assert verdict.violation is None
    assert f"{verdict.outcome} {verdict.note}".startswith(note)
    assert "\n" not in table([verdict]).partition("\n")[0]


def test_an_error_names_the_line_that_raised_and_the_line_that_called():
    def adapter(case):
        return json.loads("{")  # raised elsewhere

    note = conform(adapter, select(["start"]))[0].note
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# raised elsewhere" in text
    )
    assert re.search(
        rf"JSONDecodeError: .*json.decoder\.py:\d+, from {re.escape(__file__)}:{line}\)$", note
    ), note


def test_a_gradient_asked_for_wrongly_is_the_adapters_error():
    def adapter(case):
        case.gradient(0, np.zeros(99))

    assert re.search(
        rf"\({re.escape(__file__)}:\d+\)$", conform(adapter, select(["start"]))[0].note
    )


def test_the_suite_stops_when_everything_errs():
    asked = []

    def adapter(case):
        asked.append(case)
        if case.momentum:
            raise Unsupported("momentum")
        raise KeyError("scaffold")

    judged = conform(adapter)
    assert len(asked) < 6
    assert {verdict.outcome for verdict in judged} == {"error"}
    assert {verdict.note.partition(":")[0] for verdict in judged} >= {"KeyError", "not run"}
    assert "in error" in table(judged).splitlines()[-1]


def test_errors_among_runs_stop_nothing():
    def adapter(case):
        if len(set(case.weights)) > 1:
            raise KeyError("weights")
        return ours(case)

    outcomes = {
        verdict.name: verdict.outcome for verdict in conform(adapter, select(["mean", "moves"]))
    }
    assert outcomes["mean: weights"] == outcomes["moves: together"] == "error"
    assert outcomes["mean: restart"] == "holds"


@pytest.mark.slow
def test_slow_is_told_from_wrong():
    """Half the server step ends at the optimum, later; FedAvg never does; neither is said of the other."""
    rows = select(["optimum: all", "optimum: sampling"])
    for verdict in conform(lambda case: ours(case._replace(server_lr=0.3)), rows):
        assert verdict.outcome == "holds"
        assert re.fullmatch(r"slow: \de-\d\d after \d+ rounds, there after \d+", verdict.note)
    for verdict in conform(fedavg, rows):
        assert verdict.outcome == "fails"
        assert re.fullmatch(r"wrong: the distance rests at 0\.\d+", verdict.note)
        assert verdict.violation > 0.05
    (verdict,) = conform(lambda case: ours(case._replace(lr=(0.0002,) * 4)), rows[:1])
    assert verdict.outcome == "fails"
    assert re.fullmatch(
        r"slow: the distance still falls, by 0\.99\d* a round after 1200 rounds", verdict.note
    )


@pytest.mark.slow
def test_c_is_the_mean_over_all_or_over_those_met_and_never_a_mixture():
    met = RIGHT_IN_ANOTHER_WAY["c as the mean over the clients heard so far"]
    assert failing(conform(met, select(["mean", "SAGA", "golden", "conserved"]))) == []
    mixed = conform(
        lambda case: (met if case.momentum else ours)(case),
        select(["mean: sampling", "mean: momentum"]),
    )
    assert failing(mixed) == []  # with all clients there is no difference
    together = CONDITIONS["together"].case
    mixed = conform(
        lambda case: (met if case.lr == together.lr else ours)(case), select(["mean", "SAGA"])
    )
    assert failing(mixed) == ["mean: together"]


def test_the_golden_values_are_those_of_fractions():
    """G3 by hand, in exact arithmetic, with both means that c may be."""
    curvature, pull, lr = (Fraction(1), Fraction(2), Fraction(1, 2)), (1, 0, -1), Fraction(1, 10)
    for golden, met in ((identities.G3, False), (identities.G3_MET, True)):
        x, c, c_i, seen = Fraction(0), Fraction(0), [Fraction(0)] * 3, set()
        for cohort, wanted in zip(((0, 1), (1, 2), (0, 2), (0, 1)), golden, strict=True):
            ends, new = [], list(c_i)
            for i in cohort:
                first = curvature[i] * x - pull[i]
                middle = x - lr * (first - c_i[i] + c)
                second = curvature[i] * middle - pull[i]
                ends.append(middle - lr * (second - c_i[i] + c))
                new[i] = (first + second) / 2
            seen |= set(cohort)
            x, c_i = sum(ends) / 2, new
            c = sum(c_i) / (len(seen) if met else 3)
            np.testing.assert_allclose([float(one) for one in (x, c, *c_i)], wanted, rtol=1e-13)


def test_a_mistake_that_is_in_no_table_is_described():
    half = scaffold()._replace(shift=lambda server, memory: 0.5 * (server.c - memory.c_i))
    said = diagnose(judge(lambda case: run(half, case), FEW))
    assert said[0].startswith("the correction is 0.5 (c - c_i): is it divided by")
    said = diagnose(judge(replace(right, renew=lambda v: 2 * v.mean + v.c), FEW))
    assert said[0].startswith("c_i becomes 2 g +1 c +0 c_i, not the mean gradient g")


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (
            {"model": lambda m: m.x + m.case.server_lr * m.share * m.move},
            "the moves of x are divided by N, not by",
        ),
        ({"renew": lambda v: v.mean + v.c}, "- c is left out where c_i becomes"),
        ({"renew": lambda v: v.mean - v.c_i}, "the old c_i is left out where c_i becomes"),
        ({"renew": lambda v: v.mean - v.c_i + v.c}, "c_i - c is left out where c_i becomes"),
        ({"renew": lambda v: 2 * v.mean - v.c_i}, "c_i changes by 2 times what it should"),
    ],
)
def test_a_term_that_was_left_out_is_named_and_nothing_is_guessed(hooks, words):
    """Each was planted in a peer that is right; rows that fail alike suggested mistakes that it did not have."""
    said = diagnose(judge(replace(right, **hooks), [*FEW, *select(["gradients seen: all"])]))
    assert len(said) == 1, said
    assert said[0].startswith(words)


def test_what_a_wrong_correction_does_to_c_i_is_no_second_mistake():
    spoiled = replace(
        right, correct=lambda g, v: g + v.c_i - v.c, renew=travelling(lambda v: sum(v.lr))
    )
    said = diagnose(judge(spoiled, FEW))
    assert said[0].startswith("the sign of the correction is wrong")
    assert not any(line.startswith("c_i") for line in said), said


def test_a_mistake_that_contradicts_a_federation_is_not_named():
    """The target has it in one of two federations, and the mistake would show in both."""

    def target(case):
        weighted = len(set(case.weights.tolist())) > 1
        return (MISTAKES["c without S/N"] if weighted else right)(case)

    said = diagnose(judge(target, select(["mean: sampling", "mean: weights and sampling"])))
    assert said == [
        "c is not scaled by S/N: it moves by the mean change of the cohort's c_i "
        "(weights and sampling)"
    ]


def test_features_are_asked_for_only_where_they_are_offered():
    asked = []

    def adapter(case):
        asked.extend(case.asks)
        return right(case)

    outcomes = [verdict.outcome for verdict in conform(adapter, select(FEATURE_ROWS))]
    assert (set(outcomes), asked) == ({"not offered"}, [])
    tensors = offers("tensors")(lambda case: adapter(case))
    outcomes = {verdict.name: verdict.outcome for verdict in conform(tensors, select(FEATURE_ROWS))}
    assert [name for name, outcome in outcomes.items() if outcome == "holds"] == ["tensors"]
    assert asked == ["tensors"]
    with pytest.raises(InputError, match="unknown feature 'tensor'"):
        offers("tensor")


def test_rows_are_chosen_by_name_or_family():
    assert [one.name for one in select(["start", "golden"])] == [
        "start",
        "golden: all",
        "golden: sampling",
    ]
    assert select([]) == IDENTITIES
    with pytest.raises(InputError, match="unknown row 'optimun'"):
        select(["optimun"])
    with pytest.raises(InputError, match="unknown precision 'float16'"):
        conform(ours, precision="float16")


def test_numbers_too_large_to_compare_are_a_failure():
    verdict = conform(
        lambda case: ours(case)._replace(c_i=np.full((case.rounds + 1, 4, 3), 1e308)),
        [IDENTITIES[0]],
    )[0]
    assert verdict.outcome == "fails"


@pytest.mark.slow
def test_an_adapter_may_write_into_its_case():
    def greedy(case):
        trace = ours(case)
        for array in case[:3]:
            array[...] = np.nan
        return trace

    assert failing(conform(greedy)) == []


@pytest.mark.slow
def test_gradients_need_not_be_asked_for():
    """A compiled program evaluates its own; the suite then walks the same steps."""
    assert failing(conform(lambda case: ours(case._replace(calls=None)))) == []


def test_targets_are_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(
        "from fedscaffold.conformance import ours as mine\nnumber = 3\n"
    )
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


@pytest.mark.process
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


def signatures() -> dict[str, list[str]]:
    """The rows that catch each mistake, as they are kept."""
    return json.loads(SIGNATURES.read_text(encoding="utf-8"))


def generated(signatures: dict[str, list[str]]) -> dict[str, str]:
    """The tables of the page, by the name of their markers."""
    rows = [f"| {identity.name} | {identity.statement} |" for identity in IDENTITIES]
    caught = [f"| {name} | {families(rows)} |" for name, rows in signatures.items()]
    return {
        "identities": "\n".join(["| identity | what must be so |", "|---|---|", *rows]),
        "mistakes": "\n".join(["| mistake | caught by |", "|---|---|", *caught]),
    }


def filled(page: str, signatures: dict[str, list[str]]) -> str:
    """The page with its tables written anew."""
    for name, text in generated(signatures).items():
        head, begin, rest = page.partition(f"<!-- begin {name} -->\n")
        _, end, tail = rest.partition(f"\n<!-- end {name} -->")
        assert begin, f"docs/conformance.md has lost its marker: begin {name}"
        assert end, f"docs/conformance.md has lost its marker: end {name}"
        page = f"{head}{begin}{text}{end}{tail}"
    return page


def test_the_tables_of_the_page_are_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    changed = "the tables have changed: run `make tables`, look, and commit"
    assert page == filled(page, signatures()), changed


def signed(signatures: dict[str, list[str]]) -> str:
    """The file of signatures: a line for each mistake."""
    lines = [f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in signatures.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def test_there_is_a_signature_of_every_mistake():
    assert list(signatures()) == list(MISTAKES), "run `make tables`"
    assert SIGNATURES.read_text(encoding="utf-8") == signed(signatures()), "run `make tables`"


if __name__ == "__main__":
    found = {name: failing(judge(mistake).verdicts) for name, mistake in MISTAKES.items()}
    SIGNATURES.write_text(signed(found), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
