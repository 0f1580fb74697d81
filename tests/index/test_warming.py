"""After a warm-up nothing compiles any more."""

from tests.compiled import assert_compiles_nothing

INDEXES = """
from kvstore.index import RopeSpec, RowView, Workspace, kmeans, make_index, warmup
from kvstore.index.batch_search import search_batch
HEADS, DIM, GROUP = 2, 16, 3
rope = RopeSpec.from_theta(1e4, DIM)
warmup(HEADS, DIM, GROUP, rope=rope)
warmup(HEADS, DIM, GROUP, rope=rope, kinds=[("pq", {"scan_pairs": 4}), ("pq", {"m": 2, "bits": 8})])
begin()
kinds = ["flat", "pq", "sq4", "sq8", "rabitq", "page", "sparq"]
cases = [(kind, {}) for kind in kinds] + [("pq", {"space": "raw"}), ("page", {"digest": "mean"})]
cases += [("pq", {"scan_pairs": 4}), ("pq", {"m": 2, "bits": 8})]
for kind, settings in cases:
    known = {} if kind == "flat" else {"rope": rope, "seed": 1}
    index = make_index(kind, HEADS, DIM, first_row=3, **known, **settings)
    index.train(normal(HEADS, 700, DIM))
    for n in (5, 1, 0, 3000):
        index.add(normal(HEADS, n, DIM))
    twin = index.clone()
    twin.truncate(1000)
    twin.add(normal(HEADS, 1, DIM), np.array([9999]))
    keys = normal(HEADS, 4000, DIM)
    for rows in (keys, keys.astype(np.float16)) if index.needs_rows else (keys,):
        view = RowView.of(rows) if index.needs_rows else None
        for group in (1, GROUP):
            for reduce in ("sum_softmax", "max", "mean"):
                index.search(normal(HEADS, group, DIM), 40, view, scale=0.25, reduce=reduce)
            index.search(normal(HEADS, group, DIM), 9, view, scale=0.25, start=100, stop=101)
            twin.scores(normal(HEADS, group, DIM), view, start=50, stop=70)
            search_batch([index, twin], normal(2, HEADS, group, DIM), [40, 9], [view] * 2, [(3, 3000), (50, 70)],
                         scale=0.25, reduce="mean", workspace=Workspace())
    if kind == "pq":
        index.errors(normal(HEADS, 2, DIM), np.array([5, 9]))
        index.train(normal(HEADS, 700, DIM), warm=True)
        other = make_index("pq", HEADS, DIM, codebook=index.codebook, rope=rope, **settings)
        other.add_codes(twin.codes[:, :0])
        other.add_codes(twin.codes)
kmeans(normal(50, 4), 7)
kmeans(normal(3, 50, 4), 7, init=normal(3, 7, 4))
"""


def test_indexes_compile_nothing_after_a_warmup() -> None:
    assert_compiles_nothing(INDEXES)
