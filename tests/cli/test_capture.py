import numpy as np
import pytest
import torch

from kvstore.traces import read_traces

pytestmark = pytest.mark.hf
TEXT = "the text of a book that tells a magic number, and then the other text. " * 70


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_traces_hold_what_the_model_computed(run, model, tokenizer, model_dir, text, tmp_path):
    """Keys and values are those of a DynamicCache after one pass over the same tokens."""
    from transformers import DynamicCache

    from kvstore.adapters.hf import cache_argument
    from tests.traces import rotated

    out = tmp_path / "traces"
    result = run("capture", "--model", model_dir, "--text", text, "--out", out, "--tokens", 600, "--queries", 8)
    assert result.exit_code == 0, result.output
    traces = read_traces(out)
    assert [trace.layer for trace in traces] == [0, 1]
    assert len(result.stdout.splitlines()) == 2
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:600]])
    cache = DynamicCache()
    with torch.no_grad():
        wanted = model(ids, output_attentions=False, **{cache_argument(model): cache}).logits
    for trace, layer in zip(traces, cache.layers, strict=True):
        np.testing.assert_allclose(trace.k, layer.keys[0].numpy(), atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(trace.v, layer.values[0].numpy(), atol=2e-3, rtol=2e-3)
        turned = rotated(trace.k_pre.astype(np.float64), np.arange(600), trace.rope)
        np.testing.assert_allclose(turned, trace.k, atol=1e-2, rtol=1e-2)
        assert trace.q.shape == (4, 8, 8)
        assert trace.q_cal.shape == (4, len(trace.cal_pos), 8)
        assert trace.cal_pos.max() < 592
        assert trace.scale == pytest.approx(8**-0.5)
    assert torch.isfinite(wanted).all()


def test_queries_are_those_of_their_positions(tiny_model, text):
    """Attention recomputed from a trace's first layer is what the model's own attention gives."""
    from kvstore.adapters.hf.capture import capture

    model, ids = tiny_model
    seen = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    try:
        [trace] = capture(model, ids, [0], n_queries=5)
    finally:
        hook.remove()
    outputs = torch.cat(seen).numpy().reshape(len(ids), 4, 8)
    for i in range(5):
        t = len(ids) - 5 + i
        scores = trace.scale * np.einsum("hgd,hnd->hgn", trace.queries(i), trace.keys[:, : t + 1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        got = np.einsum("hgn,hnd->hgd", weights, trace.v[:, : t + 1]).reshape(4, 8)
        np.testing.assert_allclose(got, outputs[t], atol=1e-4)


@pytest.fixture
def tiny_model(model, tokenizer):
    return model, tokenizer(TEXT)["input_ids"][:530]


def test_the_model_is_left_as_it_was(tiny_model):
    from transformers import AttentionInterface

    from kvstore.adapters.hf.capture import NAME, capture, dense_attention

    model, ids = tiny_model
    before = model.config._attn_implementation
    capture(model, ids[:64], [1], n_queries=4)
    assert model.config._attn_implementation == before
    assert AttentionInterface()[NAME] is dense_attention


def test_what_cannot_be_captured_is_refused_in_one_line(refused, model_dir, text, tmp_path):
    start = ("capture", "--model", model_dir, "--text", text, "--out", tmp_path / "out")
    assert "fewer than 100000" in refused(*start, "--tokens", 100_000)
    assert "no layers [7]" in refused(*start, "--tokens", 100, "--queries", 4, "--layers", "0,7")
    assert "separated by commas" in refused(*start, "--layers", "first")
    assert "too few for 64 queries" in refused(*start, "--tokens", 100)
    assert "trained for 1024" in refused(*start, "--tokens", 1025)
    assert "cannot read" in refused("capture", "--text", tmp_path / "no.txt", "--out", tmp_path)
    (tmp_path / "file").write_text("")
    line = refused(*start[:-1], tmp_path / "file", "--tokens", 100, "--queries", 4)
    assert "cannot write" in line
