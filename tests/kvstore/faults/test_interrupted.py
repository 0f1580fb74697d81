"""Each thread that cannot be had, and Ctrl-C in each wait: one error, memory is right, and the next flush saves all."""

import contextlib
import dataclasses
import threading

import pytest

from kvstore import KVStore, KVStoreError
from kvstore.storage.gate import Gate
from tests.kvstore.faults.failing import OPS, Faults
from tests.kvstore.faults.interrupted import interrupts_while_waiting, threads_that_are_not_to_be_had
from tests.kvstore.faults.workload import SCHEMA, assert_sound, foresee, found, perform, small

WAYS = {"no thread": threads_that_are_not_to_be_had, "Ctrl-C": interrupts_while_waiting}
HEARD = (KVStoreError, KeyboardInterrupt)
ALL_OPS = [*OPS, ("reindex", "a"), ("attend", "a"), ("step", "a", 61, 9), ("wait",), ("attend", "c")]


def settings(build, wait):
    """Indexes that are built at the commit, or by threads."""
    config = small()
    return dataclasses.replace(config, index=dataclasses.replace(config.index, build=build, wait=wait))


def do(store, op):
    """Do an operation of the workload, or one that has to do with work in the background."""
    if op[0] == "wait":
        store.wait()
    elif op[0] == "reindex":
        store[op[1]].reindex(background=True)
    elif op[0] == "attend":
        store[op[1]].attend(1, store[op[1]].read(1)[0][0, :2])
    else:
        perform(store, op)


def follow(path, config, way, faults):
    """Go through the operations with one fault; returns how many errors there were."""
    errors = 0
    with way(faults):
        store, model = KVStore.open(path, SCHEMA, config), {}
        for op in ALL_OPS:
            if op[0] == "truncate" and op[2] > len(model["a"]):
                continue  # a step that was taken back has left too few rows
            after = foresee(model, op)
            try:
                do(store, op)
            except HEARD:
                errors += 1
                now = found(store)
                begun = {**model, op[1]: []} if op[0] == "step" and op[1] not in model else model
                assert now in (model, begun, after), f"{op} failed and left {now} of {model}"
                after = now
            model = after
        faults.heal()
        for call in (store.flush, store.wait):
            try:
                call()
            except HEARD:  # news of what failed in the background
                errors += 1
                call()
        assert found(store) == model
        assert_sound(store)
        store.close()
    with KVStore.open(path, SCHEMA, config) as store:
        assert found(store) == model
        assert_sound(store)
    return errors


@pytest.mark.parametrize(("build", "wait"), [("commit", True), ("overlap", True), ("overlap", False)])
@pytest.mark.parametrize("way", WAYS)
def test_the_nth_is_one_error_and_the_store_goes_on(tmp_path, way, build, wait):
    for n in range(1, 200):
        faults = Faults(n)
        errors = follow(tmp_path / str(n), settings(build, wait), WAYS[way], faults)
        assert errors <= 1, f"{faults.failed} was heard {errors} times"
        if not faults.failed:
            break
    assert (2 if way == "no thread" else 3) < n < 199


def test_a_gate_that_was_waited_for_in_vain_is_open_to_others():
    gate, entered, leave = Gate(), threading.Event(), threading.Event()

    def stay():
        """Be inside until the test lets it go."""
        with gate.shared():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(60)
    with interrupts_while_waiting(Faults(1)), pytest.raises(KeyboardInterrupt), gate.exclusive():
        pass
    passed = threading.Event()
    other = threading.Thread(
        target=lambda: contextlib.ExitStack().enter_context(gate.shared()) or passed.set(), daemon=True
    )
    other.start()
    assert passed.wait(60)
    leave.set()
    thread.join(60)
