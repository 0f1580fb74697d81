"""How long does it take to find the top k of many keys for a group of queries, and how many of them are right?

One decode step of one layer: 8 KV heads with 4 query heads each, keys of 128 numbers. Ours is `Index.search`: scores,
the group's reduction and selection. torch computes exact scores, the same reduction, and `torch.topk`. FAISS searches
for each query head; how the group then agrees on k rows is computed after its clock has stopped. Keys are synthetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from benchmarks.report import Metric, Report
from benchmarks.setup import machine_with_peers, reported, set_threads
from benchmarks.synthetic import Rows, make_rows
from benchmarks.timing import Contender, Tell, interleave, medians

if TYPE_CHECKING:
    from benchmarks.faiss_peers import FaissKind
    from kvstore.index import PQIndex

TIME = Metric("search", "ms", "lower")
RECALL = Metric("recall of the exact group's rows", "share", "higher")
PER_KEY = Metric("search", "ns/key of a KV head", "neither")
SIZE = Metric("codes", "bytes/key", "lower")
HELD = Metric("index held, with its codebook and spare room", "bytes/key", "lower")
EXACT32, EXACT16 = "torch, exact float32", "torch, exact bfloat16"
ROPE, RAW = "rope 1x8", "raw 2x6"
OURS = {ROPE: {"m": 1, "bits": 8, "space": "rope"}, RAW: {"m": 2, "bits": 6, "space": "raw"}}
SUBSETS = {f"{ROPE}, half of the pairs": 4, f"{ROPE}, a quarter of the pairs": 8}
"""Scans of fewer RoPE pairs, by what head_dim is divided by to get their number."""

Rows64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Options:
    """Sizes: rows, heads, query heads a KV head, dimension; shares of rows wanted; rounds; rows of the scaling part."""

    n: int = 131_072
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    shares: tuple[float, ...] = (0.01, 0.1)
    rounds: int = 7
    lengths: tuple[int, ...] = (8192, 32_768, 131_072, 524_288, 1_048_576)


QUICK = Options(n=4096, heads=2, head_dim=64, rounds=2, lengths=(4096, 8192))


def run_topk(options: Options, report: Report, tell: Tell) -> None:
    """Measure everything and add the rows."""
    tell(f"making {options.n} keys")
    rows = make_rows(options.heads, options.n, options.head_dim, options.group)
    indexes = {}
    for name, settings in OURS.items():
        tell(f"training {name}")
        indexes[name] = _trained(rows, settings)
    whole = indexes[ROPE]
    for name, divisor in SUBSETS.items():
        indexes[name] = _recoded(whole, rows, {**OURS[ROPE], "scan_pairs": options.head_dim // divisor})
    faiss = _faiss(rows, tell)
    for share in options.shares:
        _compare(rows, indexes, faiss, share, options, report, tell)
    _scaling(rows, indexes, options, report, tell)


def _trained(rows: Rows, settings: dict[str, Any]) -> PQIndex:
    from kvstore.index import PQIndex

    index = PQIndex(len(rows.keys), rows.keys.shape[2], rope=rows.rope, **settings)
    index.train(rows.keys)
    index.add(rows.keys)
    return index


def _recoded(index: PQIndex, rows: Rows, settings: dict[str, Any]) -> PQIndex:
    """Return an index of the same codes with other settings of the scan."""
    from kvstore.index import PQIndex

    twin = PQIndex(index.n_kv_heads, index.head_dim, rope=rows.rope, codebook=index.codebook, **settings)
    twin.add_codes(index.codes)
    return twin


def _faiss(rows: Rows, tell: Tell) -> dict[str, dict[FaissKind, list[Any]]]:
    """Return FAISS's indexes of as many bytes a key as each of ours."""
    from benchmarks.faiss_peers import FAST_SCAN, PQ, FaissKind

    kinds = {
        ROPE: (FaissKind(PQ, 1, 8), FaissKind(FAST_SCAN, 2, 4)),
        RAW: (FaissKind(PQ, 2, 6), FaissKind(FAST_SCAN, 4, 4)),
    }
    built: dict[str, dict[FaissKind, list[Any]]] = {}
    for name in kinds:
        for kind in kinds[name]:
            tell(f"building {kind.label}")
            built.setdefault(name, {})[kind] = kind.build(rows.keys)
    return built


