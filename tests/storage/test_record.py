import pickle
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, CorruptBlockError, KVStoreError, UnsupportedFormatError
from kvstore.storage.encodings import Encoding
from kvstore.storage.extents import EXTENT_BYTES, blocks_per_extent, cut_extents
from kvstore.storage.key import KEY_BYTES, Kind, RecordKey
from kvstore.storage.record import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RECORD_BYTES,
    OVERHEAD_BYTES,
    Record,
    decode_record,
    encode_record,
)
from kvstore.storage.shape import RowShape
from tests.storage.builders import ALICE, SHAPE, noise, opaque, rows

KEYS = st.builds(
    RecordKey,
    st.sampled_from([Kind.INDEX, Kind.CATALOG, Kind.TOKENS]),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 16) - 1),
    st.integers(0, (1 << 32) - 1),
)


def resealed(key, data):
    """The record with a checksum that is right for what it says: what somebody with bad intentions writes."""
    seed = xxhash.xxh3_64_intdigest(key.pack())
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8], seed=seed))


def with_field(record, offset, layout, value):
    data = bytearray(encode_record(record))
    struct.pack_into(layout, data, offset, value)
    return resealed(record.key, bytes(data))


# ---- keys ----


@given(KEYS, KEYS)
def test_packed_keys_sort_like_keys(a, b):
    assert RecordKey.unpack(a.pack()) == a
    assert (a.pack() < b.pack()) == (a < b)
    assert len(a.pack()) == KEY_BYTES == 32


@pytest.mark.parametrize(
    "key",
    [
        RecordKey(Kind.TOKENS, ALICE, -1),
        RecordKey(Kind.TOKENS, ALICE, 1 << 64),
        RecordKey(Kind.TOKENS, ALICE, 0, 1 << 16),
        RecordKey(Kind.TOKENS, ALICE, 0, 0, 1 << 32),
        RecordKey(Kind.TOKENS, b"short", 0),
        RecordKey(Kind.TOKENS, "x" * 16, 0),
        RecordKey(Kind.TOKENS, ALICE, 1.5),
        RecordKey(99, ALICE, 0),
    ],
)
def test_a_key_out_of_range_is_refused(key):
    with pytest.raises(ConfigError):
        encode_record(Record(key, b""))


@pytest.mark.parametrize("data", [b"", b"\0" * 31, b"\0" * 33, b"\xff" * 32])
def test_bytes_that_are_no_key_are_refused(data):
    with pytest.raises(CorruptBlockError, match="the file is damaged"):
        RecordKey.unpack(data)


# ---- round trips ----


@given(KEYS, st.binary(max_size=300))
def test_a_record_comes_back_as_it_was(key, payload):
    record = Record(key, payload)
    data = encode_record(record)
    assert decode_record(key, data) == record
    assert len(data) == record.n_bytes == len(payload) + OVERHEAD_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_come_back_with_their_shape(dtype):
    record = rows(3, layer=2, shape=SHAPE._replace(dtype=dtype))
    found = decode_record(record.key, encode_record(record))
    assert found == record
    assert found.shape == SHAPE._replace(dtype=dtype)


def test_the_payload_is_a_view_of_the_bytes_given():
    data = encode_record(opaque())
    assert decode_record(opaque().key, data).payload.obj is data


def test_the_largest_record_is_sixteen_mebibytes():
    record = Record(opaque().key, bytes(MAX_PAYLOAD_BYTES))
    assert len(encode_record(record)) == MAX_RECORD_BYTES == 16 << 20
    with pytest.raises(ConfigError, match="split it"):
        encode_record(Record(opaque().key, bytes(MAX_PAYLOAD_BYTES + 1)))


def test_a_header_is_as_documented():
    data = encode_record(rows(7, layer=5))
    head = struct.unpack_from("<4sHHHBB7I16sQQ", data)
    assert head[:6] == (b"KVRC", 1, 0, 1, 1, 2)
    assert head[6:13] == (5, 7, 2, 16, 2, 8, 4)
    assert head[13:] == (ALICE, 1, SHAPE.raw_bytes)
    assert HEADER_BYTES == 72
    assert resealed(rows(7, layer=5).key, data) == data


@pytest.mark.parametrize(
    "record",
    [
        Record(rows().key, noise(SHAPE.raw_bytes)),
        Record(opaque().key, memoryview(bytes(64)).cast("f")),
        Record(opaque().key, b"x", SHAPE),
        Record(opaque().key, b"x", None, Encoding.INT8),
        Record(rows().key, noise(SHAPE.raw_bytes - 1), SHAPE),
        Record(rows().key, noise(SHAPE.raw_bytes), SHAPE, Encoding.INT8),
        Record(rows().key, b"", SHAPE._replace(n_tokens=0)),
        Record(rows().key, noise(SHAPE.raw_bytes), SHAPE._replace(n_blocks=3)),
        Record(rows().key, noise(SHAPE.raw_bytes), SHAPE._replace(dtype="float64")),
    ],
)
def test_a_record_whose_parts_disagree_is_not_written(record):
    with pytest.raises(ConfigError):
        encode_record(record)


