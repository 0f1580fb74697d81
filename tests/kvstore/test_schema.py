import dataclasses

import pytest
import torch

from kvstore import ConfigError, RopeSpec, Schema

GOOD = {"n_layers": 2, "n_q_heads": 8, "n_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("name", ["n_layers", "n_q_heads", "n_kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("wrong", [0, -1])
def test_every_size_is_at_least_one(name, wrong):
    with pytest.raises(ConfigError, match=f"{name} must be .*{wrong}"):
        Schema(**{**GOOD, name: wrong})


@pytest.mark.parametrize("name", ["n_layers", "n_q_heads", "n_kv_heads", "head_dim", "value_dim", "block_tokens"])
@pytest.mark.parametrize("wrong", [1.5, "8", True, None])
def test_every_size_is_an_integer(name, wrong):
    with pytest.raises(ConfigError, match=name):
        Schema(**{**GOOD, name: wrong})


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"n_q_heads": 7}, "7 query heads cannot share 2 KV heads"),
        ({"n_q_heads": 1}, "1 query heads cannot share 2 KV heads"),
        ({"block_tokens": 48}, "power of two, not 48"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, not 'int8'"),
        ({"value_dim": -1}, "value_dim"),
        ({"scale": -0.5}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"rope": (None,)}, "2 layers, 1 entries"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(changes, fragment):
    with pytest.raises(ConfigError, match=fragment):
        Schema(**{**GOOD, **changes})


def test_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_values_are_as_wide_as_keys_and_scale_is_that_of_attention_unless_said_otherwise():
    schema = Schema(**GOOD)
    assert schema.value_dim == 16
    assert schema.scale == 0.25
    other = Schema(**GOOD, value_dim=24, scale=1.0)
    assert (other.value_dim, other.scale) == (24, 1.0)


def test_a_schema_is_frozen_and_compares_by_what_it_says():
    schema = Schema(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.n_layers = 3
    assert schema == Schema(**GOOD)
    assert hash(schema) == hash(Schema(**GOOD))
    assert schema != Schema(**GOOD, fingerprint="another model")


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_sizes_in_bytes_follow_from_shape_and_dtype(dtype, item):
    schema = Schema(**GOOD, value_dim=24, dtype=dtype, block_tokens=32)
    assert schema.torch_dtype == getattr(torch, dtype)
    assert schema.key_bytes == 16 * item
    assert schema.block_bytes == 32 * 2 * (16 + 24) * item
    assert schema.group == 4


def test_rope_is_one_entry_a_layer_and_may_be_none():
    spec = RopeSpec.from_theta(10000.0, 16)
    assert Schema(**GOOD, rope=(spec, None)).rope == (spec, None)
