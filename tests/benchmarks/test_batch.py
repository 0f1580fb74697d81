"""Batches of a tiny model: the checks, and that every question is answered."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import batch
from benchmarks.batch_checks import Alone
from benchmarks.batch_engines import BatchEngine, make_prompts, padded
from benchmarks.engines import DYNAMIC, STORE
from benchmarks.report import Report, check_report
from benchmarks.speed import WrongResultError
from kvstore import KVStore

pytestmark = pytest.mark.hf

TINY = batch.Options(sizes=(1, 3), prompt_tokens=160, blocks=1, block_tokens=3, check_tokens=3)
THREE = replace(TINY, sizes=(3,))


def quiet(line):
    pass


@pytest.fixture
def report():
    return Report("test", {"cpu": "any"})


def test_every_question_is_answered(model, ids, config, report):
    batch.run_batch(model, ids, TINY, report, quiet, config)
    check_report(report.as_dict())
    rows = {(row.case, row.metric, row.peer): row for row in report.rows}
    for size in TINY.sizes:
        case = f"{size} sequence{'s' if size > 1 else ''} of up to 160 tokens"
        full, fifth = f"{case}, store, full budget", f"{case}, store, 1/5"
        for name in (full, fifth):
            decode = rows[name, batch.DECODE.name, DYNAMIC]
            assert decode.unit == "tokens/s"
            assert decode.ratio == decode.ours / decode.peer_value > 0
        assert rows[full, batch.SAME.name, batch.ALONE].ours == 1.0
        assert rows[full, batch.DIFFERENCE.name, DYNAMIC].ours < 1e-3
        assert rows[full, batch.PROMPT.name, DYNAMIC].unit == "s"
        assert rows[fifth, batch.BITS.name, "results compared"].ours == 2 * size  # layers
        assert 0 < rows[fifth, batch.SAME_TOKENS.name, batch.ALONE].ours <= 1
        assert (fifth, batch.DECODE.name, "store, full budget") in rows
    scaling = {row.case for row in report.rows if row.metric == batch.SCALING.name}
    assert scaling == {
        f"3 sequences of up to 160 tokens, {name}" for name in (DYNAMIC, "store, full budget", "store, 1/5")
    }


def test_prompts_differ_in_length_and_place(ids):
    prompts = make_prompts(ids, 160, 8, 4)
    lengths = [len(prompt.ids) for prompt in prompts]
    assert lengths == [160, 147, 133, 120]
    assert all(len(prompt.after) == 8 for prompt in prompts)
    tokens, mask = padded(prompts[1:])
    assert mask.sum(1).tolist() == lengths[1:]
    assert mask[0].all()
    assert not mask[2, : 147 - 120].any()
    assert torch.equal(tokens[2, 147 - 120 :], prompts[3].ids)


@pytest.mark.parametrize("name", [DYNAMIC, STORE])
def test_stepping_back_leaves_a_padded_batch_as_it_was(name, model, ids, config):
    prompts = make_prompts(ids, 120, 4, 3)
    engine = BatchEngine(name, model, config)
    with engine.active():
        logits = engine.prompt(prompts)
        first = engine.greedy(logits, 3)
        engine.forward(torch.tensor([7, 8, 9]))
        engine.back(1)
    assert torch.equal(engine.greedy(logits, 3), first)
    engine.close()


def test_a_batch_that_influences_its_sequences_stops_the_run(model, ids, config, report, monkeypatch):
    right = KVStore.attend

    def wrong(store, layer, sequences, q, **options):
        out = right(store, layer, sequences, q, **options)
        return out * (1 + 1e-6) if len(sequences) > 1 else out

    monkeypatch.setattr(KVStore, "attend", wrong)
    lines = []
    with pytest.raises(WrongResultError, match="attention results differ from those alone"):
        batch.run_batch(model, ids, THREE, report, lines.append, config)
    assert not any("decode" in line for line in lines)


def test_other_tokens_than_alone_stop_the_run(model, ids, config, report, monkeypatch):
    right = batch.run_alone

    def wrong(*args):
        alone = right(*args)
        alone[1] = Alone((alone[1].full + 1) % 256, alone[1].budget)
        return alone

    monkeypatch.setattr(batch, "run_alone", wrong)
    with pytest.raises(WrongResultError, match=r"sequences \[1\] decode other tokens than alone"):
        batch.run_batch(model, ids, THREE, report, quiet, config)


def test_other_logits_than_the_peers_stop_the_run(model, ids, config, report, monkeypatch):
    right = BatchEngine.forward

    def wrong(engine, tokens):
        return right(engine, tokens) + (0.01 if engine.name == STORE else 0)

    monkeypatch.setattr(BatchEngine, "forward", wrong)
    with pytest.raises(WrongResultError, match=f"differ from those of {DYNAMIC}"):
        batch.run_batch(model, ids, THREE, report, quiet, config)


def test_unknown_names_are_refused(model):
    with pytest.raises(ValueError, match="no engine"):
        BatchEngine("other", model)


def test_the_command_writes_json(model, ids, tmp_path, monkeypatch):
    loaded = SimpleNamespace(model=model, tokenizer=lambda text, **options: {"input_ids": ids.tolist()})
    monkeypatch.setattr("kvstore.adapters.model_files.load_model", lambda path, report: loaded)
    monkeypatch.setattr(batch, "QUICK", TINY)
    done = CliRunner().invoke(batch.app, ["--quick", "--json", str(tmp_path / "batch.json")])
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "batch.json").read_text())
    check_report(data)
    assert data["name"] == "batch"


@pytest.mark.parametrize("arguments", [["--sizes", "0"], ["--sizes", "x"], ["--blocks", "0"]])
def test_bad_arguments_are_refused_before_anything_runs(arguments):
    assert CliRunner().invoke(batch.app, arguments).exit_code == 2
