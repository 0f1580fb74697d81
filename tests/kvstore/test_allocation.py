"""What a decode step allocates does not grow with the rows of the store: only with those it attends to."""

import pytest

from kvstore import IndexConfig, KVStore, RopeSpec, Schema, StoreConfig
from kvstore.index.threads import kernel_threads
from tests.allocations import peak_bytes
from tests.builders import append, fill, make_query, make_rows

SCHEMA = Schema(n_layers=1, n_q_heads=4, n_kv_heads=2, head_dim=16, rope=(RopeSpec.from_theta(1e4, 16),))
BUDGET = 400


def attend_peak(kind: str, options: dict[str, str], n: int) -> int:
    store = KVStore(SCHEMA, StoreConfig(budget=BUDGET, index=IndexConfig(kind, options)))
    seq = store.create("book")
    fill(seq, n)
    q = make_query(SCHEMA, 1)[None]
    with kernel_threads(1):
        return peak_bytes(lambda: store.attend(0, [seq], q))


@pytest.mark.parametrize(("kind", "options"), [("pq", {}), ("pq", {"space": "raw"}), ("flat", {})])
def test_attending_to_as_many_of_more_rows_takes_no_more_memory(kind: str, options: dict[str, str]) -> None:
    few, many = (attend_peak(kind, options, n) for n in (2000, 16_000))
    assert many < few + 2048
    candidates = 2 * BUDGET
    assert many < 64 * candidates + 16_384  # scores of the group twice, places, rows; far below 16,000 of anything


def test_room_for_candidates_is_made_ahead() -> None:
    """With a budget that is a share of the rows, answers grow by a row every few steps."""
    store = KVStore(SCHEMA, StoreConfig(budget=0.1, index=IndexConfig("pq")))
    seq = store.create("book")
    fill(seq, 4000)
    rows = store.workspace._named
    store.attend(0, [seq], make_query(SCHEMA, 1)[None])
    before = {name: id(array) for name, array in rows.items()}
    for step in range(40):
        append(seq, make_rows(SCHEMA, 1, seed=step + 1))
        store.attend(0, [seq], make_query(SCHEMA, 1)[None])
    assert before
    assert {name: id(array) for name, array in rows.items()} == before
