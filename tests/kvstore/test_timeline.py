"""The timeline: what is recorded, that it adds up, and that nothing is when nobody asks."""

import json
import sys
import threading

import pytest

from kvstore import ConfigError, KVStore
from kvstore.recorder import OFF, Recorder
from kvstore.timeline import Timeline, joined
from tests.builders import SCHEMA, fill, make_query, make_rows, pq_config
from tests.kvstore.test_larger_than_memory import SCHEMA as BIG
from tests.kvstore.test_larger_than_memory import limited
from tests.kvstore.test_overlap import late, stepping


def names(timeline, lane=None):
    return [event.name for event in timeline.events if lane in (None, event.lane)]


def test_a_prompt_and_a_token_are_recorded():
    store, seq = late()
    with store.timeline() as timeline:
        fill(seq, 100)
        seq.attend(1, make_query(SCHEMA, 0))
    assert names(timeline) == ["append", "append", "step", "build", "build", "commit", "search", "attend"]
    assert [event.layer for event in timeline.events] == [0, 1, None, 0, 1, None, 1, 1]
    assert timeline.lanes == ["book", "MainThread"]
    assert timeline.overlap("build", "step") == 0  # at the commit the pass is over
    assert timeline.overlap("build", "commit") == pytest.approx(timeline.seconds("build"))
    fill(seq, 10)
    assert len(timeline.events) == 8


def test_builds_beside_the_pass_are_seen_to_be():
    store, seq, worker = stepping()
    with store.timeline() as timeline:
        seq.begin_step()
        for layer, rows in enumerate(make_rows(SCHEMA, 100, 0)):
            seq.append(layer, *rows)
        worker.works[0].finish()
        seq.commit_step()
        seq.attend(1, make_query(SCHEMA, 0))
    assert names(timeline, "stepped") == ["build", "build"]
    hidden, whole = timeline.overlap("build", "step"), timeline.seconds("build")
    first = next(event for event in timeline.events if event.name == "build")
    assert hidden == pytest.approx((first.stop_us - first.start_us) / 1e6)
    assert hidden == timeline.overlap("step", "build") < whole
    assert timeline.overlap("build", "wait") == pytest.approx(whole - hidden, rel=0.2)
    assert "wait" in names(timeline, "MainThread")


def test_a_step_that_is_taken_back_ends():
    store, seq = late()
    with store.timeline() as timeline:
        seq.begin_step()
        seq.abort_step()
        seq.abort_step()
    assert names(timeline) == ["step"]


def test_the_disk_is_recorded(tmp_path):
    with KVStore.open(tmp_path / "s", BIG, limited(pq_config())) as store, store.timeline() as timeline:
        seq = store.create("book")
        for i in range(6):
            fill(seq, 150, seed=i)
        store.flush()
        seq.read(0)
        assert seq._tables[0].n_spilled
    assert {"save", "flush", "read"} <= set(names(timeline))
    assert {event.layer for event in timeline.events if event.name == "read"} >= {0}


def test_times_are_added_up_once_however_many_run():
    timeline = Timeline()
    for start, stop in ((0, 2e6), (1e6, 3e6), (5e6, 6e6)):
        timeline.add("build", start, stop, lane="w")
    timeline.add("step", 2.5e6, 5.5e6, lane="s")
    assert timeline.seconds("build") == pytest.approx(4)
    assert timeline.overlap("build", "step") == pytest.approx(1)
    assert timeline.overlap("build", "no such name") == timeline.seconds("no such name") == 0
    assert joined([]) == []


def test_the_file_is_a_trace_that_chrome_reads(tmp_path):
    store, seq = late()
    with store.timeline() as timeline:
        fill(seq, 100)
    timeline.save(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in found if event["ph"] == "M"}
    spans = [event for event in found if event["ph"] == "X"]
    assert sorted(lanes.values()) == ["MainThread", "book"]
    assert len(spans) == len(timeline.events) == 6
    assert all(set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} for event in spans)
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 and event["tid"] in lanes for event in spans)
    appended = [event["args"]["layer"] for event in spans if event["name"] == "append"]
    assert appended == [0, 1]


@pytest.mark.parametrize("n_rows", [0, 100])
def test_it_can_be_drawn(tmp_path, n_rows):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    store, seq = late()
    with store.timeline() as timeline:
        if n_rows:
            fill(seq, n_rows)
    timeline.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot draw"):
        timeline.plot(tmp_path / "no folder" / "a.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"kvstore-engine\[bench\]"):
        Timeline().plot(tmp_path / "a.png")


def test_one_at_a_time_and_off_afterwards():
    store = KVStore(SCHEMA, pq_config())
    with store.timeline(), pytest.raises(ConfigError, match="already"), store.timeline():
        pass
    assert store.recorder.timeline is None
    assert store.recorder.span("append", 1) is OFF
    with pytest.raises(ZeroDivisionError), store.timeline() as timeline, store.recorder.span("append"):
        _ = 1 / 0
    assert names(timeline) == ["append"]
    assert store.recorder.timeline is None


def test_threads_may_add_at_the_same_time():
    recorder = Recorder()
    with recorder.record() as timeline:

        def work():
            for _ in range(500):
                with recorder.span("build"):
                    pass

        threads = [threading.Thread(target=work, name=f"w{i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(timeline.events) == 2000
    assert sorted(timeline.lanes) == ["w0", "w1", "w2", "w3"]
