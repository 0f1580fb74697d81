"""Every wrong call raises its documented error, names what was wrong, and changes nothing."""

import numpy as np
import pytest
import torch

from kvstore import (
    ConfigError,
    InvalidQueryError,
    KVStore,
    KVStoreError,
    LayerNotFoundError,
    NonFiniteError,
    SchemaMismatchError,
    SequenceExistsError,
    SequenceNotFoundError,
)
from tests.builders import SCHEMA, contents, fill, flat_config, pq_config, random

INF, NAN = torch.inf, torch.nan
ONE, GROUP, TOKEN = random((16,), 1), random((2, 16), 2), random((4, 16), 3)
ROWS = random((2, 3, 16), 4), random((2, 3, 16), 5)


def spoiled(x, number):
    """A copy of x with one number replaced."""
    x = x.clone()
    x.view(-1)[x.numel() // 2] = number
    return x


class World:
    """A store with an indexed and a short sequence, a dropped one, and one of another store."""

    def __init__(self, config):
        self.store = KVStore(SCHEMA, config)
        self.book, self.note = self.store.create("book"), self.store.create("note")
        gone = self.store.create("gone")
        for seq, n in ((self.book, 100), (self.note, 5), (gone, 3)):
            fill(seq, n)
        self.gone = gone
        self.store.drop("gone")
        self.empty = self.store.create("empty")
        self.foreign = KVStore(SCHEMA, config).create("book")
        fill(self.foreign, 50)

    def append(self, keys, values, positions=None, layer=0):
        with self.book.step():
            self.book.append(layer, keys, values, positions)

    def topk(self, q=ONE, k=3, layer=0, head=0, **options):
        return self.store.topk(layer, head, q, k, **({"sequence": "book"} | options))

    def topk_heads(self, q, k=3, layer=0, **options):
        return self.store.topk_heads(layer, q, k, sequence="book", **options)

    def attend(self, q=TOKEN, layer=0, **options):
        return self.book.attend(layer, q, **options)

    def attend_all(self, q, layer=0, who=None, **options):
        return self.store.attend(layer, [self.book, self.note] if who is None else who, q, **options)

    def fetch(self, rows, layer=0, head=0):
        return self.book.fetch(layer, head, rows)


KEYS, VALUES = ROWS
BAD_APPENDS = [
    ("keys with NaN", lambda w: w.append(spoiled(KEYS, NAN), VALUES), NonFiniteError, "keys hold nan at"),
    ("keys with inf", lambda w: w.append(spoiled(KEYS, INF), VALUES), NonFiniteError, "keys hold inf at"),
    ("keys with -inf", lambda w: w.append(spoiled(KEYS, -INF), VALUES), NonFiniteError, "keys hold -inf at"),
    (
        "numpy keys",
        lambda w: w.append(KEYS.numpy(), VALUES),
        SchemaMismatchError,
        "keys must be .* not ndarray",
    ),
    ("numpy values", lambda w: w.append(KEYS, VALUES.numpy()), SchemaMismatchError, "values must be a torch.Tensor"),
    ("keys in a list", lambda w: w.append(KEYS.tolist(), VALUES), SchemaMismatchError, "not list"),
    ("no keys", lambda w: w.append(None, VALUES), SchemaMismatchError, "not NoneType"),
    ("half keys", lambda w: w.append(KEYS.half(), VALUES), SchemaMismatchError, "the schema holds float32"),
    ("double values", lambda w: w.append(KEYS, VALUES.double()), SchemaMismatchError, "values are torch.float64"),
    ("integer keys", lambda w: w.append(KEYS.int(), VALUES), SchemaMismatchError, "keys are torch.int32"),
    ("keys of one head", lambda w: w.append(KEYS[:1], VALUES), SchemaMismatchError, r"\[1, 3, 16\]"),
    ("keys without heads", lambda w: w.append(KEYS[0], VALUES), SchemaMismatchError, r"\[3, 16\]"),
    ("narrow keys", lambda w: w.append(KEYS[..., :8], VALUES), SchemaMismatchError, "n_tokens, 16"),
    ("wide values", lambda w: w.append(KEYS, VALUES.repeat(1, 1, 2)), SchemaMismatchError, "values have shape"),
    ("batched keys", lambda w: w.append(KEYS[None], VALUES), SchemaMismatchError, r"\[1, 2, 3, 16\]"),
    ("fewer values", lambda w: w.append(KEYS, VALUES[:, :2]), SchemaMismatchError, "3 keys came with 2 values"),
    ("keys elsewhere", lambda w: w.append(KEYS.to("meta"), VALUES), SchemaMismatchError, "keys are on meta"),
    ("no such layer", lambda w: w.append(*ROWS, layer=2), LayerNotFoundError, "layer 2 .* layers 0 to 1"),
    ("layer -1", lambda w: w.append(*ROWS, layer=-1), LayerNotFoundError, "layer -1"),
    ("layer 0.0", lambda w: w.append(*ROWS, layer=0.0), LayerNotFoundError, "layer 0.0"),
    ("layer by name", lambda w: w.append(*ROWS, layer="0"), LayerNotFoundError, "layer '0'"),
    ("negative positions", lambda w: w.append(*ROWS, [-1, 0, 1]), SchemaMismatchError, "3 non-negative integers"),
    ("few positions", lambda w: w.append(*ROWS, [0, 1]), SchemaMismatchError, r"not int64 \[2\]"),
    ("many positions", lambda w: w.append(*ROWS, range(4)), SchemaMismatchError, r"not int64 \[4\]"),
    ("one position", lambda w: w.append(*ROWS, 7), SchemaMismatchError, r"not int64 \[\]"),
    ("float positions", lambda w: w.append(*ROWS, [0.0, 1.0, 2.0]), SchemaMismatchError, "not float64"),
    ("bool positions", lambda w: w.append(*ROWS, [True] * 3), SchemaMismatchError, "not bool"),
    ("2-d positions", lambda w: w.append(*ROWS, [[0, 1, 2]]), SchemaMismatchError, r"\[1, 3\]"),
]
BAD_TOPKS = [
    ("k of 0", lambda w: w.topk(k=0), InvalidQueryError, "k must be an integer of at least 1, not 0"),
    ("k of -1", lambda w: w.topk(k=-1), InvalidQueryError, "not -1"),
    ("k of 1.5", lambda w: w.topk(k=1.5), InvalidQueryError, "not 1.5"),
    ("k of True", lambda w: w.topk(k=True), InvalidQueryError, "not True"),
    ("k of None", lambda w: w.topk(k=None), InvalidQueryError, "not None"),
    ("k in words", lambda w: w.topk(k="3"), InvalidQueryError, "not '3'"),
    ("k of 0 heads", lambda w: w.topk_heads(TOKEN.view(2, 2, 16), k=0), InvalidQueryError, "not 0"),
    ("NaN in q", lambda w: w.topk(spoiled(ONE, NAN)), NonFiniteError, "the query holds NaN or infinity"),
    ("inf in q", lambda w: w.topk(spoiled(GROUP, INF)), NonFiniteError, "the query holds NaN or infinity"),
    ("q too large", lambda w: w.topk(spoiled(ONE.double(), 1e300)), NonFiniteError, "query holds NaN or infinity"),
    ("NaN, no middle", lambda w: w.note.topk(0, 0, spoiled(ONE, NAN), 3, rows="middle"), NonFiniteError, "NaN"),
    ("numpy q", lambda w: w.topk(ONE.numpy()), SchemaMismatchError, "floating-point torch.Tensor, not ndarray"),
    ("q in a list", lambda w: w.topk(ONE.tolist()), SchemaMismatchError, "not list"),
    ("integer q", lambda w: w.topk(ONE.int()), SchemaMismatchError, "not torch.int32"),
    ("complex q", lambda w: w.topk(ONE.to(torch.complex64)), SchemaMismatchError, "not torch.complex64"),
    ("narrow q", lambda w: w.topk(ONE[:8]), SchemaMismatchError, r"shape \[8\], the schema wants \[16\]"),
    ("q of all heads", lambda w: w.topk(TOKEN), SchemaMismatchError, r"\[4, 16\], the schema wants \[2, 16\]"),
    ("q of no dims", lambda w: w.topk(torch.tensor(1.0)), SchemaMismatchError, r"shape \[\]"),
    ("q elsewhere", lambda w: w.topk(ONE.to("meta")), SchemaMismatchError, "the query is on meta"),
    ("heads missing", lambda w: w.topk_heads(GROUP[None]), SchemaMismatchError, r"wants \[2, 2, 16\]"),
    ("heads flat", lambda w: w.topk_heads(TOKEN), SchemaMismatchError, r"\[4, 16\]"),
    ("no such layer", lambda w: w.topk(layer=2), LayerNotFoundError, "layer 2"),
    ("layer None", lambda w: w.topk(layer=None), LayerNotFoundError, "layer None"),
    ("no such head", lambda w: w.topk(head=2), LayerNotFoundError, "KV head 2 .* heads 0 to 1"),
    ("head -1", lambda w: w.topk(head=-1), LayerNotFoundError, "KV head -1"),
    ("head True", lambda w: w.topk(head=True), LayerNotFoundError, "KV head True"),
    ("unknown rows", lambda w: w.topk(rows="tail"), InvalidQueryError, "'all' or 'middle', not 'tail'"),
    ("unknown reduce", lambda w: w.topk(reduce="sum"), InvalidQueryError, "sum_softmax, max, mean, not 'sum'"),
    ("no such name", lambda w: w.topk(sequence="page"), SequenceNotFoundError, "no sequence is named 'page'"),
    ("which of three", lambda w: w.topk(sequence=None), InvalidQueryError, "say which sequence: the store holds 3"),
    ("a number", lambda w: w.topk(sequence=0), InvalidQueryError, "name or its handle, not by 0"),
    ("dropped", lambda w: w.topk(sequence=w.gone), SequenceNotFoundError, "'gone' has been dropped"),
    ("foreign", lambda w: w.topk(sequence=w.foreign), InvalidQueryError, "not a sequence of this store"),
]
BAD_ATTENDS = [
    ("NaN in q", lambda w: w.attend(spoiled(TOKEN, NAN)), NonFiniteError, "the query holds NaN or infinity"),
    ("inf in q", lambda w: w.attend(spoiled(TOKEN, -INF)), NonFiniteError, "the query holds NaN or infinity"),
    ("inf, dense", lambda w: w.attend(spoiled(TOKEN, INF), budget=None), NonFiniteError, "NaN or infinity"),
    ("q too large", lambda w: w.attend(spoiled(TOKEN.double(), 1e300)), NonFiniteError, "NaN or infinity"),
    ("NaN in a batch", lambda w: w.attend_all(spoiled(torch.stack([TOKEN] * 2), NAN)), NonFiniteError, "NaN"),
    ("numpy q", lambda w: w.attend(TOKEN.numpy()), SchemaMismatchError, "torch.Tensor, not ndarray"),
    ("q in a list", lambda w: w.attend(TOKEN.tolist()), SchemaMismatchError, "torch.Tensor, not list"),
    ("no q", lambda w: w.attend(None), SchemaMismatchError, "torch.Tensor, not NoneType"),
    ("integer q", lambda w: w.attend(TOKEN.long()), SchemaMismatchError, "not torch.int64"),
    ("q of one group", lambda w: w.attend(GROUP), SchemaMismatchError, r"wants \[1, 4, 16\]"),
    ("wide q", lambda w: w.attend(TOKEN.repeat(1, 2)), SchemaMismatchError, r"shape \[1, 4, 32\]"),
    ("short batch", lambda w: w.attend_all(TOKEN[None]), SchemaMismatchError, r"wants \[2, 4, 16\]"),
    ("no such layer", lambda w: w.attend(layer=5), LayerNotFoundError, "layer 5"),
    ("budget 0", lambda w: w.attend(budget=0), ConfigError, "at least 1, not 0"),
    ("budget 1.5", lambda w: w.attend(budget=1.5), ConfigError, "rows are given as an int"),
    ("budget True", lambda w: w.attend(budget=True), ConfigError, "not True"),
    ("budget NaN", lambda w: w.attend(budget=NAN), ConfigError, "share must be in"),
    ("budget in words", lambda w: w.attend(budget="all"), ConfigError, "not 'all'"),
    ("scale 0", lambda w: w.attend(scale=0.0), InvalidQueryError, "scale must be positive and finite, not 0.0"),
    ("scale -1, dense", lambda w: w.attend(scale=-1.0, budget=None), InvalidQueryError, "not -1.0"),
    ("scale NaN", lambda w: w.attend(scale=NAN), InvalidQueryError, "not nan"),
    ("scale inf, dense", lambda w: w.attend(scale=INF, budget=None), InvalidQueryError, "not inf"),
    ("scale in words", lambda w: w.attend(scale="1"), InvalidQueryError, "not '1'"),
    ("no rows", lambda w: w.empty.attend(0, TOKEN), InvalidQueryError, "'empty' has no rows in layer 0"),
    (
        "one without rows",
        lambda w: w.attend_all(torch.stack([TOKEN] * 2), who=[w.book, w.empty]),
        InvalidQueryError,
        "'empty' has no rows",
    ),
    ("a name", lambda w: w.attend_all(TOKEN[None], who=["book"]), InvalidQueryError, "not a sequence of this"),
    ("dropped", lambda w: w.attend_all(TOKEN[None], who=[w.gone]), SequenceNotFoundError, "'gone' has been dropped"),
    ("foreign", lambda w: w.attend_all(TOKEN[None], who=[w.foreign]), InvalidQueryError, "not a sequence of this"),
    ("explain NaN", lambda w: w.book.explain(0, spoiled(TOKEN, NAN)), NonFiniteError, "NaN or infinity"),
    ("explain layer", lambda w: w.book.explain(9, TOKEN), LayerNotFoundError, "layer 9"),
    ("explain shape", lambda w: w.book.explain(0, ONE), SchemaMismatchError, r"wants \[4, 16\]"),
    ("explain list", lambda w: w.book.explain(0, TOKEN.tolist()), SchemaMismatchError, "not list"),
    ("explain budget", lambda w: w.book.explain(0, TOKEN, budget=0), ConfigError, "at least 1"),
    ("explain foreign", lambda w: w.store.explain(w.foreign, 0, TOKEN), InvalidQueryError, "of this store"),
]
BAD_OTHERS = [
    ("row 100", lambda w: w.fetch([0, 100]), InvalidQueryError, "0 to 100, the sequence has the rows 0 to 99"),
    ("row -1", lambda w: w.fetch([-1]), InvalidQueryError, "from -1 to -1"),
    ("float rows", lambda w: w.fetch([0.0, 1.0]), InvalidQueryError, "must be integers"),
    ("a mask", lambda w: w.fetch(torch.ones(100, dtype=torch.bool)), InvalidQueryError, "not torch.bool"),
    ("2-d rows", lambda w: w.fetch([[0, 1]]), InvalidQueryError, r"\[1, 2\]"),
    ("one row", lambda w: w.fetch(3), InvalidQueryError, r"\[\]"),
    ("fetch layer", lambda w: w.fetch([0], layer=2), LayerNotFoundError, "layer 2"),
    ("fetch head", lambda w: w.fetch([0], head=2), LayerNotFoundError, "KV head 2"),
    ("read layer", lambda w: w.book.read(2), LayerNotFoundError, "layer 2"),
    ("read too far", lambda w: w.book.read(0, 50, 101), InvalidQueryError, r"rows \[50, 101\) are not within the 100"),
    ("rows of layer", lambda w: w.book.n_rows(2), LayerNotFoundError, "layer 2"),
    ("truncate up", lambda w: w.book.truncate(101), InvalidQueryError, "to 101 rows: the sequence has 100"),
    ("truncate to -1", lambda w: w.book.truncate(-1), InvalidQueryError, "to -1 rows"),
    ("truncate to 1.5", lambda w: w.book.truncate(1.5), InvalidQueryError, "to 1.5 rows"),
    ("reindex layer", lambda w: w.book.reindex(2), LayerNotFoundError, "layer 2"),
    ("taken name", lambda w: w.store.create("book"), SequenceExistsError, "'book' exists"),
    ("empty name", lambda w: w.store.create(""), ConfigError, "non-empty string, not ''"),
    ("no name", lambda w: w.store.create(None), ConfigError, "not None"),
    ("number as name", lambda w: w.store.create(7), ConfigError, "not 7"),
    ("padding of -1", lambda w: w.store.create("new", first_row=-1), ConfigError, "not to -1"),
    ("padding of 1.5", lambda w: w.store.create("new", first_row=1.5), ConfigError, "not to 1.5"),
    ("late padding", lambda w: setattr(w.book, "first_row", 3), ConfigError, "before the first step"),
    ("fork to a taken name", lambda w: w.book.fork("note"), SequenceExistsError, "'note' exists"),
    ("fork to no name", lambda w: w.book.fork(""), ConfigError, "non-empty string"),
    ("drop nothing", lambda w: w.store.drop("gone"), SequenceNotFoundError, "no sequence is named 'gone'"),
    ("budget 0", lambda w: setattr(w.book, "budget", 0), ConfigError, "at least 1"),
    ("budget 1.5", lambda w: setattr(w.book, "budget", 1.5), ConfigError, "share"),
    ("budget True", lambda w: setattr(w.book, "budget", True), ConfigError, "not True"),
]
CALLS = [
    pytest.param(*call, id=f"{what} {name}")
    for what, calls in (("append", BAD_APPENDS), ("topk", BAD_TOPKS), ("attend", BAD_ATTENDS), ("other", BAD_OTHERS))
    for name, *call in calls
]
WORLDS = [World(flat_config()), World(pq_config())]


@pytest.mark.parametrize("world", WORLDS, ids=["flat", "pq"])
@pytest.mark.parametrize(("call", "error", "fragment"), CALLS)
def test_a_wrong_call_raises_its_error_and_changes_nothing(world, call, error, fragment):
    before = contents(world.store)
    with pytest.raises(error, match=fragment) as caught:
        call(world)
    assert type(caught.value) is error
    after = contents(world.store)
    for state in (before, after):
        state["stats"]["counters"].pop("aborted_steps")
    assert after == before
    world.store._check()


def test_every_error_can_be_caught_as_one_and_as_what_python_would_raise():
    import kvstore

    errors = [getattr(kvstore, name) for name in kvstore.__all__ if name.endswith("Error")]
    assert all(issubclass(error, KVStoreError) for error in errors)
    builtin = (ValueError, IndexError, KeyError, RuntimeError, MemoryError, OSError)
    assert all(issubclass(error, builtin) for error in errors if error is not KVStoreError)


def test_a_message_is_printed_without_quotes_around_it():
    store = KVStore(SCHEMA)
    with pytest.raises(SequenceNotFoundError) as caught:
        store["x"]
    assert str(caught.value) == "no sequence is named 'x'; there are none"


def test_numpy_integers_are_as_good_as_pythons():
    world = WORLDS[0]
    a = world.store.topk(np.int64(1), np.int32(1), ONE, np.int16(4), sequence="book")
    b = world.store.topk(1, 1, ONE, 4, sequence="book")
    assert torch.equal(a.positions, b.positions)
