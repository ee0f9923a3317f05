"""Records in files: what an iterable yielded, read by client."""

import json
import tracemalloc

import numpy as np
import pytest

from fedscaffold.checks import InputError
from fedscaffold.state import Records, StateError, commit, load, write_records


def clients(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(rng.integers(1, 6))
        yield {
            "x": rng.normal(size=(rows, 2, 3)).astype(np.float32),
            "y": rng.integers(0, 9, rows),
            "ok": rng.random(rows) < 0.5,
        }


def same(given, kept):
    assert given.keys() == kept.keys()
    for name, array in given.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            kept[name].dtype,
            kept[name].shape,
            kept[name].tobytes(),
        )


def test_what_is_read_is_what_was_yielded(tmp_path):
    records = write_records(tmp_path / "new" / "folder", clients(50))
    given = list(clients(50))
    assert len(records) == 50
    assert records.counts.tolist() == [len(client["y"]) for client in given]
    for place, client in enumerate(given):
        same(client, records[place])
    cohort = [7, 3, 49, 0]
    rows, offsets = records.gather(cohort)
    same({name: np.concatenate([given[i][name] for i in cohort]) for name in given[0]}, rows)
    assert offsets.tolist() == np.cumsum([0, *(len(given[i]["y"]) for i in cohort)]).tolist()
    records.verify()
    records.close()
    again = Records(tmp_path / "new" / "folder")
    same(given[3], again[3])
    again.close()


def test_only_one_client_is_in_memory(tmp_path):
    """40 MB pass through a process that never holds more than a few."""

    def many():
        for number in range(40):
            yield {"x": np.full((1000, 125), float(number))}

    tracemalloc.start()
    records = write_records(tmp_path, many())
    assert records[17]["x"][999, 124] == 17
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    records.close()
    assert peak < 6e6


@pytest.mark.parametrize(
    "bad",
    [
        {"x": np.zeros((2, 3)), "z": np.zeros(2)},
        {"x": np.zeros((2, 4)), "y": np.zeros(2)},
        {"x": np.zeros((2, 3)), "y": np.zeros(3)},
        {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2)},
        {"x": np.full((2, 3), np.nan), "y": np.zeros(2)},
        {"x": np.zeros((2, 3)), "y": np.float64(1)},
    ],
)
def test_clients_that_do_not_fit_are_named_and_leave_no_source(bad, tmp_path):
    with pytest.raises(InputError, match="client 1"):
        write_records(tmp_path, [{"x": np.zeros((2, 3)), "y": np.zeros(2)}, bad])
    with pytest.raises(StateError, match="holds no records"):
        Records(tmp_path)
    write_records(tmp_path, [{"x": np.zeros((2, 3))}]).close()  # the folder can be used again


@pytest.mark.parametrize(
    "wrong", [{"x": np.array([object()])}, {"x": np.float64(1)}, {"x": np.zeros((2, 0))}]
)
def test_columns_are_arrays_of_numbers(wrong, tmp_path):
    with pytest.raises(InputError, match="column 'x' must be"):
        write_records(tmp_path, [wrong])
    with pytest.raises(InputError, match="at least one client"):
        write_records(tmp_path, [])


def test_damage_is_found(tmp_path):
    write_records(tmp_path, clients(5)).close()
    column = tmp_path / "column-0"
    content = column.read_bytes()
    column.write_bytes(content[:-1])
    with pytest.raises(StateError, match="should have"):
        Records(tmp_path)
    column.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    records = Records(tmp_path)
    with pytest.raises(StateError, match=r"column 'x' .* damaged"):
        records.verify()
    records.close()
    column.unlink()
    with pytest.raises(StateError, match="column-0"):
        Records(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "columns"),
    [
        (np.array([0, 5, 3]), []),
        (np.array([1, 2]), []),
        (np.array([0.0, 2.0]), []),
        (np.array([0, 1]), "x"),
        (np.array([0, 1]), [{"name": "x", "dtype": "O", "shape": [], "crc": 0}]),
        (np.array([0, 1]), [{"name": "x", "dtype": "F64", "shape": [-1], "crc": 0}]),
        (np.array([0, 1]), [{"dtype": "F64"}]),
        (np.array([0, 1]), [7]),
        (np.array([0, 1 << 62]), [{"name": "x", "dtype": "F64", "shape": [1 << 62], "crc": 0}]),
    ],
)
def test_a_stranger_gets_a_typed_error(offsets, columns, tmp_path):
    (tmp_path / "column-0").write_bytes(bytes(8))
    commit(tmp_path, {"offsets": offsets}, {"columns": columns})
    with pytest.raises(StateError):
        Records(tmp_path)


def test_wrong_requests(tmp_path):
    records = write_records(tmp_path, clients(5))
    for wrong in ([5], [-1], [[1]]):
        with pytest.raises(InputError, match="clients must be"):
            records.gather(wrong)
    with pytest.raises(StateError, match="already"):
        write_records(tmp_path, clients(5))
    facts = load(next(tmp_path.glob("state-*"))).facts
    assert json.dumps(facts).count("crc") == 3
    records.close()
