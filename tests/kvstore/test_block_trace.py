"""The format of a recorded trace."""

import numpy as np
import pytest

from kvstore.errors import StorageError
from kvstore.replay.trace import BlockTrace, BlockTraceError, read_block_trace, write_block_trace
from tests.block_traces import N_BLOCKS, N_LAYERS, make_trace, trace_of


@pytest.fixture
def trace():
    return make_trace()


def test_batches_have_ids_that_no_other_layer_has(trace):
    batches = list(trace.batches())
    assert len(batches) == trace.n_batches == 60
    assert trace.n_steps == 20
    for number, (ids, counts) in enumerate(batches):
        assert (ids // N_BLOCKS == number % N_LAYERS).all()
        assert len(ids) == len(counts) > 0
    step_ids, step_counts = trace.steps()[4]
    assert step_ids.tolist() == np.concatenate([ids for ids, _ in batches[12:15]]).tolist()
    assert step_counts.sum() == sum(counts.sum() for _, counts in batches[12:15])


def test_a_layer_is_a_trace_of_its_own(trace):
    alone = list(trace.layer(1).batches())
    assert len(alone) == 20
    for (ids, counts), (whole_ids, whole_counts) in zip(alone, list(trace.batches())[1::3], strict=True):
        assert (ids + N_BLOCKS).tolist() == whole_ids.tolist()
        assert counts.tolist() == whole_counts.tolist()


def test_larger_blocks_hold_what_their_parts_hold(trace):
    larger = trace.in_blocks_of(12)
    assert (larger.n_blocks, larger.block_tokens, larger.n_batches) == (6, 12, trace.n_batches)
    for layer, (ids, counts), (whole, sums) in zip(trace.layers, trace.batches(), larger.batches(), strict=True):
        wanted = {}
        for block, count in zip((ids - layer * N_BLOCKS) // 3, counts, strict=True):
            wanted[int(block)] = wanted.get(int(block), 0) + int(count)
        assert dict(zip((whole - layer * 6).tolist(), sums.tolist(), strict=True)) == wanted
    assert trace.in_blocks_of(4).blocks.tolist() == trace.blocks.tolist()
    with pytest.raises(BlockTraceError, match="blocks of 4 cannot be read in blocks of 6"):
        trace.in_blocks_of(6)


def test_a_file_brings_the_trace_back(trace, tmp_path):
    path = tmp_path / "made" / "blocks.trace"
    write_block_trace(path, trace)
    again = read_block_trace(path)
    for name, value in vars(trace).items():
        assert np.array_equal(getattr(again, name), value), name


def test_files_that_hold_no_trace(tmp_path):
    path = tmp_path / "blocks.npz"
    with pytest.raises(BlockTraceError, match="No such file"):
        read_block_trace(path)
    for content in (b"", b"PK\x03\x04 and nothing more", b"text"):
        path.write_bytes(content)
        with pytest.raises(BlockTraceError, match="holds no block trace"):
            read_block_trace(path)
    for save in (np.savez, np.save):
        with path.open("wb") as file:
            save(file, np.zeros(3))
        with pytest.raises(BlockTraceError, match="holds no block trace"):
            read_block_trace(path)


def test_traces_that_contradict_themselves():
    none = np.zeros(0, np.int64)
    with pytest.raises(BlockTraceError, match="offsets"):
        BlockTrace(none, none, none, none, 1, 1, 1, "x")
    with pytest.raises(BlockTraceError, match="0 blocks have 2 counts"):
        BlockTrace(none, np.zeros(1, np.int64), none, np.ones(2, np.int64), 1, 1, 1, "x")


def contradictions():
    none, one = np.zeros(0, np.int64), np.zeros(1, np.int64)
    sizes = {"n_layers": 1, "n_blocks": 1, "block_tokens": 1, "model": ""}
    return {
        "0 layers": (none, one, none, none, {**sizes, "n_layers": 0}),
        "blocks of -1 rows": (none, one, none, none, {**sizes, "block_tokens": -1}),
        "offsets go back": (np.zeros(3, np.int64), np.array([0, 2, 1, 2]), one.repeat(2), one.repeat(2), sizes),
        "no whole steps of 2 layers": (one, np.array([0, 1]), one, one, {**sizes, "n_layers": 2}),
        "have one axis each": (one, np.array([0, 1]), one[None], one[None], sizes),
        "do not ascend": (one, np.array([0, 2]), one.repeat(2), one.repeat(2) + 1, {**sizes, "n_blocks": 9}),
        "of 4294967296 blocks": (none, one, none, none, {**sizes, "n_blocks": 1 << 32}),
        "counts are 0 to 0": (one, np.array([0, 1]), one, one, sizes),
        "layers are 1 to 1": (one + 1, np.array([0, 1]), one, one, sizes),
        "blocks are -1 to -1": (one, np.array([0, 1]), one - 1, one, sizes),
    }


@pytest.mark.parametrize("message", list(contradictions()))
def test_what_no_recorder_writes_is_refused(message):
    *arrays, sizes = contradictions()[message]
    with pytest.raises(BlockTraceError, match=message):
        BlockTrace(*arrays, **sizes)


def test_blocks_are_not_cut_nor_joined_to_nothing():
    trace = trace_of([[1, 2]], block_tokens=4)
    assert trace.in_blocks_of(8).blocks.tolist() == [0, 1]
    for size in (0, -4, 2):
        with pytest.raises(BlockTraceError, match=f"cannot be read in blocks of {size}"):
            trace.in_blocks_of(size)


def test_a_file_that_cannot_be_written(trace, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_block_trace(tmp_path / "file" / "blocks.npz", trace)
    with pytest.raises(StorageError, match="Is a directory"):
        write_block_trace(tmp_path, trace)


def test_damaged_files_are_one_error(trace, tmp_path):
    path = tmp_path / "blocks.npz"
    write_block_trace(path, trace)
    sound = path.read_bytes()
    messages = []
    for at in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[at] ^= 0xFF
        path.write_bytes(bytes(damaged))
        try:
            read_block_trace(path)  # a time or a flag that nobody reads may have changed
        except BlockTraceError as error:
            messages.append(str(error))
    assert len(messages) > len(sound) / 14
    assert all(str(path) in message for message in messages)
