import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, CorruptStoreError, KVStoreError, UnsupportedFormatError
from kvstore.storage import catalog
from kvstore.storage.catalog import (
    MAX_PAYLOAD_BYTES,
    CatalogEntry,
    ExtentRef,
    IndexRef,
    decode_entry,
    encode_entry,
)
from tests.storage.builders import ALICE, BOB

ENTRY = CatalogEntry(
    name="book",
    sequence=ALICE,
    generation=3,
    n_rows=100,
    first_row=2,
    budget=0.1,
    runs=((0, -2), (50, 1000)),
    layers=(
        (ExtentRef(BOB, 1, 0, 2, 64), ExtentRef(ALICE, 3, 2, 1, 32), ExtentRef(ALICE, 3, 3, 1, 4)),
        (ExtentRef(ALICE, 3, 0, 4, 128),),
    ),
    indexes=(IndexRef(BOB, 1, "pq", 1, 2, 4, 36), None),
)
EMPTY = CatalogEntry("empty", BOB, 0, 0, 0, None, (), ((), ()), (None, None))


def packed(**values):
    """The entry as bytes, with values that `encode_entry` would refuse."""
    entry = ENTRY._replace(**values)
    return msgpack.packb([1, *entry])


@pytest.mark.parametrize("entry", [ENTRY, EMPTY, ENTRY._replace(budget=20, name="ein Bücherwürmchen 🐛" * 10)])
def test_an_entry_comes_back_as_it_was(entry):
    assert decode_entry(encode_entry(entry)) == entry
    assert decode_entry(memoryview(encode_entry(entry))) == entry
    assert type(decode_entry(encode_entry(entry)).budget) is type(entry.budget)


@st.composite
def entries(draw):
    block_rows, n_layers = draw(st.sampled_from([1, 4, 64])), draw(st.integers(0, 4))
    n_rows = draw(st.integers(0, 300))
    layers = []
    for _ in range(n_layers):
        extents, rows, block = [], 0, 0
        while rows < n_rows:
            full = draw(st.integers(1, 8))
            ref = ExtentRef(
                draw(st.sampled_from([ALICE, BOB])), draw(st.integers(0, 9)), block, full, full * block_rows
            )
            extents.append(ref)
            rows, block = rows + ref.n_tokens, block + full
        layers.append(tuple(extents))
    offsets = sorted(draw(st.sets(st.integers(0, n_rows - 1), max_size=5)) | {0}) if n_rows else []
    runs = tuple((offset, draw(st.integers(-(1 << 63), (1 << 63) - 1))) for offset in offsets)
    budget = draw(st.none() | st.integers(1, 1 << 40) | st.floats(0, 1, exclude_min=True))
    name = draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
    return CatalogEntry(
        name, ALICE, draw(st.integers(0, (1 << 64) - 1)), n_rows, 0, budget, runs, tuple(layers), (None,) * n_layers
    )


