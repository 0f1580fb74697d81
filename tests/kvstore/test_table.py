import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import HeapFullError, Schema
from kvstore.heap import Heap
from kvstore.new_rows import NewRows
from kvstore.table import Table
from tests.builders import BITS, bits, random, same_bits

DTYPES = ["float32", "float16", "bfloat16"]
# Quiet and signalling NaNs with payloads, infinities, zeros of both signs, subnormals, the largest number.
SPECIAL = {
    4: [0x7FC00001, 0x7F800001, -0x003FFEDD, 0x7F800000, -0x00800000, 0, -0x80000000, 1, 0x7F7FFFFF],
    2: {
        torch.float16: [0x7E01, 0x7C01, -0x01FD, 0x7C00, -0x0400, 0, -0x8000, 1, 0x7BFF],
        torch.bfloat16: [0x7FC1, 0x7F81, -0x003D, 0x7F80, -0x0080, 0, -0x8000, 1, 0x7F7F],
    },
}


def schema_of(dtype="float32", block_tokens=8, heads=2, value_dim=12):
    return Schema(1, heads, heads, 16, value_dim=value_dim, dtype=dtype, block_tokens=block_tokens)


def new_table(schema, limit_blocks=0):
    size = Heap(schema, 1).block_bytes
    heap = Heap(schema, 4 * size, limit_blocks * size)
    return Table(schema, heap), heap


def rows_of(schema, n, seed=0):
    keys = random((schema.n_kv_heads, n, schema.head_dim), 2 * seed, schema.torch_dtype)
    values = random((schema.n_kv_heads, n, schema.value_dim), 2 * seed + 1, schema.torch_dtype)
    return keys, values


def append(table, keys, values):
    table.append(NewRows(table._schema, keys, values))


def assert_holds(table, keys, values):
    table._check()
    assert table.n_rows == keys.shape[1]
    found_keys, found_values = table.read(0, table.n_rows)
    assert same_bits(found_keys, keys)
    assert same_bits(found_values, values)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), max_size=12), st.sampled_from([1, 8, 64]), st.sampled_from(DTYPES))
