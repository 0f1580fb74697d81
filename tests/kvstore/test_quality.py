import numpy as np
import pytest

from kvstore import ConfigError
from kvstore.quality import FIRST_HALF, Exam, Method, build_index, index_picker, measure
from kvstore.traces import TraceError
from tests.traces import make_trace

SIZES = {"sinks": 2, "window": 16, "every": 3}
RAW = {"m": 2, "bits": 4, "space": "raw"}


@pytest.fixture(scope="module")
def exam():
    return Exam(make_trace(), **SIZES)


def by_hand(trace, share, sinks=2, window=16, every=3):
    """Exact selection's marks in float64, one query head and query at a time."""
    k, v, q = (np.asarray(x, np.float64) for x in (trace.k, trace.v, trace.q))
    mids, masses, errors = [], [], []
    for i in range(0, trace.n_queries, every):
        n = trace.n_tokens - trace.n_queries + i + 1
        middle = np.arange(sinks, n - window)
        for h in range(trace.n_kv_heads):
            heads = range(h * trace.group, (h + 1) * trace.group)
            scores = np.stack([k[h, :n] @ q[g, i] * trace.scale for g in heads])
            total = sum(np.exp(s[middle]) / np.exp(s[middle]).sum() for s in scores)
            picked = middle[np.argsort(-total)[: round(share * trace.n_tokens)]]
            read = np.concatenate([np.arange(sinks), picked, np.arange(n - window, n)])
            for s in scores:
                w = np.exp(s) / np.exp(s).sum()
                mids.append(w[picked].sum() / w[middle].sum())
                masses.append(w[read].sum())
                full, part = w @ v[h, :n], w[read] @ v[h, read] / w[read].sum()
                errors.append(np.linalg.norm(part - full) / np.linalg.norm(full))
    return np.mean(mids), np.mean(masses), np.mean(errors)


@pytest.mark.parametrize("share", [0.2, 0.05])
def test_exact_selection_is_what_arithmetic_by_hand_gives(exam, share):
    got = exam.mark(exam.exact, share)
    assert (got.mid, got.mass, got.oerr) == pytest.approx(by_hand(exam.trace, share), abs=1e-4)
    assert got.rec == 1.0


def test_the_flat_index_is_the_reference(exam):
    flat = measure([exam], Method("flat"), [0.1])[0.1]
    assert flat.rec == pytest.approx(1.0, abs=0.01)
    assert flat.mid == pytest.approx(exam.mark(exam.exact, 0.1).mid, abs=1e-4)


def test_a_budget_of_all_rows_costs_nothing(exam):
    got = measure([exam], Method("pq", RAW), [1.0])[1.0]
    assert (got.mid, got.mass, got.rec, got.oerr) == pytest.approx((1, 1, 1, 0), abs=1e-4)


def test_random_rows_are_worth_little(exam):
    random = np.random.default_rng(0)

    def pick(q, k, start, stop):
        return np.stack([random.choice(np.arange(start, stop), k, replace=False) for _ in q])

    got = exam.mark(pick, 0.1)
    assert got.mid < 0.3 < exam.mark(exam.exact, 0.1).mid
    assert got.rec < 0.3


def test_more_bytes_more_budget_and_over_fetch_help(exam):
    coarse, fine = (measure([exam], Method("pq", {"m": m, "bits": 6, "space": "raw"})) for m in (1, 8))
    assert coarse[0.1].mid < fine[0.1].mid
    assert fine[0.05].mid < fine[0.1].mid < fine[0.2].mid
    again = measure([exam], Method("pq", {"m": 1, "bits": 6, "space": "raw"}, over_fetch=3))
    assert again[0.1].mid > coarse[0.1].mid
    assert again[0.1].rec > coarse[0.1].rec
    assert again[0.1].oerr < coarse[0.1].oerr


def test_a_codebook_before_rope_does_not_grow_stale(exam):
    fresh, stale = (
        measure([exam], Method("pq", {"m": 4, "bits": 6, "space": "rope"}, codebook=rows), [0.1])[0.1]
        for rows in ("all rows", FIRST_HALF)
    )
    assert stale.mid == pytest.approx(fresh.mid, abs=0.05)
    raw = measure([exam], Method("pq", {"m": 4, "bits": 6, "space": "raw"}, codebook=FIRST_HALF), [0.1])[0.1]
    assert raw.mid < stale.mid


def test_a_codebook_of_another_trace(exam):
    method = Method("pq", {"m": 2, "bits": 4})
    own = build_index(exam, method)
    other = build_index(exam, method, make_trace(n=300, seed=5))
    assert (other.first_row, other.stop_row) == (own.first_row, own.stop_row) == (2, 384)
    assert not np.array_equal(own.codebook.centroids, other.codebook.centroids)
    assert 0 < exam.mark(index_picker(exam, other), 0.1).mid < 1
    with pytest.raises(TraceError, match="does not fit"):
        build_index(exam, method, make_trace(layer=9))


def test_picks_are_checked(exam):
    with pytest.raises(ValueError, match="twice"):
        exam.mark(lambda q, k, start, stop: np.full((2, k), start), 0.1)
    with pytest.raises(ValueError, match="outside"):
        exam.mark(lambda q, k, start, stop: np.tile(np.arange(k), (2, 1)), 0.1)
    with pytest.raises(ValueError, match="must pick"):
        exam.mark(lambda q, k, start, stop: np.tile(np.arange(start, start + k - 1), (2, 1)), 0.1)


def test_settings_and_traces_that_do_not_fit(exam):
    with pytest.raises(ConfigError, match="no index of kind 'pq'"):
        measure([exam], Method("pq", {"colour": 1}))
    with pytest.raises(ConfigError, match="unknown kind"):
        measure([exam], Method("nothing"))
    with pytest.raises(TraceError, match="capture more"):
        Exam(make_trace(n=70), sinks=4, window=64)
