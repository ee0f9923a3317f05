"""The search for Table 3's settings: step sizes that give a published row are named, and only those."""

from papers import plotting
from papers.claims import find, judged

LRS = [0.02, 1.0]


def row(method, key, reached, of="test", falling=False):
    """A measured row: SGD by similarity, others by epochs."""
    return {
        "method": method,
        "epochs": 1 if method == "sgd" else key,
        "similarity": key if method == "sgd" else 0,
        "of": of,
        "falling": falling,
        "lrs": LRS,
        "reached": reached,
        "most": 600,
    }


def measured(sgd, fedavg):
    kinds = [("test", False), ("train", False), ("test", True)]
    rows = [
        row("sgd", similarity, reached, of, falling)
        for of, falling in kinds
        for similarity, reached in zip((0, 10, 100), sgd, strict=True)
    ]
    rows += [
        row("fedavg", epochs, reached) for epochs, reached in zip((1, 5, 20), fedavg, strict=True)
    ]
    return {"rows": rows, "about": [], "dataset": "emnist", "target": 0.5}


def test_only_step_sizes_that_give_a_row_are_named():
    claim = find("table3-settings")
    claim = claim._replace(
        sizes={"quick": dict(claim.sizes["quick"]) | {"lrs": LRS, "dataset": "digits"}}
    )
    found = [
        measured([[390, 39], [392, 35], [388, 14]], [[80, 30], [16, 25], [5, 20]]),
        measured([[320, 39], [370, 50], [420, 60]], [[80, 60], [16, 90], [5, None]]),
    ]
    none, some = (judged(claim, "quick", one).checks for one in found)
    assert {one.measured for one in none} == {"at none"}
    assert not any(one.passed for one in none)
    rows = {one.statement.split(":")[0]: one.measured for one in some}
    assert rows["SGD takes 317, 365, 416 rounds, each within 20 %"] == "at 0.02"
    assert rows["SGD is slower with like clients, by 10 % or more"] == "at 0.02, 1"
    assert rows["FedAvg at 0 % is slower with more epochs, one step for all"] == "at 1"
    assert rows["and with 5 epochs slower than SGD at its best step"] == "at 1"
    other = judged(claim, "quick", found[1] | {"dataset": "digits"})
    assert {one.passed for one in other.checks} == {None}
    with plotting.style():
        assert all("<path" in plotting.svg(one.figure) for one in claim.draw(found[1]))
    tables = judged(claim, "quick", found[1]).tables
    assert all(len(one) == len(table.head) for table in tables for one in table.rows)