def _compare(
    rows: Rows,
    indexes: dict[str, PQIndex],
    faiss: dict[str, dict[FaissKind, list[Any]]],
    share: float,
    options: Options,
    report: Report,
    tell: Tell,
) -> None:
    from benchmarks.faiss_peers import code_bytes

    k = max(1, round(share * options.n))
    answers: dict[str, Any] = {}
    contenders = [_contender(EXACT32, _torch_search(rows, k, "float32"), answers)]
    contenders += [_contender(EXACT16, _torch_search(rows, k, "bfloat16"), answers)]
    contenders += [_contender(name, _our_search(rows, index, k), answers) for name, index in indexes.items()]
    for kinds in faiss.values():
        contenders += [_contender(kind.label, _faiss_search(rows, built, k), answers) for kind, built in kinds.items()]
    interleave(contenders, 1)  # compiles, and wakes threads
    times = medians(interleave(contenders, options.rounds, tell))
    exact = answers[EXACT32]
    for name, index in indexes.items():
        case = f"{options.n} keys of {options.head_dim}, {options.heads} KV heads x {options.group}, k = {k}, {name}"
        mine = recall(answers[name], exact)
        for peer in (EXACT32, EXACT16):
            report.add(case, TIME, 1e3 * times[name], peer, 1e3 * times[peer])
            report.add(case, RECALL, mine, peer, recall(answers[peer], exact))
        for kind, built in faiss.get(name, {}).items():
            report.add(case, TIME, 1e3 * times[name], kind.label, 1e3 * times[kind.label])
            merged = _agreed(rows, *answers[kind.label], k)
            report.add(case, RECALL, mine, kind.label, recall(merged, exact))
            report.add(case, SIZE, index.code_bytes_per_key, kind.label, code_bytes(built[0]))


def _contender(name: str, search: Callable[[], Any], answers: dict[str, Any]) -> Contender:
    def run() -> None:
        answers[name] = search()

    return Contender(name, run)


def _our_search(rows: Rows, index: PQIndex, k: int) -> Callable[[], Rows64]:
    scale = rows.q.shape[2] ** -0.5
    return lambda: index.search(rows.q, k, scale=scale).rows


def _torch_search(rows: Rows, k: int, dtype: str) -> Callable[[], Rows64]:
    import torch

    kind = getattr(torch, dtype)
    keys, q = torch.from_numpy(rows.keys).to(kind), torch.from_numpy(rows.q).to(kind)
    scale = q.shape[2] ** -0.5

    def run() -> Rows64:
        with torch.inference_mode():
            scores = torch.matmul(q, keys.mT).float().mul_(scale)
            found: Rows64 = scores.softmax(-1).sum(1).topk(k).indices.numpy()
        return found

    return run


def _faiss_search(rows: Rows, built: list[Any], k: int) -> Callable[[], tuple[Any, Any]]:
    def run() -> tuple[Any, Any]:
        found = [index.search(q, k) for index, q in zip(built, rows.q, strict=True)]
        return np.stack([scores for scores, _ in found]), np.stack([at for _, at in found])

    return run


def _agreed(rows: Rows, scores: Any, at: Any, k: int) -> Rows64:
    """Return the k rows a KV head with the largest sum of softmaxes among those FAISS found, [n_kv_heads, k]."""
    n, scale = rows.keys.shape[1], rows.q.shape[2] ** -0.5
    picked = np.empty((len(at), k), np.int64)
    for h in range(len(at)):
        total = np.zeros(n)
        for line, ids in zip(scores[h] * scale, at[h], strict=True):
            good = ids >= 0
            weights = np.exp(line[good] - line[good].max())
            total[ids[good]] += weights / weights.sum()
        picked[h] = np.argpartition(-total, k - 1)[:k]
    return picked


def recall(rows: Rows64, wanted: Rows64) -> float:
    """Return the share of wanted rows, int64 [n_kv_heads, k], that are among the rows, mean over heads."""
    return float(np.mean([np.isin(good, got).mean() for got, good in zip(rows, wanted, strict=True)]))


def _scaling(rows: Rows, indexes: dict[str, PQIndex], options: Options, report: Report, tell: Tell) -> None:
    """Add our cost of a key by length; k is a tenth. Longer tables repeat the codes of the keys that were made."""
    for n in options.lengths:
        k = n // 10
        grown = {name: _of_length(index, n) for name, index in indexes.items()}
        contenders = [Contender(name, _our_search(rows, index, k)) for name, index in grown.items()]
        interleave(contenders, 1)
        times = medians(interleave(contenders, options.rounds, lambda line, n=n: tell(f"{n} keys, {line}")))  # type: ignore[misc]
        for name, index in grown.items():
            case = f"{n} keys of {options.head_dim}, {options.heads} KV heads x {options.group}, k = {k}, {name}"
            report.add(case, PER_KEY, 1e9 * times[name] / (n * options.heads), "none: by length", None)
            if name in SUBSETS:
                continue  # the same codes
            held = index.nbytes / (n * options.heads)
            report.add(case, HELD, held, "key in float16", 2.0 * options.head_dim)


def _of_length(index: PQIndex, n: int) -> PQIndex:
    twin, codes = index.clone(), index.codes.copy()
    twin.truncate(min(n, index.n_rows))
    while twin.n_rows < n:
        twin.add_codes(codes[:, : n - twin.n_rows])
    return twin


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few keys and rounds: a minute.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every library.")] = 2,
) -> None:
    """Time and recall of top-k search beside exact torch and FAISS."""
    set_threads(threads)

    report = Report("topk", machine_with_peers())
    with reported(report, json) as tell:
        run_topk(QUICK if quick else Options(), report, tell)


if __name__ == "__main__":
    app()
