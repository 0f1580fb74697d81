"""An index that was stored before its sequence was cut."""

import shutil

import pytest

from kvstore import KVStore
from tests.builders import make_query, same_bits
from tests.kvstore.faults.workload import SCHEMA, perform, small, tokens_of


def answers(seq):
    """Attention, chosen by the index, and the best rows, of all layers."""
    queries = [make_query(SCHEMA, i) for i in range(4)]
    best = [seq.topk(layer, 0, q[0], 10).positions.float() for layer in range(2) for q in queries]
    return best + [seq.attend(layer, q) for layer in range(2) for q in queries]


@pytest.mark.parametrize("n", [100, 97, 93, 92, 91, 60, 26, 9])
@pytest.mark.parametrize("forked", [False, True])
def test_an_index_never_covers_the_window_of_a_sequence_that_was_cut_when_it_comes_back(tmp_path, n, forked):
    """Seen after a kill: `flush` stores no index anew that has only become shorter."""
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 100))
        store.checkpoint()
        seq = store["a"].fork("b") if forked else store["a"]
        seq.truncate(n)
        before, name = answers(seq), seq.name
        store.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    with KVStore.open(tmp_path / "killed", SCHEMA, small()) as store:
        assert len(tokens_of(store[name])) == n
        store._check()
        assert all(map(same_bits, answers(store[name]), before))
