import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.storage.encodings import Encoding, decode_rows, encode_rows, encoded_bytes, encoding_of
from kvstore.storage.shape import RowShape

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPE = RowShape("float32", n_blocks=3, n_tokens=12, n_heads=2, key_dim=8, value_dim=4)
LOSSY = [Encoding.FP16, Encoding.BF16, Encoding.INT8]
PER_BLOCK = 4 * 2 * 12


def to_bytes(x):
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def to_tensor(data, dtype):
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype])


def numbers(dtype="float32", scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(3 * PER_BLOCK, generator=generator)).to(DTYPES[dtype])


def vectors(x):
    """Every key and value of flat rows, each a vector."""
    for block in x.float().view(3, PER_BLOCK):
        yield from block[:64].view(8, 8)
        yield from block[64:].view(8, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_keeps_every_bit(dtype):
    raw = to_bytes(torch.arange(3 * PER_BLOCK, dtype=torch.int32)) if dtype == "float32" else to_bytes(numbers(dtype))
    shape = SHAPE._replace(dtype=dtype)
    used, payload = encode_rows(raw, shape, Encoding.RAW)
    assert used is Encoding.RAW
    assert payload is raw
    assert decode_rows(payload, shape, Encoding.RAW) is raw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("encoding", "narrow"), [(Encoding.FP16, torch.float16), (Encoding.BF16, torch.bfloat16)])
def test_half_precisions_round_as_torch_does(dtype, encoding, narrow):
    x = numbers(dtype, 30.0)
    shape = SHAPE._replace(dtype=dtype)
    used, payload = encode_rows(to_bytes(x), shape, encoding)
    if DTYPES[dtype] == narrow:  # already so: nothing is lost
        assert (used, payload) == (Encoding.RAW, to_bytes(x))
        return
    assert used is encoding
    assert len(payload) == encoded_bytes(shape, encoding) == 2 * x.numel()
    assert payload == to_bytes(x.to(narrow))
    assert decode_rows(payload, shape, encoding) == to_bytes(x.to(narrow).to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_int8_is_within_half_a_step_of_each_row(dtype, scale):
    x = numbers(dtype, scale)
    shape = SHAPE._replace(dtype=dtype)
    used, payload = encode_rows(to_bytes(x), shape, Encoding.INT8)
    assert used is Encoding.INT8
    assert len(payload) == encoded_bytes(shape, Encoding.INT8) == 3 * 8 * (8 + 4 + 4 + 4)
    back = to_tensor(decode_rows(payload, shape, Encoding.INT8), dtype)
    precision = torch.finfo(DTYPES[dtype]).eps
    for row, found in zip(vectors(x), vectors(back), strict=True):
        step = row.abs().max() / 127
        assert (row - found).abs().max() <= step * 0.5001 + row.abs().max() * precision


def test_int8_keeps_zeros_and_the_largest_of_a_row():
    x = torch.zeros(3 * PER_BLOCK)
    x[3], x[64] = -5.0, 1e-30
    _, payload = encode_rows(to_bytes(x), SHAPE, Encoding.INT8)
    torch.testing.assert_close(to_tensor(decode_rows(payload, SHAPE, Encoding.INT8), "float32"), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_stay_raw(encoding, bad):
    x = numbers()
    x[200] = bad
    assert encode_rows(to_bytes(x), SHAPE, encoding) == (Encoding.RAW, to_bytes(x))


def test_rows_too_large_for_an_encoding_stay_raw():
    for value, encoding in [(70000.0, Encoding.FP16), (3.4e38, Encoding.BF16)]:
        x = numbers()
        x[7] = value
        assert encode_rows(to_bytes(x), SHAPE, encoding)[0] is Encoding.RAW


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=12, max_size=12))
@pytest.mark.parametrize("encoding", LOSSY)
def test_what_comes_back_is_always_finite(encoding, values):
    shape = RowShape("float32", 1, 1, 1, 8, 4)
    raw = np.array(values, "<f4").tobytes()
    used, payload = encode_rows(raw, shape, encoding)
    assert np.isfinite(np.frombuffer(decode_rows(payload, shape, used), "<f4")).all()


@pytest.mark.parametrize("encoding", list(Encoding))
def test_wrong_sizes_are_refused(encoding):
    with pytest.raises(ConfigError, match="bytes of rows where"):
        encode_rows(bytes(7), SHAPE, encoding)
    with pytest.raises(ConfigError, match=f"7 bytes of {encoding.name}"):
        decode_rows(bytes(7), SHAPE, encoding)


def test_encodings_have_names():
    assert [encoding_of(e.name.lower()) for e in Encoding] == list(Encoding)
    with pytest.raises(ConfigError, match="raw, fp16, bf16, int8"):
        encoding_of("zip")
