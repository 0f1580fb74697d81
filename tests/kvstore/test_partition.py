"""Shards by KV heads and stages by layers: schemas of the parts of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import ConfigError, KVStore, RopeSpec, Schema, SchemaMismatchError

ROPE = tuple(RopeSpec.from_theta(1e4 * (i + 1), 16) for i in range(5))
WHOLE = Schema(5, 12, 4, 16, value_dim=8, dtype="bfloat16", block_tokens=16, scale=0.3, rope=ROPE, fingerprint="model")


@pytest.mark.parametrize("world", [2, 4])
def test_shards_hold_every_head_once_and_all_layers(world):
    shards = [WHOLE.shard(rank, world) for rank in range(world)]
    for rank, shard in enumerate(shards):
        heads, q_heads = WHOLE.kv_heads(rank, world), WHOLE.q_heads(rank, world)
        assert (shard.n_kv_heads, shard.n_q_heads) == (heads.stop - heads.start, q_heads.stop - q_heads.start)
        assert (shard.group, shard.n_layers, shard.rope) == (WHOLE.group, WHOLE.n_layers, WHOLE.rope)
        assert (shard.scale, shard.value_dim, shard.dtype) == (0.3, 8, "bfloat16")
    heads = [head for rank in range(world) for head in range(4)[WHOLE.kv_heads(rank, world)]]
    q_heads = [head for rank in range(world) for head in range(12)[WHOLE.q_heads(rank, world)]]
    assert (heads, q_heads) == (list(range(4)), list(range(12)))


@given(st.integers(1, 40), st.data())
def test_stages_hold_every_layer_once_in_runs_that_differ_by_one(n_layers, data):
    world = data.draw(st.integers(1, n_layers))
    whole = Schema(n_layers, 2, 1, 16, rope=tuple(RopeSpec.from_theta(1e4 + i, 16) for i in range(n_layers)))
    runs = [whole.layers(rank, world) for rank in range(world)]
    assert [layer for run in runs for layer in run] == list(range(n_layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    for rank, run in enumerate(runs):
        stage = whole.stage(rank, world)
        assert stage.n_layers == len(run)
        assert stage.rope == tuple(whole.rope[layer] for layer in run)


def test_every_part_has_a_fingerprint_of_its_own_that_names_it():
    shards, stages = [[getattr(WHOLE, how)(r, 4) for r in range(4)] for how in ("shard", "stage")]
    both = [shard.stage(r, 2) for shard in shards for r in range(2)]
    prints = [part.fingerprint for part in (WHOLE, *shards, *stages, *both)]
    assert len(set(prints)) == len(prints)
    assert WHOLE.shard(1, 2).fingerprint == "model [KV heads 2 to 3 of 4]"
    assert WHOLE.stage(0, 2).fingerprint == "model [layers 0 to 2 of 5]"
    assert Schema(2, 2, 2, 16).shard(0, 2).fingerprint == "[KV heads 0 to 0 of 2]"
    assert WHOLE.shard(0, 1) == WHOLE.stage(0, 1) == WHOLE


def test_a_directory_of_one_rank_is_not_opened_by_another(tmp_path):
    KVStore.open(tmp_path / "s", WHOLE.shard(0, 2)).close()
    with pytest.raises(SchemaMismatchError, match=r"KV heads 0 to 1 of 4.*KV heads 2 to 3 of 4"):
        KVStore.open(tmp_path / "s", WHOLE.shard(1, 2))
    KVStore.open(tmp_path / "s", WHOLE.shard(0, 2)).close()


@pytest.mark.parametrize(
    ("how", "rank", "world", "fragment"),
    [
        ("shard", 0, 3, "4 KV heads cannot be shared evenly by 3 ranks; a world of 1, 2, 4 fits"),
        ("shard", 0, 8, "4 KV heads cannot be shared evenly by 8 ranks"),
        ("stage", 0, 6, "5 layers are too few for 6 ranks; use at most 5"),
        ("shard", 2, 2, "rank 2 of 2"),
        ("stage", -1, 2, "rank -1 of 2"),
        ("stage", 0, 0, "rank 0 of 0"),
        ("shard", True, 2, "rank must be an integer, not True"),
        ("stage", 0, 2.0, "world must be an integer, not 2.0"),
    ],
)
def test_what_cannot_be_parted_is_named_with_its_numbers(how, rank, world, fragment):
    with pytest.raises(ConfigError, match=fragment):
        getattr(WHOLE, how)(rank, world)
