"""The link's store of objects: pieces of messages in files, and Flower's own tables."""

import pytest

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from fedscaffold.deploy import flower_link
from fedscaffold.deploy.flower_link import FileObjectStore

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
MEGABYTE = 1 << 20


def open_store(folder, kind=FileObjectStore):
    store = kind(str(folder / "link.db"))
    store.initialize()
    return store


def record(*values):
    """A record of arrays of a megabyte, each of one byte's value."""
    arrays = {
        f"a{value}": Array("uint8", (MEGABYTE,), "raw", bytes([value]) * MEGABYTE)
        for value in values
    }
    return RecordDict({"arrays": ArrayRecord(arrays)})


def push(store, made):
    """Store a record; return which of its objects were missing."""
    objects, missing = get_all_nested_objects(made), store.preregister(1, get_object_tree(made))
    for one in missing:
        store.put(one, objects[one].deflate())
    return missing


def pieces(folder):
    return [path for path in (folder / "link.objects").iterdir() if path.name != "boot"]


def is_there(store, made):
    """Whether all objects of a record are in a store, as they were pushed."""
    objects = get_all_nested_objects(made)
    return all(store.get(one) == held.deflate() for one, held in objects.items())


def test_pieces_are_files_that_end_with_the_last_message_that_has_them(tmp_path):
    store, first, second = open_store(tmp_path), record(1, 2), record(2, 3)
    every = push(store, first)
    assert is_there(store, first)
    shared = set(every) - set(push(store, second)) & set(get_all_nested_objects(second))
    assert set(get_all_nested_objects(first)) & set(get_all_nested_objects(second)) <= shared
    assert (tmp_path / "link.db").stat().st_size < MEGABYTE
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in pieces(tmp_path))
    store.delete(first.object_id)
    assert is_there(store, second)
    assert store.get(first.object_id) is None
    store.delete(second.object_id)
    assert pieces(tmp_path) == []


def test_an_object_of_other_content_or_that_nobody_announced_is_refused(tmp_path):
    store, made = open_store(tmp_path), record(1)
    objects = get_all_nested_objects(made)
    store.preregister(1, get_object_tree(made))
    with pytest.raises(ValueError, match="has other content"):
        store.put(made.object_id, record(2).deflate())
    with pytest.raises(NoObjectInStoreError):
        store.put(record(3).object_id, record(3).deflate())
    assert store.get(made.object_id) == b""
    assert pieces(tmp_path) == []
    for _ in range(2):  # sent twice, it is stored once
        store.put(made.object_id, objects[made.object_id].deflate())
    assert len(pieces(tmp_path)) == 1


def test_a_transaction_that_fails_changes_nothing(tmp_path):
    store, made = open_store(tmp_path), record(1)
    push(store, made)

    def fail(change, *about):
        with store.session() as session:
            change(*about)
            session.rollback()

    fail(store.delete, made.object_id)
    assert is_there(store, made)
    other = record(2)
    store.preregister(1, get_object_tree(other))
    fail(store.put, other.object_id, other.deflate())
    assert store.get(other.object_id) == b""
    before = len(pieces(tmp_path))
    open_store(tmp_path)
    assert len(pieces(tmp_path)) == before - 1  # what the failed one had written


def test_a_link_that_starts_again_has_its_objects_unless_the_machine_did_too(tmp_path, monkeypatch):
    """Files are not flushed, and Flower would never send again what the table says is there."""
    made = record(1, 2)
    missing = push(open_store(tmp_path), made)
    assert is_there(open_store(tmp_path), made)
    monkeypatch.setattr(flower_link, "BOOT", tmp_path / "another")
    (tmp_path / "another").write_text("boot")
    store = open_store(tmp_path)
    assert pieces(tmp_path) == []
    assert sorted(push(store, made)) == sorted(missing)
    assert is_there(store, made)
    pieces(tmp_path)[0].unlink()
    assert len(push(open_store(tmp_path), made)) == 1


def test_a_database_of_flowers_own_link_is_taken_over(tmp_path):
    made = record(1, 2)
    missing = push(open_store(tmp_path, SqlObjectStore), made)
    assert (tmp_path / "link.db").stat().st_size + (
        tmp_path / "link.db-wal"
    ).stat().st_size > MEGABYTE
    store = open_store(tmp_path)
    assert sorted(push(store, made)) == sorted(missing)
    assert is_there(store, made)
