"""The catalog: what a store must know of a sequence to open it again, as msgpack. One record a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from kvstore.errors import ConfigError, CorruptStoreError, UnsupportedFormatError
from kvstore.storage.key import SEQUENCE_BYTES
from kvstore.storage.record import MAX_PAYLOAD_BYTES

Budget = float | int | None  # as `Sequence.budget`; a rule that is a function cannot be stored
VERSION = 1
MAX_NAME_BYTES = 4096
MAX_KIND_BYTES = 64
MAX_LAYERS = 1 << 16
MAX_ITEMS = 1 << 20  # of any list in an entry
_U32, _U64, _I63 = 1 << 32, 1 << 64, 1 << 63


class ExtentRef(NamedTuple):
    """Where blocks of a table lie: the ROWS record `number` (its first block) of the sequence that owns it.

    A fork refers to records of the sequence it came from.
    """

    sequence: bytes
    generation: int
    number: int
    n_blocks: int
    n_tokens: int


class IndexRef(NamedTuple):
    """The stored index of a table: INDEX records 0 .. n_parts - 1 of the sequence that owns it.

    It covers rows first_row .. stop_row - 1; `version` is the layout of its bytes, which the index kind knows.
    """

    sequence: bytes
    generation: int
    kind: str
    version: int
    n_parts: int
    first_row: int
    stop_row: int


class CatalogEntry(NamedTuple):
    """One sequence.

    Attributes:
        name: that the user gave it.
        sequence: uuid, 16 bytes; generation: of the name.
        n_rows: committed; first_row: the first that is not padding.
        budget: as `Sequence.budget`.
        runs: (row offset, RoPE position) where a run of consecutive positions begins, ascending.
        layers: the extents of each table, in order, that hold at least n_rows rows and no extent too many.
        indexes: of each table, or None.
    """

    name: str
    sequence: bytes
    generation: int
    n_rows: int
    first_row: int
    budget: Budget
    runs: Sequence[tuple[int, int]]
    layers: Sequence[Sequence[ExtentRef]]
    indexes: Sequence[IndexRef | None]


def encode_entry(entry: CatalogEntry) -> bytes:
    """Return an entry as bytes; raises `ConfigError` for one that `decode_entry` would refuse."""
    try:
        plain = [
            VERSION,
            *entry[:6],
            _lists(entry.runs),
            [_lists(refs) for refs in entry.layers],
            _lists(entry.indexes),
        ]
        _entry(plain)
        data: bytes = msgpack.packb(plain, use_bin_type=True)
    except (_InvalidError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"sequence {entry.name!r} cannot be put into the catalog: {error}") from error
    if len(data) > MAX_PAYLOAD_BYTES:
        raise ConfigError(f"the catalog entry of {entry.name!r} has {len(data)} bytes, above {MAX_PAYLOAD_BYTES}")
    return data


def decode_entry(data: bytes | memoryview) -> CatalogEntry:
    """Return the entry in bytes that nobody vouches for.

    Raises `UnsupportedFormatError` for a newer version, `CorruptStoreError` for anything that is not just an entry.
    """
    if len(data) > MAX_PAYLOAD_BYTES:
        raise CorruptStoreError(f"a catalog entry of {len(data)} bytes, above {MAX_PAYLOAD_BYTES}; restore the store")
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=MAX_NAME_BYTES,
            max_bin_len=SEQUENCE_BYTES,
        )
    except Exception as error:  # msgpack raises many classes, and all mean this
        raise CorruptStoreError(f"a catalog entry is damaged: {type(error).__name__}: {error}") from None
    if isinstance(plain, list) and plain and type(plain[0]) is int and plain[0] > VERSION:
        raise UnsupportedFormatError(f"a catalog entry of version {plain[0]}, known here is {VERSION}; use a newer one")
    try:
        return _entry(plain)
    except _InvalidError as error:
        raise CorruptStoreError(f"a catalog entry is wrong: {error}; drop the sequence, or restore the store") from None


class _InvalidError(Exception):
    """Says what is wrong with plain values."""


def _lists(items: Sequence[Sequence[Any] | None]) -> list[list[Any] | None]:
    return [None if item is None else list(item) for item in items]


def _entry(plain: Any) -> CatalogEntry:
    version, name, sequence, generation, n_rows, first_row, budget, runs, layers, indexes = _items(
        plain, 10, "an entry"
    )
    if version != VERSION or type(version) is not int:
        raise _InvalidError(f"version {version!r}")
    entry = CatalogEntry(
        _text(name, MAX_NAME_BYTES, "the name"),
        _uuid(sequence),
        _whole(generation, _U64, "generation"),
        _whole(n_rows, _I63, "n_rows"),
        _whole(first_row, _I63, "first_row"),
        _budget(budget),
        _runs(runs, n_rows),
        tuple(_extents(extents, n_rows) for extents in _list(layers, MAX_LAYERS, "layers")),
        tuple(_index(index, n_rows) for index in _list(indexes, MAX_LAYERS, "indexes")),
    )
    if len(entry.layers) != len(entry.indexes):
        raise _InvalidError(f"{len(entry.layers)} layers, but {len(entry.indexes)} indexes")
    return entry


def _extents(plain: Any, n_rows: int) -> tuple[ExtentRef, ...]:
    found, next_block, rows = [], 0, 0
    for item in _list(plain, MAX_ITEMS, "extents"):
        sequence, generation, number, n_blocks, n_tokens = _items(item, 5, "an extent")
        extent = ExtentRef(
            _uuid(sequence),
            _whole(generation, _U64, "generation of an extent"),
            _whole(number, _U32, "number of an extent"),
            _whole(n_blocks, _U32, "n_blocks", 1),
            _whole(n_tokens, _U32, "n_tokens", 1),
        )
        if number != next_block:
            raise _InvalidError(f"an extent begins at block {number}, where {next_block} is due")
        if n_tokens % n_blocks:
            raise _InvalidError(f"{n_tokens} rows in {n_blocks} blocks")
        if rows >= n_rows:
            raise _InvalidError(f"an extent from row {rows} on, though there are {n_rows} rows")
        next_block, rows = next_block + n_blocks, rows + n_tokens
        found.append(extent)
    if rows < n_rows:
        raise _InvalidError(f"extents with {rows} rows, though there are {n_rows}")
    return tuple(found)


def _index(plain: Any, n_rows: int) -> IndexRef | None:
    if plain is None:
        return None
    sequence, generation, kind, version, n_parts, first_row, stop_row = _items(plain, 7, "an index")
    ref = IndexRef(
        _uuid(sequence),
        _whole(generation, _U64, "generation of an index"),
        _text(kind, MAX_KIND_BYTES, "the kind of an index"),
        _whole(version, _U32, "version of an index"),
        _whole(n_parts, _U32, "n_parts", 1),
        _whole(first_row, _I63, "first_row of an index"),
        _whole(stop_row, _I63, "stop_row"),
    )
    if not first_row <= stop_row <= n_rows:
        raise _InvalidError(f"an index of rows {first_row} to {stop_row}, though there are {n_rows}")
    return ref


def _runs(plain: Any, n_rows: int) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for item in _list(plain, MAX_ITEMS, "runs"):
        offset, position = _items(item, 2, "a run")
        _whole(offset, max(1, n_rows), "offset of a run")
        _whole(position, _I63, "position of a run", -_I63)
        if offset <= runs[-1][0] if runs else offset != 0:
            raise _InvalidError(f"a run from row {offset} on, after {runs[-1:] or 'none'}")
        runs.append((offset, position))
    if bool(runs) != (n_rows > 0):
        raise _InvalidError(f"{len(runs)} runs of positions for {n_rows} rows")
    return tuple(runs)


def _budget(plain: Any) -> Budget:
    if plain is None or (type(plain) is int and 0 < plain < _I63) or (type(plain) is float and 0.0 < plain <= 1.0):
        budget: Budget = plain
        return budget
    raise _InvalidError(f"a budget {plain!r}, which is no number of rows, no share of them and not None")


def _whole(value: Any, stop: int, what: str, start: int = 0) -> int:
    if type(value) is not int or not start <= value < stop:
        raise _InvalidError(f"{what} is {value!r}, not an integer in {start} .. {stop - 1}")
    return value


def _text(value: Any, max_bytes: int, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode(errors="surrogatepass")) <= max_bytes:
        raise _InvalidError(f"{what} is {str(value)[:80]!r}, not a text of 1 to {max_bytes} bytes")
    return value


def _uuid(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != SEQUENCE_BYTES:
        raise _InvalidError(f"a sequence is {value!r}, not a uuid of {SEQUENCE_BYTES} bytes")
    return value


def _list(value: Any, max_items: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > max_items:
        raise _InvalidError(f"{what} are no list of at most {max_items}")
    return value


def _items(value: Any, n: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != n:
        raise _InvalidError(f"{what} is {str(value)[:80]!r}, not {n} values")
    return value
