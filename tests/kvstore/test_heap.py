import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import HeapFullError, Schema
from kvstore.advice import adviser
from kvstore.heap import ALIGN_BYTES, Heap
from kvstore.prefault import prefault
from tests.storage.processes import run_python

SCHEMA = Schema(n_layers=1, n_q_heads=2, n_kv_heads=2, head_dim=16, block_tokens=8)
ODD = Schema(n_layers=1, n_q_heads=1, n_kv_heads=1, head_dim=3, value_dim=5, dtype="bfloat16", block_tokens=1)


def small_heap(limit_blocks=0, arena_blocks=4, schema=SCHEMA):
    size = Heap(schema, 1).block_bytes
    return Heap(schema, arena_blocks * size, limit_blocks * size)


def spans(blocks):
    """Byte ranges of keys and of values of each block, sorted."""
    tensors = [x for block in blocks for x in (block.keys, block.values)]
    return sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors)


@pytest.mark.parametrize("schema", [SCHEMA, ODD])
def test_blocks_have_the_shape_of_the_schema_and_do_not_overlap(schema):
    heap = small_heap(schema=schema)
    blocks = heap.allocate(11)
    for block in blocks:
        assert block.keys.shape == (schema.n_kv_heads, schema.block_tokens, schema.head_dim)
        assert block.values.shape == (schema.n_kv_heads, schema.block_tokens, schema.value_dim)
        assert block.keys.dtype == block.values.dtype == schema.torch_dtype
        assert block.keys.is_contiguous()
        assert block.values.is_contiguous()
        assert (block.key_address, block.value_address) == (block.keys.data_ptr(), block.values.data_ptr())
        assert block.key_address % ALIGN_BYTES == 0
    ranges = spans(blocks)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


def test_memory_is_taken_one_arena_at_a_time():
    heap = small_heap(arena_blocks=4)
    assert heap.reserved_bytes == 0
    heap.allocate(1)
    assert heap.reserved_bytes == 4 * heap.block_bytes
    heap.allocate(3)
    assert heap.reserved_bytes == 4 * heap.block_bytes
    heap.allocate(5)
    assert heap.reserved_bytes == 12 * heap.block_bytes
    assert heap.used_bytes == 9 * heap.block_bytes


def test_an_arena_smaller_than_a_block_holds_one_block():
    heap = Heap(SCHEMA, arena_bytes=1)
    heap.allocate(3)
    assert heap.reserved_bytes == 3 * heap.block_bytes


def test_a_full_heap_hands_out_nothing_and_stays_as_it_was():
    heap = small_heap(limit_blocks=5, arena_blocks=2)
    held = heap.allocate(3)
    before = (heap.used_bytes, heap.reserved_bytes)
    with pytest.raises(HeapFullError, match=r"3 more blocks|more blocks of \d+ bytes.*raise heap_bytes"):
        heap.allocate(3)
    assert (heap.used_bytes, heap.reserved_bytes) == before
    heap._check()
    held += heap.allocate(2)
    assert len({block.key_address for block in held}) == 5


def test_the_limit_is_reached_to_the_last_block_but_not_passed():
    heap = small_heap(limit_blocks=5, arena_blocks=4)
    heap.allocate(5)
    assert heap.reserved_bytes == 5 * heap.block_bytes
    with pytest.raises(MemoryError, match="1 more"):
        heap.allocate(1)


def test_a_limit_below_one_block_leaves_room_for_none():
    heap = Heap(SCHEMA, arena_bytes=1 << 20, limit_bytes=1)
    with pytest.raises(HeapFullError):
        heap.allocate(1)
    assert heap.allocate(0) == []


def test_a_freed_block_is_handed_out_again_before_memory_is_taken():
    heap = small_heap(arena_blocks=4)
    first = heap.allocate(4)
    heap.free(first)
    again = heap.allocate(4)
    assert {b.key_address for b in again} == {b.key_address for b in first}
    assert heap.reserved_bytes == 4 * heap.block_bytes


def test_a_shared_block_is_free_only_when_every_holder_gave_it_up():
    heap = small_heap()
    [block] = heap.allocate(1)
    assert not heap.is_shared(block)
    heap.share([block])
    heap.share([block])
    heap.free([block])
    assert heap.is_shared(block)
    heap.free([block])
    assert not heap.is_shared(block)
    assert heap.used_blocks == 1
    heap.free([block])
    assert heap.used_blocks == 0


