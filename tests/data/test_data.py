"""Data sets and splits: loaders on small files in the real formats, and on the real files where at hand."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file

from fedscaffold.checks import InputError
from fedscaffold.data import DATASETS, Dataset, describe, federate, load, loaders, split
from fedscaffold.data.formats import csv_table, libsvm_table, npz_arrays
from fedscaffold.data.splits import holdout

REAL = Path(os.environ.get("FEDSCAFFOLD_DATA") or "nowhere")
HEART = [f"heart/processed.{hospital}.data" for hospital in loaders.HOSPITALS]
FASHION = [
    f"fashion-mnist/{a}-{b}-ubyte"
    for a in ("train", "t10k")
    for b in ("images-idx3", "labels-idx1")
]
# files; features and labels; training and test records of the real files, and of the small ones
FACTS: dict[str, Any] = {
    "digits": ([], (64, 10), (1400, 397), (1400, 397)),
    "emnist": (["emnist_byclass62.npz"], (784, 62), (100_000, 16_323), (124, 31)),
    "emnist47": (["emnist_balanced47_small.npz"], (784, 47), (29_610, 5_640), (94, 24)),
    "emnist47-tiny": (["emnist_balanced47_tiny.npz"], (784, 47), (4_700, 940), (94, 24)),
    "heart": (HEART, (13, 2), (690, 230), (105, 35)),
    "a9a": (["libsvm/a9a", "libsvm/a9a.t"], (123, 2), (32_561, 16_281), (60, 30)),
    "mushrooms": (["libsvm/mushrooms"], (112, 2), (6_093, 2_031), (45, 15)),
    "fashion-mnist": (FASHION, (784, 10), (60_000, 10_000), (20, 10)),
}


def at_hand(name: str) -> bool:
    found = [any((REAL / (path + end)).is_file() for end in ("", ".gz")) for path in FACTS[name][0]]
    return (bool(found) and all(found)) or (name == "fashion-mnist" and loaders.DEBIAN.is_dir())


CASES = [("small", name) for name in FACTS] + [("real", name) for name in FACTS if at_hand(name)]
SVM = [
    "1 3:nan",
    "1 3:inf",
    "1 3:1e39",
    "nan 3:1",
    "1 0:1",
    "1 9:1",
    "1 2",
    "1:1",
    "1 2:3:4",
    "1 x:1",
]
CSV = ["NaN,1", "inf,1", "1e39,1", ",1", "x,1", "1", "1,1,1"]
FILES = [(name, path) for name in FACTS for path in FACTS[name][0]]
MINE = Dataset(
    "mine", np.zeros((4, 2), "f4"), np.arange(4) % 2, np.zeros((4, 2), "f4"), np.zeros(4, int), 2
)


def idx(array: Any) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + np.array(array.shape, ">u4").tobytes()
        + bytes(array.astype("u1"))
    )


def npz(**arrays: Any) -> bytes:
    np.savez_compressed(file := io.BytesIO(), **arrays)
    return file.getvalue()


def write(folder: Path) -> Path:
    """Write small files of every data set in the real formats; the test half of Fashion-MNIST packed."""
    rng = np.random.default_rng(7)
    for kind in ("heart", "libsvm", "fashion-mnist"):
        (folder / kind).mkdir()
    for (file,), (_, classes), _, sizes in (FACTS[name] for name in FACTS if "emnist" in name):
        x, x_test = (rng.integers(0, 256, (n, 28, 28), "u1") for n in sizes)
        y, y_test = (np.arange(n, dtype="u1") % classes for n in sizes)
        (folder / file).write_bytes(npz(x_train=x, y_train=y, x_test=x_test, y_test=y_test))
    for path in HEART:
        cells = np.where(rng.random((35, 13)) < 0.2, "?", rng.integers(1, 99, (35, 13)).astype(str))
        (folder / path).write_text(
            "".join(f"{','.join(row)},{i % 5}\n" for i, row in enumerate(cells))
        )
    for file, low, high, records in (
        ("a9a", -1, 1, 60),
        ("a9a.t", -1, 1, 30),
        ("mushrooms", 1, 2, 60),
    ):
        lines = [
            f"{(high, low)[i % 2]:+d} {i + 1}:1 {i + 9}:.25 {i + 40}:-2e-1 \n"
            for i in range(records)
        ]
        (folder / "libsvm" / file).write_text("".join(lines))
    for path, n in zip(FASHION, (20, 20, 10, 10), strict=True):
        raw = idx(rng.integers(0, 256, (n, 28, 28)) if "images" in path else np.arange(n) % 10)
        (folder / (path + ".gz" * (n == 10))).write_bytes(gzip.compress(raw) if n == 10 else raw)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"))


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    assert (
        error.value.__suppress_context__ or error.value.__context__ is None
    )  # no traceback behind it
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_data_set_keeps_the_contract(kind: str, name: str, small: Path) -> None:
    data = load(name, REAL if kind == "real" else small)
    _, (features, classes), real, synthetic = FACTS[name]
    train, test = real if kind == "real" else synthetic
    assert (data.name, data.classes, data.source[-1]) == (name, classes, ".")
    assert (data.x.shape, data.x_test.shape) == ((train, features), (test, features))
    assert (data.x.dtype, data.x_test.dtype, data.y.dtype, data.y_test.dtype) == (
        "f4",
        "f4",
        "i4",
        "i4",
    )
    assert set(np.unique(data.y)) == set(range(classes))
    if name not in ("heart", "a9a", "mushrooms"):
        assert (data.x.min(), data.x.max()) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "name"), [case for case in CASES if case[1] in ("a9a", "mushrooms")]
)
def test_libsvm_text_is_read_as_scikit_learn_reads_it(kind: str, name: str, small: Path) -> None:
    path, features = (REAL if kind == "real" else small) / "libsvm" / name, FACTS[name][1][0]
    x, labels = libsvm_table(path.read_bytes(), features, name)
    oracle, oracle_labels = load_svmlight_file(str(path), n_features=features, dtype=np.float32)
    np.testing.assert_array_equal(x, oracle.toarray())
    np.testing.assert_array_equal(labels, oracle_labels)
    data = load(name, path.parent)
    positive = data.y.sum() + (data.y_test.sum() if name == "mushrooms" else 0)
    assert positive == (labels == labels.max()).sum()


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[1] == "heart"])
def test_heart_is_standardised_and_divided_by_hospital(kind: str, name: str, small: Path) -> None:
    folder = REAL if kind == "real" else small
    data = load(name, folder)
    x = data.x.astype(np.float64)  # the training records alone, each rounded to float32
    np.testing.assert_allclose([x.mean(axis=0), x.std(axis=0)], [[0] * 13, [1] * 13], atol=1e-6)
    records = np.array([len((folder / path).read_text().splitlines()) for path in HEART])
    kept = federate(data, "natural").label_counts.sum(axis=1)
    assert np.abs(kept - 0.75 * records).max() < 2  # two strata, each off by less than one record


def test_where_files_are_looked_for(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSCAFFOLD_DATA", str(tmp_path))
    assert len(load("a9a", str(small)).x) == len(load("a9a", small / "libsvm").x) == 60
    monkeypatch.setenv("FEDSCAFFOLD_DATA", str(small))
    assert len(load("a9a").x) == 60
    monkeypatch.setattr(loaders, "DEBIAN", small / "fashion-mnist")
    assert len(load("fashion-mnist", tmp_path).x) == 20


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_a_missing_file_is_explained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSCAFFOLD_DATA", raising=False)
    monkeypatch.setattr(loaders, "DEBIAN", tmp_path / "none")
    file = Path(FACTS[name][0][0]).name
    public = "EMNIST by NIST|UCI Heart Disease|LIBSVM data sets page|dataset-fashion-mnist"
    for folder, looked in ((tmp_path, f"in {tmp_path}/"), (None, "")):
        with pytest.raises(FileNotFoundError, match=f"^{file} not found {looked}") as error:
            load(name, folder)
        assert re.search(
            f"({public}).*, then set FEDSCAFFOLD_DATA or pass --data DIR$", one_line(error)
        )


@pytest.mark.parametrize("damage", ["cut", "garbage", "nothing"])
@pytest.mark.parametrize(("name", "path"), FILES)
def test_a_damaged_file_is_refused_in_one_line(
    name: str, path: str, damage: str, tmp_path: Path
) -> None:
    file = write(tmp_path) / (path + ".gz" * ("t10k" in path))
    raw = file.read_bytes()
    # a text cut between two words cannot be told from a whole one: cut after a colon, before the last column
    end = (
        raw.rindex(b":") + 1
        if "libsvm" in path
        else raw.rindex(b",")
        if name == "heart"
        else len(raw) - 1
    )
    file.write_bytes({"cut": raw[:end], "garbage": b"\x00\xff 1:x", "nothing": b""}[damage])
    with pytest.raises(InputError, match=re.escape(Path(path).name)) as error:
        load(name, tmp_path)
    assert one_line(error)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_no_damage_to_an_archive_escapes_as_another_error(place: int, byte: int) -> None:
    raw = bytearray(npz(x=np.arange(12).reshape(3, 2, 2)))
    raw[place % len(raw)] = byte
    with contextlib.suppress(InputError):
        npz_arrays(bytes(raw), ["x"], "mine.npz")


@pytest.mark.parametrize("line", SVM + CSV)
def test_a_strange_line_is_named(line: str) -> None:
    table, good, width = (csv_table, "1,?", 2) if line in CSV else (libsvm_table, "1 2:1", 8)
    with pytest.raises(InputError, match=r"line 3 of mine is not .* finite numbers"):
        table(f"{good}\n\n{line}\n{good}\n".encode(), width, "mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.full((4, 2), np.nan)}, "mine: training records must be finite, found NaN or inf"),
        ({"y_test": np.zeros(4)}, "test labels must be whole numbers from 0 to 1"),
        ({"y": np.zeros(3, int)}, r"got \(4, 2\) and \(3,\)"),
        ({"x_test": np.zeros((4, 3))}, "training has 2 features, test has 3"),
    ],
)
def test_a_data_set_that_does_not_fit_together_is_refused(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(MINE._replace(**change), "iid", 2)


def test_the_recipe_of_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    lying = np.arange(784).reshape(1, 28, 28) % 256
    for part in ("train", "test"):
        for kind, array in (("images-idx3", lying), ("labels-idx1", np.array([61]))):
            (tmp_path / f"emnist-byclass-{part}-{kind}-ubyte.gz").write_bytes(
                gzip.compress(idx(array))
            )
    monkeypatch.chdir(tmp_path)
    exec(recipe, {})
    np.testing.assert_array_equal(
        np.rint(load("emnist", tmp_path).x * 255).reshape(28, 28), lying[0].T
    )


@pytest.mark.process
def test_importing_the_room_loads_nothing_heavy() -> None:
    code = "import sys, fedscaffold.data; print({'jax', 'scipy', 'sklearn', 'torch'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(0, 2**32), st.data())
def test_what_every_split_promises(rows: list[int], seed: int, data: st.DataObject) -> None:
    labels, clients = np.array(rows), data.draw(st.integers(1, len(rows)))
    each, percent = data.draw(st.integers(1, len(rows) // clients)), data.draw(st.integers(1, 100))
    alpha = data.draw(st.sampled_from([5e-324, 0.01, 0.3, 5.0, 1e308]))
    divide = partial(split, labels=labels, num_clients=clients, seed=seed)
    for kind, value in (
        ("similarity", percent),
        ("similarity", 0),
        ("dirichlet", alpha),
        ("shards", each),
    ):
        parts = divide(f"{kind}:{value}")
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
        sizes, pairs = [len(part) for part in parts], sum(len(set(labels[part])) for part in parts)
        spread = {"similarity": 1, "shards": each}.get(kind, len(labels))
        cuts = clients * each if kind == "shards" else len(labels) if value else clients
        assert (len(sizes), min(sizes) >= max(1, max(sizes) - spread)) == (clients, True)
        assert pairs < cuts + len(
            set(labels)
        )  # a cut through sorted labels adds one (client, label) at most
        assert all(map(np.array_equal, parts, divide(f"{kind}:{value}")))
    assert all(map(np.array_equal, divide("iid"), divide("similarity:100")))
    assert all(labels[a].max() <= labels[b].min() for a, b in pairwise(divide("similarity:0")))


@pytest.mark.parametrize("percent", [0, 10, 50, 90, 100])
def test_similarity_mixes_in_proportion(percent: int) -> None:
    labels = np.repeat(np.arange(10), 1000)
    parts = split(f"similarity:{percent}", labels, 10, seed=1)
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    far = (
        np.abs(np.subtract.outer(np.arange(10), np.arange(10))) > 1
    )  # by chance alone: a tenth of 10 * percent
    assert np.abs(counts[far] - percent).max() <= 5 * np.sqrt(0.9 * percent)


def test_dirichlet_shares_have_the_variance_of_the_law() -> None:
    labels, clients, alpha = np.repeat(np.arange(2000), 100), 5, 0.5
    parts = split(f"dirichlet:{alpha}", labels, clients, seed=3)
    shares = np.array([np.bincount(labels[part], minlength=2000) for part in parts]) / 100
    squares, law = (
        (shares - 1 / clients) ** 2,
        (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1),
    )
    assert (
        abs(squares.mean() - law) < 5 * squares.std() / np.sqrt(squares.size) + 1e-4
    )  # rounded to records


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        (
            "similarty:10",
            2,
            r"unknown split 'similarty' \(did you mean 'similarity'\?\); known: dirichlet",
        ),
        (
            "similarity:101",
            2,
            "similarity:S with S from 0 to 100, as in similarity:10, got 'similarity:101'",
        ),
        ("dirichlet:0", 2, "ALPHA above 0"),
        ("shards:1.5", 2, "K a whole number"),
        ("shards:4", 2, "K at most 3, got 4"),
        ("iid:3", 2, "split must read iid, got 'iid:3'"),
        ("iid", 7, "num_clients must be at most the number of records 6, got 7"),
        ("iid", None, "needs a number of clients"),
        ("natural", None, "needs data with clients of their own"),
    ],
)
def test_a_split_that_cannot_be_is_refused_in_one_line(
    spec: Any, clients: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        split(spec, [0, 1, 2, 0, 1, 2], clients, seed=0)
    assert one_line(error)


def test_a_regression_is_divided_by_its_targets() -> None:
    data = MINE._replace(y=np.array([4, 1, 3, 2], "f4"), y_test=np.zeros(4, "f4"), classes=0)
    federated = federate(data, "similarity:0", 2)
    assert [sorted(y) for _, y in federated.clients] == [[1, 2], [3, 4]]
    assert (federated.label_counts.tolist(), describe(federated)["heterogeneity"]) == (
        [[2], [2]],
        None,
    )


def test_a_federation_holds_the_records_and_is_described_in_json() -> None:
    data = load("digits")
    federated, parts = (
        federate(data, "dirichlet:0.3", 12, seed=5),
        split("dirichlet:0.3", data.y, 12, seed=5),
    )
    for part, (x, y), counts in zip(parts, federated.clients, federated.label_counts, strict=True):
        np.testing.assert_array_equal(x, data.x[part])
        np.testing.assert_array_equal(np.bincount(y, minlength=10), counts)
    facts = json.loads(json.dumps(describe(federated)))
    assert (facts["records"], facts["clients"], facts["largest"]) == (
        1400,
        12,
        max(map(len, parts)),
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.data())
def test_a_holdout_takes_the_same_share_of_every_stratum(
    strata: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(strata) - 1))
    train, test = holdout(strata, size, seed=0)
    assert (len(test), sorted([*train, *test])) == (size, list(range(len(strata))))
    taken = np.bincount(np.array(strata)[test], minlength=max(strata) + 1)
    assert np.abs(taken - np.bincount(strata) * size / len(strata)).max() < 1
