import pytest
import torch

from kvstore import (
    HeapFullError,
    KVStore,
    NonFiniteError,
    Schema,
    SchemaMismatchError,
    SequenceNotFoundError,
    StepError,
)
from tests.builders import SCHEMA, append, contents, cut, fill, filled, flat_config, make_query, make_rows, same_bits

THREE = Schema(n_layers=3, n_q_heads=2, n_kv_heads=2, head_dim=16, block_tokens=16)


class ModelCrash(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def three_layers(n=20, **changes):
    return filled(THREE, flat_config(**changes), n)


def without_aborts(state):
    state["stats"]["counters"].pop("aborted_steps")
    return state


def assert_rolled_back(store, before):
    store._check()
    assert without_aborts(contents(store)) == without_aborts(before)


@pytest.mark.parametrize("crash", [ModelCrash, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_an_exception_before_any_layer_leaves_no_layer_longer(layer, crash):
    store, seq, _ = three_layers()
    before, rows = contents(store), make_rows(THREE, 30, seed=1)
    with pytest.raises(crash), seq.step():
        for i in range(layer):
            seq.append(i, *rows[i])
        raise crash
    assert_rolled_back(store, before)
    assert store.stats().counters.aborted_steps == before["stats"].get("aborted_steps", 0) + 1


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_step_after_a_failed_one_works_and_leaves_no_trace_of_it(layer):
    store, seq, old = three_layers()
    bad, good = make_rows(THREE, 30, seed=1), make_rows(THREE, 7, seed=2)
    with pytest.raises(ModelCrash), seq.step():
        for i in range(layer + 1):
            seq.append(i, *bad[i], positions=range(500, 530))
        raise ModelCrash
    append(seq, good)
    store._check()
    for i in range(3):
        keys, values = seq.read(i)
        assert same_bits(keys, torch.cat([old[i][0], good[i][0]], 1))
        assert same_bits(values, torch.cat([old[i][1], good[i][1]], 1))
    assert seq.positions(0, 27).tolist() == list(range(27))


def test_a_failed_first_step_leaves_an_empty_sequence():
    store = KVStore(THREE, flat_config())
    seq = store.create("book")
    before = contents(store)
    with pytest.raises(ModelCrash), seq.step():
        seq.append(0, *make_rows(THREE, 50, seed=1)[0])
        raise ModelCrash
    after = contents(store)
    assert after["stats"].pop("heap_reserved_bytes") > before["stats"].pop("heap_reserved_bytes")  # kept for reuse
    assert without_aborts(after) == without_aborts(before)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_heap_that_fills_up_in_any_layer_takes_the_step_back(layer):
    blocks = 6 + 2 * layer  # two a layer are held; 40 more rows want two more a layer
    size = KVStore(THREE).heap.block_bytes
    store, seq, _ = three_layers(heap_bytes=blocks * size, arena_bytes=blocks * size)
    before, rows = contents(store), make_rows(THREE, 40, seed=1)
    with pytest.raises(HeapFullError, match="or raise heap_bytes"), seq.step():
        for i in range(3):
            assert i <= layer
            seq.append(i, *rows[i])
    assert_rolled_back(store, before)
    append(seq, cut(rows, 0, 12))  # what fits still fits
    assert len(seq) == 32


def test_a_step_that_could_not_append_can_go_on():
    store, seq, old = three_layers()
    rows = make_rows(THREE, 5, seed=1)
    with seq.step():
        for i in range(3):
            keys, values = rows[i]
            with pytest.raises(SchemaMismatchError):
                seq.append(i, keys.double(), values)
            with pytest.raises(NonFiniteError):
                seq.append(i, torch.full_like(keys, torch.nan), values)
            with pytest.raises(StepError):
                seq.append((i + 1) % 3, keys, values)
            seq.append(i, keys, values)
    store._check()
    assert all(same_bits(seq.read(i)[0], torch.cat([old[i][0], rows[i][0]], 1)) for i in range(3))


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_out_of_order_is_refused(layer):
    store, seq, _ = three_layers()
    rows = make_rows(THREE, 2, seed=1)
    with seq.step():
        with pytest.raises(StepError, match=f"layer {layer} came where layer 0 was due"):
            seq.append(layer, *rows[layer])
        seq.append(0, *rows[0])
        with pytest.raises(StepError, match="layer 0 came where layer 1 was due"):
            seq.append(0, *rows[0])
        seq.append(1, *rows[1])
        seq.append(2, *rows[2])
        with pytest.raises(StepError, match="all 3 layers of this step have appended"):
            seq.append(0, *rows[0])
    assert len(seq) == 22
    store._check()


@pytest.mark.parametrize("n", [0, 1, 6])
def test_a_layer_with_another_number_of_rows_is_refused(n):
    store, seq, _ = three_layers()
    before, rows = contents(store), make_rows(THREE, 5, seed=1)
    with pytest.raises(StepError, match=f"layer 1 brought {n} rows, layer 0 of this step 5"), seq.step():
        seq.append(0, *rows[0])
        seq.append(1, *make_rows(THREE, n, seed=1)[1])
    assert_rolled_back(store, before)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_step_that_ends_early_is_rolled_back(layer):
    store, seq, _ = three_layers()
    before, rows = contents(store), make_rows(THREE, 5, seed=1)
    with pytest.raises(StepError, match=f"ended before layer {layer}: {3 - layer} layers brought no rows"), seq.step():
        for i in range(layer):
            seq.append(i, *rows[i])
    assert_rolled_back(store, before)
    assert not seq.step_open


def test_a_step_with_no_append_is_nothing():
    store, seq, _ = three_layers()
    before = contents(store)
    with seq.step():
        pass
    assert contents(store) == before


def test_a_step_of_no_rows_commits_nothing_visible():
    store, seq, _ = three_layers()
    before = contents(store)
    append(seq, make_rows(THREE, 0, seed=1))
    after = contents(store)
    assert after["sequences"] == before["sequences"]
    assert after["stats"]["counters"]["steps"] == before["stats"]["counters"]["steps"] + 1


def test_a_second_step_inside_one_is_refused_and_the_first_goes_on():
    _store, seq, _ = three_layers()
    rows = make_rows(THREE, 5, seed=1)
    with seq.step():
        seq.append(0, *rows[0])
        with pytest.raises(StepError, match="open already"):
            seq.begin_step()
        with pytest.raises(StepError, match="open already"), seq.step():
            pytest.fail("the inner step must not begin")
        seq.append(1, *rows[1])
        seq.append(2, *rows[2])
    assert len(seq) == 25


def test_steps_of_two_sequences_may_interleave():
    store, seq, old = three_layers()
    other = store.create("other")
    mine, its = make_rows(THREE, 5, seed=1), make_rows(THREE, 9, seed=2)
    with seq.step(), other.step():
        for i in range(3):
            other.append(i, *its[i])
            seq.append(i, *mine[i])
    store._check()
    assert all(same_bits(other.read(i)[0], its[i][0]) for i in range(3))
    assert all(same_bits(seq.read(i)[1], torch.cat([old[i][1], mine[i][1]], 1)) for i in range(3))


@pytest.mark.parametrize("call", ["append", "commit_step"])
def test_outside_a_step_nothing_can_be_appended_or_committed(call):
    store, seq, _ = three_layers()
    before = contents(store)
    with pytest.raises(StepError, match="open"):
        seq.append(0, *make_rows(THREE, 1, seed=1)[0]) if call == "append" else seq.commit_step()
    seq.abort_step()  # nothing to take back
    assert contents(store) == before


@pytest.mark.parametrize("call", ["truncate", "fork", "reindex"])
def test_what_needs_committed_rows_waits_for_the_step(call):
    store, seq, _ = three_layers(60)
    rows = make_rows(THREE, 30, seed=1)
    with seq.step():
        seq.append(0, *rows[0])
        with pytest.raises(StepError, match="a step is open"):
            {"truncate": lambda: seq.truncate(3), "fork": lambda: seq.fork("x"), "reindex": seq.reindex}[call]()
        seq.append(1, *rows[1])
        seq.append(2, *rows[2])
    assert len(seq) == 90
    assert list(store) == ["book"]


def test_rows_are_visible_to_readers_of_committed_rows_only_after_the_commit():
    _store, seq, _ = three_layers()
    rows = make_rows(THREE, 40, seed=1)
    with seq.step():
        seq.append(0, *rows[0])
        assert len(seq) == 20
        assert seq.n_rows(0) == 60
        assert seq.n_rows(1) == 20
        assert seq.topk(0, 0, torch.ones(16), 100).positions.max() < 20
        with pytest.raises(ValueError, match="the sequence has the rows 0 to 19"):
            seq.fetch(0, 0, [20])
        seq.append(1, *rows[1])
        seq.append(2, *rows[2])
    assert len(seq) == 60


def test_a_sequence_dropped_inside_its_step_gives_its_blocks_back():
    store, seq, _ = three_layers()
    with pytest.raises(SequenceNotFoundError, match="'book' has been dropped"), seq.step():
        seq.append(0, *make_rows(THREE, 40, seed=1)[0])
        store.drop("book")
    assert store.heap.used_blocks == 0
    store._check()


def test_a_failed_step_of_a_fork_leaves_its_origin_alone():
    store, seq, old = filled(SCHEMA, flat_config(), 20)
    child = seq.fork("child")
    with pytest.raises(ModelCrash), child.step():
        child.append(0, *make_rows(SCHEMA, 40, seed=1)[0])
        raise ModelCrash
    store._check()
    for who in (seq, child):
        assert len(who) == 20
        assert all(same_bits(who.read(i)[0], old[i][0]) for i in range(2))


def test_positions_of_a_step_are_those_given_with_layer_0():
    store = KVStore(SCHEMA, flat_config())
    seq = store.create("book")
    append(seq, make_rows(SCHEMA, 3, seed=1), positions=torch.tensor([5, 6, 9]))
    fill(seq, 2, seed=2)
    append(seq, make_rows(SCHEMA, 1, seed=3), positions=[0])
    assert seq.positions(0, 6).tolist() == [5, 6, 9, 10, 11, 0]


def test_rows_with_a_gradient_are_stored_without_it():
    store = KVStore(SCHEMA, flat_config())
    seq = store.create("book")
    rows = make_rows(SCHEMA, 5, seed=1)
    append(seq, [(keys.clone().requires_grad_(), values.clone().requires_grad_()) for keys, values in rows])
    q = make_query(SCHEMA, 0).requires_grad_()
    assert not seq.attend(0, q).requires_grad
    assert not seq.read(0)[0].requires_grad
    assert same_bits(seq.read(1)[1], rows[1][1])
