"""Events in the log: their names, fields and levels."""

import dataclasses
import json
import logging

import pytest

from kvstore import KVStore
from kvstore.logs import JsonFormatter, log, log_event
from kvstore.row_records import row_key
from kvstore.storage.manifest import read_manifest, write_manifest
from tests.builders import SCHEMA, fill
from tests.kvstore.test_durable import small


@pytest.fixture
def events(caplog):
    """What is logged from now on: (level, event, fields) of each record."""
    caplog.set_level(logging.DEBUG, "kvstore")

    def seen():
        records = [record for record in caplog.records if record.name == "kvstore"]
        found = [(r.levelno, r.kvstore["event"], {k: v for k, v in r.kvstore.items() if k != "event"}) for r in records]
        caplog.clear()
        return found

    return seen


def named(found, event):
    return [(level, fields) for level, name, fields in found if name == event]


def test_the_life_of_a_store_is_told(tmp_path, events):
    path = tmp_path / "s"
    with KVStore.open(path, SCHEMA, small()) as store:
        fill(store.create("book"), 300)
        store.flush()
        store.unload("book")
        assert len(store["book"].read(0)[0][0]) == 300
        store.drop("book")
        given = store.vacuum()
    found = events()
    assert named(found, "store.opened") == [(logging.DEBUG, {"path": path, "readonly": False, "sequences": 0})]
    saved = named(found, "sequence.saved")
    assert saved[0] == (logging.DEBUG, {"sequence": "book", "rows": 300, "indexes": 2})
    assert named(found, "sequence.unloaded") == [(logging.DEBUG, {"sequence": "book", "rows": 300})]
    assert named(found, "sequence.loaded") == [(logging.DEBUG, {"sequence": "book", "rows": 300})]
    assert named(found, "store.vacuumed") == [(logging.INFO, {"bytes": given})]
    assert found[-1][1:] == ("store.closed", {"path": path})


def test_a_sequence_that_is_read_from_the_disk_is_told(tmp_path, events):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 100)
    events()
    with KVStore.open(tmp_path / "s", readonly=True) as store:
        assert len(store["book"]) == 100
    found = events()
    assert named(found, "store.opened")[0][1]["sequences"] == 1
    assert named(found, "sequence.loaded") == [(logging.DEBUG, {"sequence": "book", "rows": 100})]


def test_damage_and_repair_are_warnings(tmp_path, events):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 300)
        store.flush()
        directory = store._persistence._directory
        [ref] = directory.archive.entries["book"].layers[0][:1]
        directory.tier.delete_many([row_key(ref, 0)])
        findings = store.check(repair=True)
    repaired = named(events(), "store.repaired")
    assert findings
    assert repaired == [(logging.WARNING, {"findings": len(findings)})]


def test_an_index_that_is_built_again_names_its_layer_and_why(tmp_path, events):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 300)
    with KVStore.open(tmp_path / "s", SCHEMA, small(seed=0)) as store:
        entry = store._persistence._archive.entries["book"]
        store._persistence._archive.entries["book"] = entry._replace(
            indexes=[ref._replace(kind="other") for ref in entry.indexes]
        )
        assert len(store["book"]) == 300
    rebuilt = named(events(), "index.rebuilt")
    assert [(level, fields["sequence"], fields["layer"]) for level, fields in rebuilt] == [
        (logging.WARNING, "book", 0),
        (logging.WARNING, "book", 1),
    ]
    assert all("'other'" in fields["reason"] for _, fields in rebuilt)


def test_a_spill_that_is_discarded_is_a_warning(tmp_path, events, monkeypatch):
    path = tmp_path / "s"
    KVStore.open(path, SCHEMA, small()).close()
    write_manifest(path, dataclasses.replace(read_manifest(path), clean=False, boot_id="another"))
    KVStore.open(path).close()
    assert named(events(), "spill.discarded") == [(logging.WARNING, {"path": path})]


# ---- the form ----


def formatted(**record):
    plain = {"name": "kvstore", "level": logging.INFO, "pathname": "x", "lineno": 1, "msg": "", "args": (), **record}
    plain.setdefault("exc_info", None)
    return JsonFormatter().format(logging.LogRecord(**plain))


def test_a_line_of_json_holds_time_level_event_message_and_fields(tmp_path, caplog):
    caplog.set_level(logging.INFO, "kvstore")
    log_event(log, logging.INFO, "store.vacuumed", "%(bytes)d bytes\nof %(path)s", bytes=12, path=tmp_path)
    line = JsonFormatter().format(caplog.records[-1])
    assert "\n" not in line
    found = json.loads(line)
    assert list(found) == ["time", "level", "event", "message", "fields"]
    assert found["time"].endswith("+00:00")
    assert (found["level"], found["event"]) == ("info", "store.vacuumed")
    assert found["message"] == f"12 bytes\nof {tmp_path}"
    assert found["fields"] == {"bytes": 12, "path": str(tmp_path)}
    assert caplog.records[-1].funcName == "test_a_line_of_json_holds_time_level_event_message_and_fields"


def test_records_of_others_and_errors_are_formatted_too():
    found = json.loads(formatted(msg="%d of %d", args=(1, 2)))
    assert (found["event"], found["message"], found["fields"]) == ("", "1 of 2", {})
    try:
        raise ValueError("too long")
    except ValueError as error:
        found = json.loads(formatted(msg="no", exc_info=(ValueError, error, error.__traceback__)))
    assert "ValueError: too long" in found["error"]


def test_a_text_without_fields_is_taken_as_it_is(caplog):
    caplog.set_level(logging.INFO, "kvstore")
    log_event(log, logging.INFO, "some.event", "100 %")
    assert caplog.records[-1].getMessage() == "100 %"
    assert caplog.records[-1].kvstore == {"event": "some.event"}


def test_what_is_not_wanted_is_not_put_together():
    class Loud:
        def __str__(self):
            raise AssertionError("was put into words")

    quiet = logging.Logger("quiet", logging.WARNING)
    handler = logging.Handler()
    handler.emit = lambda record: pytest.fail("was emitted")
    quiet.addHandler(handler)
    log_event(quiet, logging.DEBUG, "some.event", "%(what)s", what=Loud())
    assert not quiet.isEnabledFor(logging.DEBUG)
