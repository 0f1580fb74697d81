"""Codebooks that belong to the model: trained once, shared, saved and loaded; codes that do not know positions."""

import dataclasses
import json
import struct

import numpy as np
import pytest
import torch

from kvstore import ConfigError, IndexConfig, InvalidQueryError, KVStore, RopeSpec, Schema, SchemaMismatchError
from kvstore.index.pq import PQIndex
from kvstore.index.registry import make_index
from kvstore.tensor_file import read_tensors, write_tensors
from tests.builders import SCHEMA, append, cut, fill, filled, flat_config, make_query, make_rows, pq_config, same_bits
from tests.index.oracles import rotate

ROPE_SCHEMA = dataclasses.replace(
    SCHEMA, rope=(RopeSpec.from_theta(10000.0, 16), RopeSpec.from_theta(50.0, 16)), fingerprint="with RoPE"
)
each_space = pytest.mark.parametrize("schema", [SCHEMA, ROPE_SCHEMA], ids=["raw", "rope"])


def config(codebook="model", **changes):
    settings = {"options": {"m": 2, "bits": 4}, "min_rows": 24, "append_rows": 8, "codebook_rows": 100}
    return flat_config(index=IndexConfig("pq", codebook=codebook, **(settings | changes)))


def codebooks_of(seq):
    return [keeper.index.codebook for keeper in seq._indexes]


def notes(seq, layer=0):
    return seq._indexes[layer].describe()


# ---- the model's ----


@each_space
def test_the_first_long_sequence_trains_once_and_all_others_only_encode(schema):
    store, first, _ = filled(schema, config(), 300)
    assert store.stats().index_builds == 2
    others = [store.create(f"s{i}") for i in range(3)]
    for i, seq in enumerate(others):
        fill(seq, 60 + i, seed=i + 1)
    assert store.stats().index_builds == 2
    for seq in (first, *others):
        assert all(mine is store.codebooks.get(i).codebook for i, mine in enumerate(codebooks_of(seq)))
        assert notes(seq)["codebook"] == "model v1"
    assert [store.codebooks.get(layer).rows for layer in store.codebooks] == [290, 290]


def test_shared_codebooks_are_counted_once():
    store, seq, _ = filled(SCHEMA, config(), 300)
    fill(store.create("other"), 300, seed=1)
    rows = 2 * (len(seq) - 10)
    indexes = [keeper.index for name in store for keeper in store[name]._indexes]
    assert all(index.nbytes == index._codes.nbytes for index in indexes)
    assert store.stats().codebook_bytes == sum(store.codebooks.get(i).codebook.nbytes for i in (0, 1)) > 0
    assert sum(index.n_rows for index in indexes) == 2 * rows


def test_a_short_sequence_trains_its_own_until_there_is_one_for_all():
    store, seq, _ = filled(SCHEMA, config(), 60)
    assert len(store.codebooks) == 0
    assert notes(seq)["codebook"] == "sequence"
    fill(seq, 60, seed=1)  # 110 rows between sinks and window
    assert notes(seq)["codebook"] == "model v1"
    assert store.codebooks.get(1).rows == 110
    assert seq._indexes[0].covered == (2, 112)


def test_the_models_codebook_is_the_one_a_sequence_would_train():
    alone = filled(SCHEMA, pq_config(), 300)[1]
    _, seq, _ = filled(SCHEMA, config(), 300)
    for layer in range(2):
        assert np.array_equal(alone._indexes[layer].index.codes, seq._indexes[layer].index.codes)
    assert same_bits(alone.attend(0, make_query(SCHEMA, 0)), seq.attend(0, make_query(SCHEMA, 0)))


def test_codebooks_trained_on_a_calibration_text_serve_every_sequence():
    store = KVStore(SCHEMA, config(codebook_rows=10**6))
    fill(store.create("calibration"), 200)
    store.train_codebooks("calibration")
    store.drop("calibration")
    fill(store.create("book"), 40, seed=1)
    assert notes(store["book"])["codebook"] == "model v1"


def test_a_new_version_leaves_indexes_alone_until_they_are_built_again():
    store, seq, _ = filled(SCHEMA, config(), 300)
    old, codes = codebooks_of(seq), seq._indexes[0].index.codes.copy()
    fill(store.create("other"), 200, seed=1)
    store.train_codebooks("other", layer=0)
    assert [store.codebooks.get(i).version for i in (0, 1)] == [2, 1]
    fill(seq, 20, seed=2)
    assert codebooks_of(seq) == old
    assert np.array_equal(seq._indexes[0].index.codes[:, : codes.shape[1]], codes)
    seq.reindex()
    assert codebooks_of(seq)[0] is store.codebooks.get(0).codebook is not old[0]
    assert notes(seq)["codebook"] == "model v2"
    assert store.stats().index_builds == 2  # encoding again is no training


