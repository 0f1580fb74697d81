"""Many operations, much more than memory holds: what is counted equals a recount, and what comes back is right."""

import random
import resource
from collections import Counter
from pathlib import Path

import pytest

from kvstore import KVStore
from kvstore.row_records import row_key
from kvstore.storage.key import Kind
from kvstore.storage.record import encode_record
from tests.builders import append, make_query, same_bits
from tests.kvstore.faults.workload import ROW_BYTES, SCHEMA, foresee, found, perform, plan, rows_of, run, small

MOST_ROWS = 400


def next_op(model, chance):
    """An operation after which no sequence has more rows than memory holds three times."""
    op = plan(model, chance)
    if op[0] == "step" and len(model.get(op[1], [])) > MOST_ROWS:
        return ("truncate", op[1], chance.randrange(50))
    return op


def recount(store):
    """Count everything anew that a store counts as it goes; flushes."""
    store.flush()
    store._check()
    directory, archive = store._persistence._directory, store._persistence._archive
    archive._check()
    directory.tier._check()
    tables = [table for seq in store._sequences.values() for table in seq._tables]
    blocks = Counter(table.block(i).key_address for table in tables for i in range(table.n_blocks))
    heap, stats = store.heap, store.stats()
    assert len(blocks) == heap.used_blocks == stats.blocks
    assert {address: n - 1 for address, n in blocks.items() if n > 1} == heap._extra_holders
    assert stats.heap_used_bytes == heap.used_blocks * heap.block_bytes <= stats.heap_reserved_bytes
    assert stats.rows == sum(len(seq) for seq in store._sequences.values())
    keys = list(directory.tier.iterate())
    sizes = [len(encode_record(record)) for record in directory.tier.get_many(keys)]
    assert (stats.disk_bytes, stats.queued_bytes) == (sum(sizes), 0)
    assert set(keys) == set(archive.named_keys()) & set(keys)  # nothing that nobody names
    named = {row_key(ref, layer) for e in archive.entries.values() for layer in (0, 1) for ref in e.layers[layer]}
    assert named == {key for key in keys if key.kind == Kind.ROWS}
    store._prefixes._check()


@pytest.mark.parametrize("n", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_is_counted_equals_a_recount_after_many_operations(tmp_path, n):
    chance, model = random.Random(n), {}
    config = small(heap_bytes=MOST_ROWS * 3 * ROW_BYTES)
    with KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        for i in range(n):
            op = next_op(model, chance)
            perform(store, op)
            model = foresee(model, op)
            if i % 50 == 0:
                recount(store)
        recount(store)
        assert found(store) == model
        assert store.check() == []
    assert sorted(path.suffix for path in (tmp_path / "s").glob("spill*")) == [".mdb", ".mdb-lock"]


def resident_bytes():
    """Memory of this process that is not on loan from the page cache."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


@pytest.mark.parametrize("n", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_stays_flat_over_many_steps(tmp_path, n):
    with KVStore.open(tmp_path / "s", SCHEMA, small(flush_rows=16)) as store:
        rows, seen = rows_of(run(0, 1)), []
        seq, q = store.create("a"), make_query(SCHEMA, 1)
        for i in range(n):
            append(seq, rows)
            if len(seq) == 300:
                seq.attend(1, q)
                seq.truncate(20)
            if i % (n // 10) == n // 10 - 1:
                store.flush()
                seen.append(resident_bytes())
        assert max(seen[5:]) - min(seen[2:5]) < (4 << 20) + 20 * n  # bytes a step, generously
        assert store._persistence._directory.tier.file_bytes < 2 << 20


def answers(seq, seed):
    """Rows, best rows with their scores, and attention, of all layers."""
    q = make_query(SCHEMA, seed)
    found = []
    for layer in range(SCHEMA.n_layers):
        best = seq.topk(layer, 0, q[0], 20)
        found += [*seq.read(layer), best.positions, best.scores, seq.attend(layer, q)]
    return found


def test_32_interleaved_sequences_that_all_went_to_disk_answer_like_each_alone(tmp_path):
    """Seen in the field: a session that came back from the disk answered with another session's content."""
    names, alone = [f"s{i}" for i in range(32)], {}
    for i, name in enumerate(names):
        with KVStore(SCHEMA, small()) as store:
            seq, alone[name] = store.create(name), []
            for turn in range(3):
                append(seq, rows_of(run(13 * i + 40 * turn, 40)))
                alone[name].append(answers(seq, turn))
    with KVStore.open(tmp_path / "s", SCHEMA, small(heap_bytes=150 * ROW_BYTES)) as store:
        for turn in range(3):
            for i, name in enumerate(names):
                append(store[name] if turn else store.create(name), rows_of(run(13 * i + 40 * turn, 40)))
            for name in random.Random(turn).sample(names, 32):
                for ours, theirs in zip(answers(store[name], turn), alone[name][turn], strict=True):
                    assert same_bits(ours, theirs) if ours.is_floating_point() else ours.tolist() == theirs.tolist()
            assert len(store._sequences) <= 3
            store._check()
        assert store.stats().unloads > 150
        assert store.check() == []