def test_rows_read_back_alike_however_they_were_cut_into_appends(chunks, block_tokens, dtype):
    schema = schema_of(dtype, block_tokens)
    table, heap = new_table(schema)
    keys, values = rows_of(schema, sum(chunks))
    at = 0
    for n in chunks:
        append(table, keys[:, at : at + n], values[:, at : at + n])
        at += n
    assert_holds(table, keys, values)
    assert heap.used_blocks == table.n_blocks == -(-sum(chunks) // block_tokens)


def transposed(x):
    """The same numbers with rows outermost in memory, as [n_tokens, n_heads, dim] tensors come from models."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(x):
    return torch.stack([x, torch.zeros_like(x)], dim=2).flatten(1, 2)[:, ::2]


def dims_reversed_in_memory(x):
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def one_head_expanded(x):
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("lay_out", [transposed, every_second, dims_reversed_in_memory, one_head_expanded])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_what_is_appended_do_not_matter(lay_out, dtype):
    schema = schema_of(dtype)
    table, _ = new_table(schema)
    keys, values = (lay_out(x) for x in rows_of(schema, 21))
    assert not keys.is_contiguous()
    append(table, keys, values)
    assert_holds(table, keys, values)


def test_appending_nothing_takes_nothing():
    schema = schema_of()
    table, heap = new_table(schema)
    append(table, *rows_of(schema, 0))
    assert (table.n_rows, table.n_blocks, heap.reserved_bytes) == (0, 0, 0)
    assert [x.shape[1] for x in table.read(0, 0)] == [0, 0]
    assert [len(x) for x in table.gather(0, torch.empty(0, dtype=torch.int64))] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_survives_even_of_nan_and_infinity(dtype):
    schema = schema_of(dtype, block_tokens=4)
    table, _ = new_table(schema)
    item = schema.torch_dtype.itemsize
    patterns = SPECIAL[4] if item == 4 else SPECIAL[2][schema.torch_dtype]
    pattern = torch.tensor(patterns, dtype=BITS[schema.torch_dtype]).view(schema.torch_dtype)
    values = pattern.repeat(2 * 9 * 12)[: 2 * 9 * 12].view(2, 9, 12)
    keys = rows_of(schema, 9)[0]
    append(table, keys, values)
    assert_holds(table, keys, values)
    order = torch.tensor([8, 0, 3, 3, 5])
    for head in range(2):
        assert same_bits(table.gather(head, order)[1], values[head, order])
    assert set(bits(pattern)) <= set(bits(table.read(0, 9)[1]))


def test_what_was_appended_is_copied():
    schema = schema_of()
    table, _ = new_table(schema)
    keys, values = rows_of(schema, 5)
    append(table, keys, values)
    expected = keys.clone(), values.clone()
    keys.zero_()
    values.zero_()
    assert_holds(table, *expected)


def test_what_was_read_is_a_copy():
    schema = schema_of()
    table, _ = new_table(schema)
    keys, values = rows_of(schema, 8)
    append(table, keys, values)
    for x in (*table.read(0, 8), *table.gather(0, torch.arange(8))):
        x.fill_(7)
    assert_holds(table, keys, values)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 36), max_size=50), st.integers(0, 1))
def test_gather_gives_rows_in_the_order_asked_for_with_repeats(rows, head):
    schema = schema_of()
    table, _ = new_table(schema)
    keys, values = rows_of(schema, 37)
    append(table, keys, values)
    found = table.gather(head, torch.tensor(rows, dtype=torch.int64))
    assert same_bits(found[0], keys[head, rows])
    assert same_bits(found[1], values[head, rows])


@given(st.integers(0, 37), st.integers(0, 37))
def test_any_range_can_be_read(start, stop):
    schema = schema_of()
    table, _ = new_table(schema)
    keys, values = rows_of(schema, 37)
    append(table, keys, values)
    start, stop = min(start, stop), max(start, stop)
    assert same_bits(table.read(start, stop)[0], keys[:, start:stop])
    assert same_bits(table.read(start, stop)[1], values[:, start:stop])


def test_keys_for_an_index_are_float32_of_what_is_stored():
    schema = schema_of("bfloat16")
    table, _ = new_table(schema)
    keys, values = rows_of(schema, 20)
    append(table, keys, values)
    assert torch.equal(torch.from_numpy(table.read_keys(3, 17)), keys[:, 3:17].float())


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 40))
def test_rows_after_a_truncate_are_the_new_ones(n, keep, more):
    schema = schema_of()
    table, heap = new_table(schema)
    keys, values = rows_of(schema, n)
    append(table, keys, values)
    keep = min(keep, n)
    table.truncate(keep)
    assert_holds(table, keys[:, :keep], values[:, :keep])
    assert heap.used_blocks == -(-keep // 8)
    new_keys, new_values = rows_of(schema, more, seed=1)
    append(table, new_keys, new_values)
    assert_holds(table, torch.cat([keys[:, :keep], new_keys], 1), torch.cat([values[:, :keep], new_values], 1))


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_a_fork_and_its_origin_write_without_seeing_each_other(n, keep, mine, its, fork_first):
    schema = schema_of()
    table, heap = new_table(schema)
    keys, values = rows_of(schema, n)
    append(table, keys, values)
    twin = table.fork()
    assert heap.used_blocks == table.n_blocks
    keep = min(keep, n)
    twin.truncate(keep)
    ours, theirs = rows_of(schema, mine, seed=1), rows_of(schema, its, seed=2)
    for who, rows in [(twin, theirs), (table, ours)] if fork_first else [(table, ours), (twin, theirs)]:
        append(who, *rows)
    assert_holds(table, torch.cat([keys, ours[0]], 1), torch.cat([values, ours[1]], 1))
    assert_holds(twin, torch.cat([keys[:, :keep], theirs[0]], 1), torch.cat([values[:, :keep], theirs[1]], 1))
    heap._check()
    table.truncate(0)
    assert_holds(twin, torch.cat([keys[:, :keep], theirs[0]], 1), torch.cat([values[:, :keep], theirs[1]], 1))
    twin.truncate(0)
    assert heap.used_blocks == 0


def test_a_fork_copies_a_block_only_when_one_of_the_two_writes_to_it():
    schema = schema_of()
    table, heap = new_table(schema)
    append(table, *rows_of(schema, 20))  # two sealed blocks and an open one
    twin = table.fork()
    assert heap.used_blocks == 3
    append(twin, *rows_of(schema, 1, seed=1))
    assert heap.used_blocks == 4
    assert [a == b for a, b in zip(table.key_addresses, twin.key_addresses, strict=True)][:3] == [True, True, False]
    append(table, *rows_of(schema, 1, seed=2))  # the only holder by now
    assert heap.used_blocks == 4


def test_a_fork_of_sealed_blocks_copies_nothing():
    schema = schema_of()
    table, heap = new_table(schema)
    append(table, *rows_of(schema, 16))
    twin = table.fork()
    append(twin, *rows_of(schema, 1, seed=1))
    assert heap.used_blocks == 3


def test_a_full_heap_leaves_the_table_as_it_was():
    schema = schema_of()
    table, heap = new_table(schema, limit_blocks=3)
    keys, values = rows_of(schema, 12)
    append(table, keys, values)
    with pytest.raises(HeapFullError):
        append(table, *rows_of(schema, 13, seed=1))
    assert_holds(table, keys, values)
    twin = table.fork()
    with pytest.raises(HeapFullError):
        append(twin, *rows_of(schema, 12, seed=1))  # one block to copy, one more
    assert_holds(twin, keys, values)
    assert heap.used_blocks == 2
    more = rows_of(schema, 4, seed=1)
    append(twin, *more)
    assert_holds(twin, torch.cat([keys, more[0]], 1), torch.cat([values, more[1]], 1))
    assert_holds(table, keys, values)


def test_addresses_stay_right_as_the_table_grows():
    schema = schema_of(block_tokens=1)
    table, _ = new_table(schema)
    keys, values = rows_of(schema, 70)
    for row in range(70):
        append(table, keys[:, row : row + 1], values[:, row : row + 1])
        table._check()
    view = table.key_view()
    assert (view.n_rows, view.block_tokens, view.head_dim, view.n_kv_heads) == (70, 1, 16, 2)
    assert len(view.block_addresses) >= 70
    assert_holds(table, keys, values)
