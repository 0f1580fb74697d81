import json
from dataclasses import replace

import numpy as np
import pytest

from kvstore import RopeSpec
from kvstore.errors import KVStoreError
from kvstore.traces import TraceError, read_trace, read_traces, write_trace
from tests.traces import ROPE, make_trace

ARRAYS = ("k", "k_pre", "v", "q", "q_cal", "cal_pos")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny_layer03.safetensors"


def test_what_is_written_is_read_bit_for_bit(path):
    cal = np.arange(24, dtype=np.float16).reshape(4, 6, 1) * np.ones(16, np.float16)
    trace = make_trace(q_cal=cal, cal_pos=np.arange(6, dtype=np.int32), scale=0.3)
    trace = replace(trace, cal_pos=np.arange(6, dtype=np.int32))
    write_trace(path, trace)
    got = read_trace(path)
    for name in ARRAYS:
        assert np.array_equal(getattr(got, name), getattr(trace, name)), name
        assert getattr(got, name).dtype == getattr(trace, name).dtype
    assert (got.rope, got.scale, got.layer, got.model) == (ROPE, 0.3, 3, "tiny")
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_another_library_reads_it_and_its_files_are_read(path):
    numpy = pytest.importorskip("safetensors.numpy", reason="compared with the package safetensors")
    trace = make_trace()
    write_trace(path, trace)
    assert np.array_equal(numpy.load_file(path)["k"], trace.k)
    numpy.save_file({n: getattr(trace, n) for n in "kvq"}, path, {"rope": "half layout, theta 10000, no scaling"})
    got = read_trace(path)
    assert np.array_equal(got.v, trace.v)
    assert got.rope == ROPE
    assert got.scale == 0.25
    assert got.k_pre is None


def test_sizes_and_queries(path):
    trace = make_trace(n=50, n_queries=5, heads=2, group=3)
    assert (trace.n_kv_heads, trace.group, trace.n_tokens, trace.n_queries, trace.head_dim) == (2, 3, 50, 5, 16)
    q = trace.queries(4)
    assert q.shape == (2, 3, 16)
    assert q.dtype == np.float32
    assert np.array_equal(q[1, 2], trace.q[5, 4].astype(np.float32))


def test_rope_that_is_unknown_stays_unknown(path):
    write_trace(path, make_trace(rope=None))
    assert read_trace(path).rope is None
    spec = RopeSpec((1.0, 0.5), "interleaved", 1.25)
    write_trace(path, make_trace(rope=spec))
    assert read_trace(path).rope == spec


def damaged(data, header=None, **changes):
    size = int.from_bytes(data[:8], "little")
    facts = json.loads(data[8 : 8 + size]) if header is None else header
    facts.update(changes)
    text = json.dumps(facts).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"[]" + data[10:],
        lambda data: damaged(data, k={"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}),
        lambda data: damaged(data, k={"dtype": "F16", "shape": [-1, 1, 1], "data_offsets": [0, 2]}),
        lambda data: damaged(data, k={"dtype": "F16", "shape": [2, 2, 2], "data_offsets": [0, 16]}),
        lambda data: damaged(data, v={"dtype": "F16"}),
        lambda data: damaged(data, __metadata__={"scale": "wide"}),
        lambda data: damaged(data, __metadata__={"rope": "{}"}),
        lambda data: damaged(data, __metadata__={"format": "99"}),
        lambda data: damaged(data, header={"other": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}),
    ],
)
def test_damage_is_an_error_of_one_kind(path, break_it):
    write_trace(path, make_trace(n=40, n_queries=2))
    path.write_bytes(break_it(path.read_bytes()))
    with pytest.raises(TraceError):
        read_trace(path)


def test_directories(tmp_path, path):
    with pytest.raises(TraceError, match="no such directory"):
        read_traces(tmp_path / "nowhere")
    with pytest.raises(KVStoreError, match="kvstore capture"):
        read_traces(tmp_path)
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(path)
    for layer in (7, 3):
        write_trace(tmp_path / f"tiny_layer{layer:02d}.safetensors", make_trace(n=40, n_queries=2, layer=layer))
    assert [trace.layer for trace in read_traces(tmp_path)] == [3, 7]


def test_numbers_that_float16_cannot_hold_are_refused(path):
    trace = replace(make_trace(n=40, n_queries=2), v=np.full((2, 40, 16), 1e6, np.float32))
    with pytest.raises(TraceError, match="float16"):
        write_trace(path, trace)
    assert not path.exists()


@pytest.mark.parametrize(
    "wrong", [{"q": np.zeros((3, 2, 16))}, {"q": np.zeros((4, 50, 16))}, {"v": np.zeros((2, 9, 1))}]
)
def test_arrays_must_fit(wrong):
    with pytest.raises(TraceError):
        make_trace(n=40, n_queries=2, **wrong)
