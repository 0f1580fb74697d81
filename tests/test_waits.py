"""Every place where the package waits is known, and has a test in which it is late and one in which it fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_structure import ROOT, sources

BLOCKING = {"wait", "join", "result", "acquire", "shutdown", "flock", "sleep", "synchronize", "communicate"}

WORK = (
    "test_a_call_waits_for_work_that_is_late_only_where_it_must",
    "test_a_failure_is_heard_once_a_layer_or_given_up",
)
WRITER = (
    "test_a_call_waits_for_a_writer_that_is_late_only_where_it_must",
    "test_a_write_that_fails_is_heard_once_and_saved_by_the_next",
)
STORE = ("test_who_waits_for_the_store_goes_on_after_a_read",) * 2
LOCK = (
    "test_a_lock_that_is_free_a_moment_later_is_taken",
    "test_a_system_that_has_no_locks_is_an_error_and_nothing_stays_open",
)
DEVICE = (
    "test_a_drop_waits_for_the_device_but_not_for_guards",
    "test_a_device_that_fails_while_it_is_waited_for_leaves_the_pins",
)
WAITS = {
    "kvstore.adapters.checkpoints._locked: flock": (
        "test_a_second_process_waits_and_finds_it_made",
        "test_half_written_checkpoints_do_not_count",
    ),
    "kvstore.buffer_pool.pins.settle: synchronize": DEVICE,
    "kvstore.directory.__init__: acquire": LOCK,
    "kvstore.first_build._take_first: result": WORK,
    "kvstore.first_build._wait: wait": WORK,
    "kvstore.locking.__enter__: acquire": STORE,
    "kvstore.maintenance.close: shutdown": WORK,
    "kvstore.maintenance.result: result": WORK,
    "kvstore.maintenance.wait: result": WORK,
    "kvstore.storage.gate.exclusive: wait": (
        "test_who_is_alone_is_alone_and_waits_for_those_inside",
        "test_a_gate_that_was_waited_for_in_vain_is_open_to_others",
    ),
    "kvstore.storage.gate.shared: wait": (
        "test_who_is_alone_is_alone_and_waits_for_those_inside",
        "test_an_error_inside_opens_the_gate_again",
    ),
    "kvstore.storage.lock.__enter__: acquire": LOCK,
    "kvstore.storage.lock._try_lock: flock": LOCK,
    "kvstore.storage.lock._try_lock: sleep": LOCK,
    "kvstore.storage.lock.release: flock": LOCK,
    "kvstore.storage.write_queue._run: wait": (
        "test_batches_that_wait_are_committed_together_up_to_a_size",
        "test_a_bad_batch_in_a_group_does_not_take_those_before_it",
    ),
    "kvstore.storage.write_queue._wait_for_room: wait": (
        "test_a_full_queue_blocks_the_writer_until_there_is_room",
        "test_a_writer_that_waits_for_room_hears_of_an_error",
    ),
    "kvstore.storage.write_queue.drain: wait": WRITER,
    "kvstore.storage.write_queue.stop: join": WRITER,
    "kvstore.table_index.adopt: result": WORK,
    "kvstore.table_index.raise_failure: result": WORK,
}
"""Module, function and call -> the test in which it is late, the test in which it fails."""


def waits_in(module: str, path: Path) -> Iterator[str]:
    """Calls by which a thread may come to a standstill."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    for function, node in ((each, node) for each in functions for node in ast.walk(each)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BLOCKING:
            if isinstance(node.func.value, ast.Constant):
                continue  # "".join
            yield f"{module}.{function.name}: {node.func.attr}"


def test_every_place_that_waits_is_known():
    found = {wait for module, path in sources().items() for wait in waits_in(module, path)}
    assert found == set(WAITS)


@pytest.mark.parametrize("wait", WAITS)
def test_each_has_a_test_of_being_late_and_one_of_failing(wait):
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert set(WAITS[wait]) <= written