def test_close_gives_everything_back():
    heap = small_heap()
    heap.share(heap.allocate(3))
    heap.close()
    assert (heap.used_bytes, heap.reserved_bytes, heap.used_blocks) == (0, 0, 0)
    heap._check()


def test_writing_to_one_block_changes_no_other():
    heap = small_heap(schema=ODD)
    blocks = heap.allocate(6)
    for i, block in enumerate(blocks):
        block.keys.fill_(i)
        block.values.fill_(-i)
    for i, block in enumerate(blocks):
        assert torch.equal(block.keys, torch.full_like(block.keys, i))
        assert torch.equal(block.values, torch.full_like(block.values, -i))


MOVES = st.lists(st.tuples(st.sampled_from(["allocate", "free", "share"]), st.integers(0, 5)), max_size=60)


@settings(max_examples=60)
@given(MOVES)
def test_accounting_equals_a_recount_after_any_moves(moves):
    heap = small_heap(limit_blocks=9, arena_blocks=2)
    held = []  # one entry a holder
    for move, n in moves:
        if move == "allocate":
            if len({b.key_address for b in held}) + n > 9:
                with pytest.raises(HeapFullError):
                    heap.allocate(n)
            else:
                fresh = heap.allocate(n)
                assert not {b.key_address for b in fresh} & {b.key_address for b in held}
                held += fresh
        elif held and move == "free":
            heap.free([held.pop(n % len(held))])
        elif held:
            heap.share([held[n % len(held)]])
            held.append(held[n % len(held)])
        heap._check()
        addresses = [b.key_address for b in held]
        assert heap.used_blocks == len(set(addresses))
        assert heap.used_bytes == heap.used_blocks * heap.block_bytes <= heap.reserved_bytes
        assert all(heap.is_shared(b) == (addresses.count(b.key_address) > 1) for b in held)


@pytest.mark.parametrize("n", [0, 1, 5, 40])
def test_memory_touched_in_advance_keeps_what_is_in_it(n):
    heap = Heap(SCHEMA, 8 * SCHEMA.block_bytes)
    first = heap.allocate(3)
    for i, block in enumerate(first):
        block.keys.fill_(i + 1)
        block.values.fill_(-i)
    heap.prefault(n)
    heap._check()
    assert heap.reserved_bytes >= heap.used_bytes + n * heap.block_bytes
    blocks = heap.allocate(n)
    for block in blocks:
        block.keys.zero_()
    for i, block in enumerate(first):
        assert (block.keys == i + 1).all()
        assert (block.values == -i).all()


def test_what_the_system_cannot_touch_is_left_alone():
    room = torch.arange(5000, dtype=torch.uint8)
    before = room.clone()
    for thread in (prefault([]), prefault([(room, 0, 10)]), prefault([(room, 3, 5000)])):
        if thread is not None:
            thread.join()
    assert room.equal(before)


ASKED = """
import sys
from pathlib import Path
from kvstore.heap import Heap
from tests.kvstore.test_heap import SCHEMA
heap = Heap(SCHEMA, 8 << 20, huge_pages=sys.argv[1] == "True")
block = heap.allocate(heap._arena_blocks // 2)[-1]
inside = False
for line in Path("/proc/self/smaps").read_text().splitlines():
    first = line.split()[0]
    if "-" in first and not first.endswith(":"):
        low, high = (int(end, 16) for end in first.split("-"))
        inside = low <= block.key_address < high
    elif inside and first == "VmFlags:":
        print("hg" in line.split())
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize("huge_pages", [True, False])
def test_arenas_ask_for_huge_pages_as_told(huge_pages):
    """In a process of its own: memory that the allocator uses again keeps what was asked for it."""
    assert run_python(ASKED, huge_pages).strip() == str(huge_pages)


def test_a_system_that_takes_no_advice_does_without(monkeypatch):
    monkeypatch.setattr("kvstore.advice.sys.platform", "other")
    assert adviser() is None
    heap = Heap(SCHEMA, 8 << 20)
    heap.allocate(1)[0].keys.fill_(3)
    heap._check()
    assert prefault([(torch.zeros(9000, dtype=torch.uint8), 0, 9000)]) is None
