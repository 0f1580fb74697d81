"""How long does it take to train a product quantizer on all keys of a layer and to encode them, and how good is it?

Ours is `PQIndex.train` + `add` on keys as they are stored; the peers are `faiss.ProductQuantizer` with its defaults (25
iterations, up to 256 rows a centroid) and scikit-learn's KMeans as PQCache uses it (every row, n_init=1, Lloyd,
tol=1e-4, as many iterations as ours). Keys are synthetic; scikit-learn takes part up to `SKLEARN_KEYS` keys a head,
with all heads and once: beyond that it would take many minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.report import Metric, Report
from benchmarks.setup import machine_with_peers, only_threads, reported, set_threads
from benchmarks.synthetic import FloatArray, Rows, make_rows
from benchmarks.timing import Contender, Tell, interleave, medians

TIME = Metric("train and encode", "s", "lower")
RATE = Metric("train and encode", "s/million keys of a head", "lower")
ENCODE = Metric("encode alone, one thread", "s/million keys of a head", "lower")
ERROR = Metric("squared error of the codes", "share of the keys' variance", "lower")
RECALL = Metric("recall of the exact rows", "share", "higher")
OURS, FAISS, SKLEARN = "ours", "faiss.ProductQuantizer", "sklearn.cluster.KMeans"
ITERATIONS = 5
SKLEARN_KEYS = 32_768

Decode = Callable[[int], FloatArray]
"""Keys of a head as its codes have them, float32 [n, head_dim]."""


@dataclass(frozen=True)
class Options:
    """Sizes: keys a head, dimensions, (m, bits), heads; rounds of ours and of FAISS; share of rows for recall."""

    lengths: tuple[int, ...] = (32_768, 131_072)
    head_dims: tuple[int, ...] = (64, 128)
    sizes: tuple[tuple[int, int], ...] = ((1, 8), (2, 6), (4, 8), (8, 8), (16, 8))
    heads: int = 8
    rounds: int = 3
    share: float = 0.1


QUICK = Options(lengths=(4096,), head_dims=(64,), sizes=((2, 6),), heads=2, rounds=1)


def run_kmeans(options: Options, report: Report, tell: Tell) -> None:
    """Measure every size and add the rows."""
    for head_dim in options.head_dims:
        for n in options.lengths:
            tell(f"making {n} keys of {head_dim}")
            rows = make_rows(options.heads, n, head_dim)
            for m, bits in options.sizes:
                _one_size(rows, m, bits, options, report, tell)
            _encode_alone(rows, options, report, tell)


def _one_size(rows: Rows, m: int, bits: int, options: Options, report: Report, tell: Tell) -> None:
    heads, n, head_dim = rows.keys.shape
    case = f"{heads} heads x {n} keys of {head_dim}, {m}x{bits}"
    found: dict[str, Decode] = {}
    work = {OURS: _ours, FAISS: _faiss} | ({SKLEARN: _sklearn} if n <= SKLEARN_KEYS else {})
    contenders = [_contender(name, make, rows, m, bits, found) for name, make in work.items()]
    _ours(rows, m, bits)  # compiles
    seconds = interleave(contenders, 1, lambda line: tell(f"{case}, {line}"))
    if options.rounds > 1:
        again = interleave(contenders[:2], options.rounds - 1, lambda line: tell(f"{case}, {line}"))
        for name, figures in again.items():
            seconds[name] += figures
    times = medians(seconds)
    marks = {name: _marks(rows, decode, options.share) for name, decode in found.items()}
    for peer in work:
        if peer != OURS:
            where = f"{case}, once" if peer == SKLEARN else case
            report.add(where, TIME, times[OURS], peer, times[peer])
            per_million = 1e6 / (heads * n)
            report.add(where, RATE, times[OURS] * per_million, peer, times[peer] * per_million)
            report.add(where, ERROR, marks[OURS][0], peer, marks[peer][0])
            report.add(where, RECALL, marks[OURS][1], peer, marks[peer][1])


def _contender(name: str, make: Any, rows: Rows, m: int, bits: int, found: dict[str, Decode]) -> Contender:
    def run() -> None:
        found[name] = make(rows, m, bits)

    return Contender(name, run)


def _ours(rows: Rows, m: int, bits: int) -> Decode:
    from kvstore.index import PQIndex

    heads, n, head_dim = rows.keys.shape
    index = PQIndex(heads, head_dim, m=m, bits=bits, space="raw", pairs=False, iterations=ITERATIONS)
    index.train(rows.keys)
    index.add(rows.keys)
    return lambda head: index.decode(head, np.arange(n))


def _faiss(rows: Rows, m: int, bits: int) -> Decode:
    import faiss

    made = []
    for keys in rows.keys:
        quantizer = faiss.ProductQuantizer(keys.shape[1], m, bits)
        quantizer.train(keys)
        made.append((quantizer, quantizer.compute_codes(keys)))

    def decode(head: int) -> FloatArray:
        quantizer, codes = made[head]
        keys: FloatArray = quantizer.decode(codes)
        return keys

    return decode


def _sklearn(rows: Rows, m: int, bits: int) -> Decode:
    from sklearn.cluster import KMeans

    settings = {"n_init": 1, "algorithm": "lloyd", "tol": 1e-4, "max_iter": ITERATIONS, "random_state": 0}
    parts = np.split(rows.keys, m, axis=2)
    made = [[_fitted(KMeans(2**bits, **settings), part[head]) for part in parts] for head in range(len(rows.keys))]
    return lambda head: np.concatenate([fit.cluster_centers_[fit.labels_] for fit in made[head]], 1)


def _fitted(kmeans: Any, points: FloatArray) -> Any:
    import warnings

    with warnings.catch_warnings():  # that so few iterations do not converge is known
        warnings.simplefilter("ignore")
        return kmeans.fit(np.ascontiguousarray(points))


def _marks(rows: Rows, decode: Decode, share: float) -> tuple[float, float]:
    """Return the squared error over the variance of the keys, and the recall for the group's queries; head by head."""
    from kvstore.quality import best_rows

    heads, n, head_dim = rows.keys.shape
    k, scale = max(1, round(share * n)), head_dim**-0.5
    error = variance = hits = 0.0
    for h, keys in enumerate(rows.keys):
        codes = decode(h)
        error += float(np.square(keys - codes).sum(dtype=np.float64))
        variance += float(np.square(keys - keys.mean(0)).sum(dtype=np.float64))
        wanted, got = (best_rows(scale * (rows.q[h] @ x.T)[None], k)[0] for x in (keys, codes))
        hits += float(np.isin(wanted, got).mean())
    return error / variance, hits / heads


