"""Finding what has been read before, by its tokens."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import InvalidQueryError, KVStore
from kvstore.prefixes import Match, Prefixes
from tests.builders import SCHEMA, append, cut, fill, make_rows, pq_config, same_bits

B = SCHEMA.block_tokens
TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=40), min_size=1, max_size=6)


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@settings(max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 1), max_size=40), st.data())
def test_the_longest_common_beginning_is_found(texts, wanted, data):
    prefixes, owners = Prefixes("model", 4), {}
    for i, text in enumerate(texts):
        owners[i] = data.draw(st.sampled_from(["a", "b"]))
        prefixes.put(f"s{i}", np.array(text, np.int64), owners[i])
        prefixes._check()
    gone = data.draw(st.sets(st.sampled_from(range(len(texts)))))
    for i in gone:
        prefixes.remove(f"s{i}")
        prefixes._check()
    lengths = {i: common(t, wanted) for i, t in enumerate(texts) if i not in gone and owners[i] == "a"}
    best = max(lengths.values(), default=0)
    found = prefixes.find(np.array(wanted, np.int64), "a")
    if best < 4:
        assert found is None
    else:
        assert found == Match(f"s{min(i for i, n in lengths.items() if n == best)}", best)


def read(store, name, tokens, owner="", rows=None):
    seq = store.create(name, owner=owner)
    append(seq, cut(rows or make_rows(SCHEMA, len(tokens), 1), 0, len(tokens)))
    seq.note_tokens(tokens)
    return seq


def test_a_second_question_on_one_book_begins_with_the_rows_that_are_there():
    rows = make_rows(SCHEMA, 200, 1)
    store = KVStore(SCHEMA, pq_config())
    book = list(range(150))
    read(store, "first", [*book, 7, 8, 9], rows=rows)
    match = store.match_prefix(torch.tensor([*book, 5, 5, 5, 5]))
    assert match == Match("first", 150)
    second = store[match.name].fork("second", match.n_rows)
    assert (len(second), second.tokens.tolist()) == (150, book)
    assert same_bits(second.read(1)[0], rows[1][0][:, :150])
    assert store.match_prefix(range(B - 1)) is None
    assert store.match_prefix([]) is None


def test_nobody_finds_what_another_owner_or_another_model_has_stored():
    store = KVStore(SCHEMA, pq_config())
    seq = read(store, "mine", range(100), owner="alice")
    assert store.match_prefix(range(100)) is None
    assert store.match_prefix(range(100), owner="bob") is None
    assert store.match_prefix(range(100), owner="alice") == Match("mine", 100)
    seq.fork("fork")
    assert store.match_prefix(range(100), owner="bob") is None
    a, b = (Prefixes(name, 4) for name in ("model a", "model b"))
    assert a._hashes(np.arange(8), "x") != b._hashes(np.arange(8), "x")


def test_what_is_truncated_dropped_or_read_since_is_known():
    store = KVStore(SCHEMA, pq_config())
    seq = read(store, "book", range(100))
    assert store.match_prefix(range(120)).n_rows == 100
    seq.truncate(50)
    assert store.match_prefix(range(120)).n_rows == 50
    fill(seq, 70)
    seq.note_tokens(range(50, 120))
    assert store.match_prefix(range(120)).n_rows == 120
    store.drop("book")
    assert store.match_prefix(range(120)) is None
    store._prefixes._check()


def test_padding_hides_a_sequence():
    store = KVStore(SCHEMA, pq_config())
    seq = store.create("padded", first_row=3)
    fill(seq, 100)
    seq.note_tokens(range(100))
    assert store.match_prefix(range(100)) is None


def test_tokens_and_owner_are_stored(tmp_path):
    config = dataclasses.replace(pq_config(), spill_bytes=1 << 26)
    with KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        seq = read(store, "book", range(100), owner="alice")
        seq.fork("fork", 60)
        read(store, "other", range(1000, 1100))
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert store.match_prefix(range(200), owner="alice") == Match("book", 100)
        assert not store._sequences  # found without reading any row
        assert store.match_prefix(range(200)) is None
        book = store["book"]
        assert (book.owner, book.tokens.tolist()) == ("alice", list(range(100)))
        book.truncate(40)
        store.flush()
        assert store.match_prefix(range(200), owner="alice") == Match("fork", 60)
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert len(store["book"].tokens) == 40
        store.drop("fork")
        assert store.match_prefix(range(200), owner="alice") == Match("book", 40)


@pytest.mark.parametrize("wrong", [[1.5], [[1]], ["a"], range(101)], ids=repr)
def test_wrong_tokens_are_named_and_change_nothing(wrong):
    store = KVStore(SCHEMA, pq_config())
    seq = store.create("book")
    fill(seq, 100)
    with pytest.raises(InvalidQueryError, match="tokens"):
        seq.note_tokens(wrong)
    assert len(seq.tokens) == 0
    with pytest.raises(InvalidQueryError, match="cannot fork 101 rows"):
        seq.fork("x", 101)
    assert "x" not in store
