from dataclasses import fields

import pytest

from benchmarks.decode_rows import add_splits
from benchmarks.engines import StoreEngine
from benchmarks.report import Report, check_report
from benchmarks.speed import Speed
from benchmarks.split import ADAPTER, APPENDED, CALLED, COMMITTED, FORWARD, Meter, Split, seconds_of_event, split_of
from kvstore.timeline import Timeline

PARTS = ("search_s", "fetch_s", "plan_s", "append_s", "commit_s", "other_s", "model_s")
US_OF_TWO_STEPS = {
    FORWARD: [(0, 100), (100, 220)],
    ADAPTER: [(10, 80), (20, 30), (110, 200)],  # a method of the cache that calls another counts once
    APPENDED: [(12, 18), (112, 118)],
    COMMITTED: [(20, 24), (120, 126)],
    CALLED: [(40, 70), (140, 190)],
    "attend": [(44, 70), (144, 190)],
    "search": [(44, 50), (144, 160)],
}


def timeline_of(us_by_name):
    timeline = Timeline()
    for name, ranges in us_by_name.items():
        for start, stop in ranges:
            timeline.add(name, float(start), float(stop))
    return timeline


def split_by_hand():
    return split_of(timeline_of(US_OF_TWO_STEPS), n_steps=2, n_layers=3, event_s=1e-7)


@pytest.fixture
def engine(model, ids, config):
    engine = StoreEngine(model, config)
    engine.start(0)
    with engine.active():
        engine.forward(ids[:300])
    yield engine
    engine.close()


def test_parts_of_a_timeline():
    split = split_by_hand()
    microseconds = {name: pytest.approx(1e6 * getattr(split, name)) for name in ("step_s", *PARTS)}
    assert microseconds == {
        "step_s": 110, "search_s": 11, "fetch_s": 25, "plan_s": 4, "append_s": 6, "commit_s": 5, "other_s": 29,
        "model_s": 30,
    }  # fmt: skip
    assert split.outside_s == pytest.approx(44e-6)
    assert split.n_events == 7.5
    assert split.measuring_s == pytest.approx(7.5e-7)


def test_a_part_that_is_longer_than_the_whole_is_refused():
    wrong = {**US_OF_TWO_STEPS, "attend": [(44, 170)]}
    with pytest.raises(RuntimeError, match="plan would take"):
        split_of(timeline_of(wrong), n_steps=2, n_layers=3, event_s=0.0)


@pytest.mark.hf
@pytest.mark.parametrize("budget", [None, 0.2])
def test_a_step_adds_up(engine, ids, budget):
    meter = Meter(engine, [ids[i : i + 1] for i in range(300, 308)])
    engine.set_budget(budget)
    for _ in range(2):
        with engine.active(), meter.recording():
            meter.run()
        engine.back(8)
    assert len(meter.splits) == 2
    assert meter.median() == min(meter.splits, key=lambda split: split.step_s)
    for split in meter.splits:
        assert all(getattr(split, field.name) > 0 for field in fields(Split))
        assert sum(getattr(split, name) for name in PARTS) == pytest.approx(split.step_s)
        assert split.n_layers == 2


@pytest.mark.hf
def test_every_layer_of_every_step_is_clocked(engine, ids):
    meter = Meter(engine, [ids[i : i + 1] for i in range(300, 304)])
    with engine.active(), meter.recording():
        meter.run()
    per_layer = 7  # update, its append and the store's span; attention function, attend and the store's two spans
    per_step = 4  # forward pass, commit and the store's two spans; more for what transformers asks a cache
    assert meter.splits[0].n_events >= 2 * per_layer + per_step


@pytest.mark.hf
def test_measuring_changes_no_logits_and_leaves_nothing_behind(engine, ids):
    import torch
    from transformers import AttentionInterface

    from kvstore.adapters.hf.attention import store_attention

    tokens = [ids[i : i + 1] for i in range(300, 304)]
    engine.set_budget(0.2)
    with engine.active():
        plain = torch.cat([engine.forward(token) for token in tokens])
    engine.back(4)
    got = []
    meter = Meter(engine, tokens)
    with engine.active(), meter.recording():
        forward = meter._forward
        meter._forward = lambda token: got.append(forward(token))
        meter.run()
    assert torch.equal(torch.cat(got), plain)
    store, (sequence,) = engine.cache.store, engine.cache.sequences
    left = {"update", "attend", "append", "commit_step"}
    assert not any(left & set(vars(owner)) for owner in (engine.cache, store, sequence))
    assert AttentionInterface()["kvstore"] is store_attention
    assert store.recorder.timeline is None


def test_clocking_takes_microseconds_not_more():
    assert 0 <= seconds_of_event(repeats=50) < 1e-2


def test_rows_have_units_and_the_target():
    report = Report("decode", {"cpu": "any"})
    add_splits(report, 100, Speed({"store": 1.0}, {None: 8000.0}, {}, {None: split_by_hand()}))
    check_report(report.as_dict())
    assert {row.case for row in report.rows} == {"100 tokens, store, full budget"}
    rows = {row.metric: row for row in report.rows}
    step = rows["step, taken apart"]
    assert (step.ours, step.peer, step.peer_value) == (pytest.approx(0.110), "not taken apart", pytest.approx(0.125))
    outside = rows["engine time outside attention"]
    assert (outside.unit, outside.peer, outside.peer_value) == ("share of a step", "target", 0.15)
    assert outside.ours == pytest.approx(0.4)
    assert outside.ratio == pytest.approx(0.15 / 0.4)
    append, commit = rows["append"], rows["commit"]
    assert (append.unit, append.ours) == ("us a token and layer", pytest.approx(2.0))
    assert (commit.unit, commit.ours) == ("us a token", pytest.approx(5.0))
    assert append.peer_value == pytest.approx(0.2)
    parts = [row.ours for row in report.rows if row.metric.startswith("of it")]
    assert sum(parts) == pytest.approx(step.ours)