def test_calibration_needs_rows_and_a_kind_with_codebooks():
    store, _, _ = filled(SCHEMA, config(), 10)
    with pytest.raises(InvalidQueryError, match="no rows between sinks and window"):
        store.train_codebooks()
    store, _, _ = filled(SCHEMA, flat_config(), 100)
    with pytest.raises(ConfigError, match="no codebook"):
        store.train_codebooks()


def test_kinds_without_codebooks_ignore_the_setting_and_say_so():
    store, seq, _ = filled(SCHEMA, config(options={}, codebook_rows=1), 100)
    del store, seq
    settings = IndexConfig("sq4", min_rows=24, codebook="model")
    try:
        make_index("sq4", 2, 16)
    except ConfigError:
        pytest.skip("no kind without codebooks is built in")
    store, seq, _ = filled(SCHEMA, flat_config(index=settings), 100)
    assert "ignored" in notes(seq)["codebook"]
    assert "ignored" in str(seq.explain(0, make_query(SCHEMA, 0)))
    assert store.stats().drift == 0.0


# ---- auto ----


def test_auto_starts_from_the_models_codebook_and_donates_one_when_there_is_none():
    store, seq, _ = filled(SCHEMA, config("auto"), 300)
    assert notes(seq)["codebook"] == "model v1"
    fill(store.create("other"), 60, seed=1)
    assert notes(store["other"])["codebook"] == "model v1"
    assert store.stats().index_builds == 2


def test_auto_refines_with_the_sequences_own_when_the_models_does_not_fit():
    store, _, _ = filled(SCHEMA, config("auto"), 300)
    odd = store.create("odd")
    rows = [(3 * keys + 4, values) for keys, values in make_rows(SCHEMA, 400, seed=2)]
    append(odd, cut(rows, 0, 90))  # shorter than a codebook needs
    store.wait()
    assert notes(odd)["codebook"] == "model v1"
    for at in range(90, 400, 10):
        append(odd, cut(rows, at, at + 10))
    store.wait()
    assert notes(odd)["codebook"] == "sequence"
    assert odd._indexes[0].covered == (2, 392)
    assert store.codebooks.get(0).version == 1
    assert notes(store["book"])["codebook"] == "model v1"


def test_auto_refines_right_after_a_prefill():
    store, _, _ = filled(SCHEMA, config("auto"), 300)
    odd = store.create("odd")
    append(odd, [(3 * keys + 4, values) for keys, values in make_rows(SCHEMA, 400, seed=2)])
    assert notes(odd)["codebook"] == "model v1"
    store.wait()
    assert notes(odd)["codebook"] == "sequence"


def test_reindex_in_auto_gives_a_sequence_its_own():
    _store, seq, _ = filled(SCHEMA, config("auto"), 300)
    seq.reindex()
    assert notes(seq)["codebook"] == "sequence"


# ---- on disk ----


@each_space
def test_a_saved_catalog_serves_another_store(schema, tmp_path):
    store, seq, rows = filled(schema, config(), 300)
    store.codebooks.save(tmp_path / "books.safetensors")
    again = KVStore(schema, config())
    again.codebooks.load(tmp_path / "books.safetensors")
    assert list(again.codebooks) == [0, 1]
    append(again.create("book"), rows)
    assert again.stats().index_builds == 0
    for layer in range(2):
        assert np.array_equal(again["book"]._indexes[layer].index.codes, seq._indexes[layer].index.codes)
        assert again.codebooks.get(layer).version == 1
        assert np.array_equal(again.codebooks.get(layer).error, store.codebooks.get(layer).error)
    assert [path.name for path in tmp_path.iterdir()] == ["books.safetensors"]


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="compared with the package safetensors")
    store, _, _ = filled(SCHEMA, config(), 300)
    store.codebooks.save(tmp_path / "books")
    arrays = safetensors.load_file(tmp_path / "books")
    assert np.array_equal(arrays["layer.1.centroids"], store.codebooks.get(1).codebook.centroids)
    safetensors.save_file(arrays, tmp_path / "theirs", {"a": "b"})
    found, metadata = read_tensors(tmp_path / "theirs")
    assert metadata == {"a": "b"}
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


OTHERS = {
    "model": (dataclasses.replace(SCHEMA, fingerprint="another"), config()),
    "schema": (Schema(n_layers=3, n_q_heads=4, n_kv_heads=2, head_dim=16), config()),
    "rope": (dataclasses.replace(ROPE_SCHEMA, fingerprint=""), config(options={"space": "raw", "m": 2, "bits": 4})),
    "layout": (SCHEMA, config(options={"m": 2, "bits": 5})),
}


