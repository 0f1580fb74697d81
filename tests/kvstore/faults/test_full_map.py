"""A map that is full again and again: an error, memory right, and it goes on when there is room."""

import random

import pytest

from kvstore import KVStore, SpillFullError, StorageError
from kvstore.storage.spill_settings import SpillSettings
from tests.kvstore.faults.workload import SCHEMA, assert_sound, foresee, found, perform, plan, small

KIB = 1 << 10


def walk_until_full_many_times(store, n, seed):
    """Random operations that meet a limit again and again; yields what the store must hold after each error."""
    chance, model, n_full = random.Random(seed), {}, 0
    for _ in range(n):
        op = plan(model, chance)
        try:
            perform(store, op)
            model = foresee(model, op)
        except StorageError:
            n_full += 1
            now = found(store)
            begun = {**model, op[1]: []} if op[0] == "step" and op[1] not in model else model
            assert now in (model, begun, foresee(model, op)), op
            model = now
    assert n_full > 3
    return model


def shrink_until_it_fits(store, model):
    """Drop sequences until all that is left can be flushed; return what is left."""
    for name in sorted(model):
        try:
            store.flush()
            store.flush()
            break
        except SpillFullError:
            store.drop(name)
            model.pop(name)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_a_map_that_fills_up_during_saves_loses_nothing_and_goes_on_when_there_is_room(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(SpillSettings, "map_bytes", 320 * KIB)  # 64 KiB of them for records
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        model = walk_until_full_many_times(store, 250, seed)
        model = shrink_until_it_fits(store, model)
        assert found(store) == model
        assert_sound(store)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) == model
