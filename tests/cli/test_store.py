"""Looking after a store in a directory from the command line."""

import json

import pytest

from kvstore import KVStore
from kvstore.row_records import row_key
from tests.builders import SCHEMA, fill
from tests.kvstore.test_durable import small


@pytest.fixture
def path(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 9000)
        store["book"].fork("question")
        store["book"].budget = 0.25
    return tmp_path / "s"


def lose_rows(path):
    with KVStore.open(path, config=small()) as store:
        ref = store._persistence._archive.entries["book"].layers[0][0]
        store._persistence._directory.tier.delete_many([row_key(ref, 0)])


def test_inspect_shows_what_is_there_even_while_it_is_open(run, path):
    result = run("inspect", path)
    assert result.exit_code == 0, result.output
    assert "book" in result.stdout
    assert "question" in result.stdout
    assert "not open to write" in result.stdout
    found = json.loads(run("inspect", path, "--json").stdout)
    assert [seq["rows"] for seq in found["sequences"]] == [9000, 9000]
    assert found["sequences"][0]["budget"] == 0.25
    assert found["schema"]["head_dim"] == SCHEMA.head_dim
    assert found["records"]["catalog"] == 2


def test_check_says_what_is_wrong_and_mends_it_when_asked(run, path):
    assert run("check", path).exit_code == 0
    assert json.loads(run("check", path, "--json").stdout) == []
    lose_rows(path)
    result = run("check", path)
    assert result.exit_code == 1
    assert "rows: book" in result.stdout
    assert json.loads(run("check", path, "--json").stdout)[0]["kind"] == "rows"
    assert run("check", path, "--repair").exit_code == 1
    assert run("check", path).exit_code == 0


def test_vacuum_gives_room_back(run, path):
    with KVStore.open(path, config=small()) as store:
        for name in list(store):
            store.drop(name)
    result = run("vacuum", path)
    assert result.exit_code == 0, result.output
    assert float(result.stdout.split()[0]) > 1


@pytest.mark.parametrize("command", ["inspect", "check", "vacuum"])
def test_what_is_no_store_is_refused_in_one_line(refused, tmp_path, command):
    assert "no store in" in refused(command, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    refused(command, tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").write_text("{")
    assert "damaged" in refused(command, tmp_path / "empty")


def test_evict_drops_what_is_asked_for_and_says_so(run, path):
    assert run("evict", path).exit_code == 2
    assert run("evict", path, "--idle-hours", 1000).stdout.startswith("0 sequences dropped")
    found = json.loads(run("evict", path, "--max-mib", 0, "--json").stdout)
    assert sorted(found["dropped"]) == ["book", "question"]
    assert found["disk_bytes"] == 0
    assert json.loads(run("inspect", path, "--json").stdout)["sequences"] == []