@pytest.mark.parametrize("what", OTHERS)
def test_codebooks_of_something_else_are_refused(what, tmp_path):
    store, _, _ = filled(SCHEMA, config(), 300)
    store.codebooks.save(tmp_path / "books")
    other = KVStore(*OTHERS[what])
    with pytest.raises(SchemaMismatchError, match=what):
        other.codebooks.load(tmp_path / "books")
    assert len(other.codebooks) == 0


def test_how_it_was_trained_does_not_matter_for_loading(tmp_path):
    store, _, _ = filled(SCHEMA, config(), 300)
    store.codebooks.save(tmp_path / "books")
    other = KVStore(SCHEMA, config(options={"m": 2, "bits": 4, "iterations": 9}, seed=8))
    other.codebooks.load(tmp_path / "books")
    assert len(other.codebooks) == 2


def test_a_file_of_a_later_format_is_refused(tmp_path):
    store, _, _ = filled(SCHEMA, config(), 300)
    store.codebooks.save(tmp_path / "books")
    arrays, metadata = read_tensors(tmp_path / "books")
    write_tensors(tmp_path / "books", arrays, metadata | {"format_version": "3"})
    with pytest.raises(SchemaMismatchError, match="format_version 3"):
        store.codebooks.load(tmp_path / "books")


@pytest.mark.parametrize("damage", ["empty", "half", "header", "longer", "nan", "missing", "shape"])
def test_a_damaged_file_is_refused_and_changes_nothing(damage, tmp_path):
    store, _, _ = filled(SCHEMA, config(), 300)
    path = tmp_path / "books"
    store.codebooks.save(path)
    data = path.read_bytes()
    arrays, metadata = read_tensors(path)
    broken = {
        "empty": b"",
        "half": data[: len(data) // 2],
        "header": struct.pack("<Q", 1 << 60) + data[8:],
        "longer": data + b"\0",
    }
    if damage in broken:
        path.write_bytes(broken[damage])
    else:
        if damage == "nan":
            arrays["layer.0.error"][0] = np.nan
        elif damage == "missing":
            del arrays["layer.1.error"]
        else:
            arrays["layer.1.centroids"] = arrays["layer.1.centroids"][:, :1]
        write_tensors(path, arrays, metadata)
    before = [store.codebooks.get(layer) for layer in (0, 1)]
    with pytest.raises(SchemaMismatchError):
        store.codebooks.load(path)
    assert [store.codebooks.get(layer) for layer in (0, 1)] == before


def test_saving_that_fails_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "tensors"
    write_tensors(path, {"a": np.ones(3, np.float32)}, {})
    with pytest.raises(TypeError):
        write_tensors(path, {"a": np.ones(3, np.float32)}, {"a": object()})
    assert read_tensors(path)[0]["a"].tolist() == [1, 1, 1]
    assert json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")["a"]["shape"] == [3]
    assert len(list(tmp_path.iterdir())) == 1


# ---- codes without positions ----


@pytest.mark.parametrize("offset", [1, 977, 100_000])
def test_a_passages_codes_serve_at_another_offset_as_freshly_encoded_ones(offset):
    rope = RopeSpec.from_theta(10000.0, 16)
    generator = np.random.default_rng(0)
    before = generator.standard_normal((2, 300, 16)).astype(np.float32)
    here, there = np.arange(300), np.arange(offset, offset + 300)
    index = PQIndex(2, 16, m=2, bits=6, rope=rope)
    index.train(rotate(before, here, rope).astype(np.float32), here)
    index.add(rotate(before, here, rope).astype(np.float32), here)
    attached, fresh = (PQIndex(2, 16, m=2, bits=6, rope=rope, codebook=index.codebook) for _ in range(2))
    attached.add_codes(index.codes, there)
    fresh.add(rotate(before, there, rope).astype(np.float32), there)
    same = (attached.codes == fresh.codes).all(axis=2)
    assert same.mean() > 0.98  # rounding of the rotation may decide a tie otherwise
    q = generator.standard_normal((2, 3, 16)).astype(np.float32)
    ours, theirs = attached.scores(q), fresh.scores(q)
    for head in range(2):
        np.testing.assert_array_equal(ours[head][:, same[head]], theirs[head][:, same[head]])


@pytest.mark.parametrize(
    "changes",
    [{"codebook": "mine"}, {"codebook_rows": 0}, {"reindex_drift": 1.0}, {"reindex_drift": float("nan")},
     {"iterations": 0}, {"iterations": "many"}, {"iterations": True}, {"iterations": 3, "options": {"iterations": 4}}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError):
        IndexConfig(**changes)


def test_queries_are_answered_alike_with_any_codebook_when_all_rows_are_candidates():
    rows = make_rows(SCHEMA, 300, seed=3)
    outs = []
    for codebook in ("sequence", "model", "auto"):
        store = KVStore(SCHEMA, config(codebook, over_fetch=100.0))
        append(store.create("book"), rows)
        outs.append(store["book"].attend(1, make_query(SCHEMA, 1)))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