@given(entries())
def test_every_entry_comes_back_as_it_was(entry):
    assert decode_entry(encode_entry(entry)) == entry


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": ""}, "the name"),
        ({"name": b"book"}, "the name"),
        ({"name": "x" * 4097}, "str len|4096|exceeds"),
        ({"sequence": b"short"}, "not a uuid"),
        ({"sequence": "x" * 16}, "not a uuid"),
        ({"generation": -1}, "generation is -1"),
        ({"generation": True}, "generation is True"),
        ({"n_rows": 101.0}, "n_rows is 101.0"),
        ({"n_rows": 129}, "rows, though there are 129"),
        ({"n_rows": 64}, "an extent from row 64 on, though there are 64 rows|offset"),
        ({"n_rows": 1 << 63}, "n_rows"),
        ({"first_row": -3}, "first_row"),
        ({"budget": 0}, "a budget 0"),
        ({"budget": 1.5}, "a budget 1.5"),
        ({"budget": float("nan")}, "a budget nan"),
        ({"budget": True}, "a budget True"),
        ({"budget": "all"}, "a budget 'all'"),
        ({"runs": ()}, "0 runs of positions for 100 rows"),
        ({"runs": ((1, 0),)}, "a run from row 1 on"),
        ({"runs": ((0, 0), (0, 5))}, "a run from row 0 on"),
        ({"runs": ((0, 0), (100, 5))}, "offset of a run"),
        ({"runs": ((0, 0, 0),)}, "a run is"),
        ({"runs": ((0, 1.0),)}, "position of a run"),
        ({"runs": 5}, "runs are no list"),
        ({"layers": (ENTRY.layers[0],)}, "1 layers, but 2 indexes"),
        ({"layers": ((), ENTRY.layers[1])}, "extents with 0 rows"),
        ({"layers": (((ALICE, 3, 1, 4, 128),),) * 2}, "begins at block 1, where 0 is due"),
        ({"layers": (((ALICE, 3, 0, 3, 128),),) * 2}, "128 rows in 3 blocks"),
        ({"layers": (((ALICE, 3, 0, 0, 128),),) * 2}, "n_blocks is 0"),
        ({"layers": (((ALICE, 3, 0, 4, 0),),) * 2}, "n_tokens is 0"),
        ({"layers": (((ALICE, 3, 0, 4),),) * 2}, "an extent is"),
        ({"layers": ((ALICE,),) * 2}, "an extent is"),
        ({"indexes": (IndexRef(BOB, 1, "pq", 1, 2, 4, 101), None)}, "an index of rows 4 to 101"),
        ({"indexes": (IndexRef(BOB, 1, "pq", 1, 2, 40, 36), None)}, "an index of rows 40 to 36"),
        ({"indexes": (IndexRef(BOB, 1, "", 1, 2, 4, 36), None)}, "the kind of an index"),
        ({"indexes": (IndexRef(BOB, 1, "pq", 1, 0, 4, 36), None)}, "n_parts"),
        ({"indexes": (5, None)}, "an index is"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_both_ways(values, says):
    with pytest.raises(CorruptStoreError, match=says):
        decode_entry(packed(**values))
    with pytest.raises(ConfigError):
        encode_entry(ENTRY._replace(**values))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb({"a": 1}),
        msgpack.packb([]),
        msgpack.packb(5),
        msgpack.packb([1] * 10),
        msgpack.packb([1.0, *ENTRY]),
        msgpack.packb([0, *ENTRY]),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        encode_entry(ENTRY) + b"\0",
        encode_entry(ENTRY)[:-1],
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"cposix\nsystem\n(S'true'\ntR.",
        bytes(MAX_PAYLOAD_BYTES + 1),
    ],
)
def test_garbage_is_refused(data):
    with pytest.raises(CorruptStoreError, match="catalog entry"):
        decode_entry(data)


@given(st.binary(max_size=200))
def test_bytes_are_an_entry_or_an_error(data):
    with pytest.raises(KVStoreError):
        decode_entry(data)


def test_every_flipped_byte_is_an_entry_or_an_error():
    data = bytearray(encode_entry(ENTRY))
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            data[at] ^= flip
            with contextlib.suppress(CorruptStoreError, UnsupportedFormatError):
                assert isinstance(decode_entry(bytes(data)), CatalogEntry)
            data[at] ^= flip


def test_a_newer_entry_says_so():
    with pytest.raises(UnsupportedFormatError, match="of version 2, known here is 1"):
        decode_entry(msgpack.packb([2, "something", "else"]))


def test_a_name_that_is_no_text_for_others_is_refused():
    with pytest.raises(ConfigError, match="cannot be put into the catalog"):
        encode_entry(ENTRY._replace(name="\ud800"))


def test_a_budget_that_is_a_function_cannot_be_kept():
    with pytest.raises(ConfigError, match="a budget"):
        encode_entry(ENTRY._replace(budget=lambda layer, head, n: None))


def test_an_entry_larger_than_a_record_is_refused(monkeypatch):
    data = encode_entry(ENTRY)
    monkeypatch.setattr(catalog, "MAX_PAYLOAD_BYTES", len(data) - 1)
    with pytest.raises(ConfigError, match=f"has {len(data)} bytes, above {len(data) - 1}"):
        encode_entry(ENTRY)
    with pytest.raises(CorruptStoreError, match="above"):
        decode_entry(data)