# ---- damage ----


def test_any_flipped_bit_is_found():
    record = rows(1)
    data = bytearray(encode_record(record))
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        with pytest.raises((CorruptBlockError, UnsupportedFormatError)):
            decode_record(record.key, bytes(data))
        data[at] ^= 1 << at % 8
    assert decode_record(record.key, bytes(data)) == record


def test_any_length_but_the_right_one_is_found():
    data = encode_record(opaque())
    for n in range(len(data)):
        with pytest.raises(CorruptBlockError):
            decode_record(opaque().key, data[:n])
    with pytest.raises(CorruptBlockError):
        decode_record(opaque().key, data + b"\0")
    with pytest.raises(CorruptBlockError, match="where records have 80 to 16777216"):
        decode_record(opaque().key, bytes(MAX_RECORD_BYTES + 1))


@given(st.binary(max_size=400))
def test_garbage_is_never_a_record(data):
    with pytest.raises(KVStoreError):
        decode_record(opaque().key, data)


def test_a_record_is_bound_to_its_key():
    data = encode_record(opaque(1))
    for other in (opaque(2).key, opaque(1).key._replace(generation=2), opaque(1, sequence=b"\0" * 16).key):
        with pytest.raises(CorruptBlockError, match="checksum"):
            decode_record(other, data)
        with pytest.raises(CorruptBlockError, match="is another's"):
            decode_record(other, resealed(other, data))


@pytest.mark.parametrize(
    ("offset", "layout", "value", "error", "says"),
    [
        (4, "<H", 2, UnsupportedFormatError, "of format 2, known here is 1"),
        (4, "<H", 0, CorruptBlockError, "of format 0"),
        (6, "<H", 1, UnsupportedFormatError, "flags 0x0001"),
        (10, "<B", 9, UnsupportedFormatError, "encoding 9"),
        (11, "<B", 9, UnsupportedFormatError, "dtype 9"),
        (10, "<B", 4, CorruptBlockError, "bytes of INT8 where"),
        (11, "<B", 1, CorruptBlockError, "bytes of RAW where"),
        (20, "<I", 0, CorruptBlockError, "n_blocks"),
        (20, "<I", 3, CorruptBlockError, "equally"),
        (24, "<I", 0xFFFFFFFE, CorruptBlockError, "bytes of RAW where"),
        (28, "<I", 0, CorruptBlockError, "n_heads"),
        (32, "<I", 0xFFFFFFFF, CorruptBlockError, "bytes of RAW where"),
        (36, "<I", 0, CorruptBlockError, "value_dim"),
        (64, "<Q", 1 << 63, CorruptBlockError, "says that it holds 9223372036854775808 bytes"),
        (64, "<Q", 0, CorruptBlockError, "says that it holds 0 bytes"),
    ],
)
def test_a_right_checksum_does_not_make_a_header_true(offset, layout, value, error, says):
    record = rows(1)
    with pytest.raises(error, match=says):
        decode_record(record.key, with_field(record, offset, layout, value))


def test_an_opaque_record_with_a_shape_is_refused():
    with pytest.raises(CorruptBlockError, match="but no rows"):
        decode_record(opaque().key, with_field(opaque(), 28, "<I", 1))


def test_a_pickle_is_just_bytes():
    payload = pickle.dumps({"a": 1})
    assert bytes(decode_record(opaque().key, encode_record(Record(opaque().key, payload))).payload) == payload
    with pytest.raises(CorruptBlockError):
        decode_record(opaque().key, payload)


# ---- extents ----


@given(st.integers(1, 4 << 20), st.integers(0, 50), st.integers(0, 50))
def test_extents_are_large_where_there_is_that_much_and_cover_every_block_once(block_bytes, start, n):
    each = blocks_per_extent(block_bytes)
    assert block_bytes * each >= EXTENT_BYTES or block_bytes * (each + 1) > MAX_PAYLOAD_BYTES
    assert each == 1 or block_bytes * (each - 1) < EXTENT_BYTES
    extents = cut_extents(start, start + n, each)
    blocks = [block for extent in extents for block in extent]
    assert blocks == list(range(start - start % each, start + n)) if n else not extents
    assert all(extent.start % each == 0 and len(extent) <= each for extent in extents)


def test_a_block_that_fits_no_record_is_refused():
    with pytest.raises(ConfigError, match="lower block_tokens"):
        blocks_per_extent(17 << 20)


def test_shapes_say_what_they_hold():
    assert RowShape("float32", 1, 3, 2, 5, 7).raw_bytes == 3 * 2 * 12 * 4
    assert SHAPE.block_rows == 8