def _encode_alone(rows: Rows, options: Options, report: Report, tell: Tell) -> None:
    """Add the cost of encoding with one sub-space of 8 bits on one thread, one head at a time."""
    import faiss

    from kvstore.index import PQIndex

    _, n, head_dim = rows.keys.shape
    tell(f"encoding {n} keys of {head_dim}")
    keys = rows.keys[:1]
    quantizer = faiss.ProductQuantizer(head_dim, 1, 8)
    quantizer.train(keys[0])
    index = PQIndex(1, head_dim, m=1, bits=8, space="raw")
    index.train(keys)

    def encode() -> None:
        index.truncate(0)
        index.add(keys)

    contenders = [Contender(OURS, encode), Contender(FAISS, lambda: quantizer.compute_codes(keys[0]))]
    with only_threads(1):
        interleave(contenders, 1)
        times = medians(interleave(contenders, options.rounds))
    case = f"1 head x {n} keys of {head_dim}, 1x8"
    report.add(case, ENCODE, 1e6 / n * times[OURS], FAISS, 1e6 / n * times[FAISS])


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small size: a minute.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every library.")] = 2,
) -> None:
    """Training and encoding beside FAISS and scikit-learn."""
    set_threads(threads)

    report = Report("kmeans", machine_with_peers())
    with reported(report, json) as tell:
        run_kmeans(QUICK if quick else Options(), report, tell)


if __name__ == "__main__":
    app()
