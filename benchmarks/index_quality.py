"""How good are the rows that each kind of index picks on real keys, beside exact selection and FAISS at equal bytes?

The protocol is that of `kvstore.quality`. Every figure is a mean over the traces given. For a ratio of quality, ours
over exact selection's, see the rows with that peer; "lower is better" rows are turned round, so that 1 is as good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import inputs
from benchmarks.report import Metric, Report
from benchmarks.setup import machine_with_peers, reported, set_threads
from benchmarks.timing import Tell

if TYPE_CHECKING:
    from benchmarks.faiss_peers import FaissKind
    from kvstore.quality import Exam, Method, Quality
    from kvstore.traces import Trace

MID = Metric("mass of the middle found", "share", "higher")
REC = Metric("recall of exact selection's rows", "share", "higher")
OERR = Metric("error of the attention output", "share", "lower")
KL = Metric("KL to full", "nats/token", "lower")
EXACT = "exact selection"
PAPER = "raw 2x6 as published"
SHARES = (0.2, 0.1, 0.05)

Found = Mapping[float, "Quality"]


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        shares: of the rows that are picked.
        faiss: whether FAISS's indexes are measured too.
        kl_places: places of the text where end-to-end KL is measured, 0 leaves it out; kl_context, kl_tokens: tokens
            read before and predicted there. kl_budgets: of the store.
    """

    shares: tuple[float, ...] = SHARES
    faiss: bool = True
    kl_places: int = 3
    kl_context: int = 4096
    kl_tokens: int = 256
    kl_budgets: tuple[float, ...] = (0.1, 0.05)


def methods(head_dim: int) -> dict[str, Method]:
    """Kinds of index that are compared, by name; what the registry knows besides is measured with its defaults."""
    from benchmarks.control import KIND
    from kvstore.index import index_kinds
    from kvstore.quality import Method

    sizes = (
        ("rope", 1, 8),
        ("rope", 2, 6),
        ("rope", 4, 8),
        ("raw", 2, 6),
        ("raw", 4, 8),
        ("raw", 8, 8),
        ("raw", 16, 8),
    )
    found = {f"{space} {m}x{b}": Method("pq", {"space": space, "m": m, "bits": b}) for space, m, b in sizes}
    one = {"space": "rope", "m": 1, "bits": 8}
    found["rope 1x8, half of the pairs"] = Method("pq", {**one, "scan_pairs": head_dim // 4})
    found["rope 1x8, for queries"] = Method("pq", {**one, "weighting": "queries"})
    # the paper's: contiguous dimensions in a sub-space; with RoPE's pairs kept together ("raw 2x6") it is better
    found[PAPER] = Method("pq", {"space": "raw", "m": 2, "bits": 6, "pairs": False})
    found |= {kind: Method(kind) for kind in index_kinds() if kind not in ("flat", "pq", KIND)}
    return found


STALE = ("rope 1x8", "rope 4x8", "raw 4x8", "raw 8x8", PAPER)
"""Methods whose codebook is also trained on the first half only, and on another text."""


def run_quality(traces: Sequence[Trace], others: Sequence[Trace], options: Options, report: Report, tell: Tell) -> None:
    """Measure every method on the traces and add the rows; `others` are the same layers of another text, or none."""
    from kvstore.quality import Exam, Quality

    tell("exact attention")
    exams = [Exam(trace) for trace in traces]
    exact = {s: Quality.mean(exam.mark(exam.exact, s) for exam in exams) for s in options.shares}
    peers: dict[FaissKind, Found] = {}
    known = methods(traces[0].head_dim)
    if any(trace.q_cal is None for trace in traces):
        known = {name: method for name, method in known.items() if "weighting" not in method.options}
    for name, method in known.items():
        tell(name)
        n_bytes, fresh = _measure(exams, method, options.shares)
        label = f"{name} ({n_bytes:g} B)"
        _add(report, label, fresh, EXACT, exact)
        if options.faiss:
            _beside_faiss(exams, n_bytes, label, fresh, peers, options.shares, report, tell)
        _variants(exams, others, name, method, label, fresh, exact, options.shares, report, tell)


def _measure(
    exams: Sequence[Exam], method: Method, shares: Sequence[float], others: Sequence[Trace] = ()
) -> tuple[float, Found]:
    """Return bytes a key and the mean quality by share."""
    from kvstore.quality import Quality, build_index, index_picker

    marks: dict[float, list[Quality]] = {share: [] for share in shares}
    n_bytes = 0.0
    by_layer = {trace.layer: trace for trace in others}
    for exam in exams:
        index = build_index(exam, method, by_layer[exam.trace.layer] if others else None)
        n_bytes = index.code_bytes_per_key
        pick = exam.reranked(index_picker(exam, index), method.over_fetch)
        for share in shares:
            marks[share].append(exam.mark(pick, share))
    return n_bytes, {share: Quality.mean(found) for share, found in marks.items()}


def _beside_faiss(
    exams: Sequence[Exam],
    n_bytes: float,
    label: str,
    ours: Found,
    known: dict[FaissKind, Found],
    shares: Sequence[float],
    report: Report,
    tell: Tell,
) -> None:
    from benchmarks.faiss_peers import RABITQ, FaissKind, kinds_of_bytes

    kinds = kinds_of_bytes(n_bytes, exams[0].trace.head_dim)
    if label.startswith("rabitq"):  # whatever bytes either spends on a key's two numbers
        kinds = [*(kind for kind in kinds if kind.name != RABITQ), FaissKind(RABITQ)]
    for kind in kinds:
        if kind not in known:
            tell(f"{label}: {kind.label}")
            known[kind] = _measure_faiss(exams, kind, shares)
        _add(report, label, ours, kind.label, known[kind])


def _measure_faiss(exams: Sequence[Exam], kind: FaissKind, shares: Sequence[float]) -> Found:
    from benchmarks.faiss_peers import faiss_picker
    from kvstore.quality import Quality

    marks: dict[float, list[Quality]] = {share: [] for share in shares}
    for exam in exams:
        pick = faiss_picker(exam, kind.build(exam.trace.keys[:, exam.sinks : exam.stop_row]))
        for share in shares:
            marks[share].append(exam.mark(pick, share))
    return {share: Quality.mean(found) for share, found in marks.items()}


def _variants(
    exams: Sequence[Exam],
    others: Sequence[Trace],
    name: str,
    method: Method,
    label: str,
    fresh: Found,
    exact: Found,
    shares: Sequence[float],
    report: Report,
    tell: Tell,
) -> None:
    """Add over-fetch, and for some methods codebooks of fewer or of other rows, beside the fresh codebook."""
    from kvstore.quality import FIRST_HALF

    variants = [("over-fetch 2", replace(method, over_fetch=2.0), ())]
    if name in STALE:
        stale = replace(method, codebook=FIRST_HALF)
        variants += [("first-half codebook", stale, ())]
        variants += [("first-half codebook, over-fetch 2", replace(stale, over_fetch=2.0), ())]
        if others:
            variants += [("another text's codebook", method, tuple(others))]
            variants += [("another text's codebook, over-fetch 2", replace(method, over_fetch=2.0), tuple(others))]
    for what, variant, train_on in variants:
        tell(f"{name}, {what}")
        _, found = _measure(exams, variant, shares, train_on)
        _add(report, f"{label}, {what}", found, EXACT, exact)
        if "codebook" in what and variant.over_fetch == 1:
            _add(report, f"{label}, {what}", found, "the same, fresh codebook", fresh)


def _add(report: Report, label: str, ours: Found, peer: str, theirs: Found) -> None:
    from fractions import Fraction

    for share in ours:
        case = f"{label}, {Fraction(share).limit_denominator(1000)}"
        for metric, name in ((MID, "mid"), (REC, "rec"), (OERR, "oerr")):
            report.add(case, metric, getattr(ours[share], name), peer, getattr(theirs[share], name))


def kl_configs() -> dict[str, Any]:
    """Settings of the stores whose predictions are compared: the default, exact selection, the paper's index."""
    from benchmarks.quality import index_configs
    from kvstore import IndexConfig, StoreConfig

    published = IndexConfig(options={"space": "raw", "m": 2, "bits": 6, "pairs": False}, over_fetch=1.0)
    return {**index_configs(), PAPER: StoreConfig(index=published)}


def run_kl(
    model: Any, ids: Any, options: Options, report: Report, tell: Tell, configs: Mapping[str, Any] | None = None
) -> None:
    """Add KL to full attention, end to end and teacher-forced, of the default index beside the other settings."""
    from benchmarks.quality import DEFAULT, Place, measure_quality

    stretches = inputs.places(ids, options.kl_context + options.kl_tokens + 1, options.kl_places)
    places = [Place(stretch, options.kl_context, options.kl_tokens) for stretch in stretches]
    settings = dict(configs or kl_configs())
    found = measure_quality(model, places, options.kl_budgets, settings, tell)
    for budget in options.kl_budgets:
        case = f"end to end, {options.kl_tokens} tokens after {options.kl_context}, budget {budget:g}"
        for peer in settings:
            if peer != DEFAULT:
                report.add(case, KL, found[budget, DEFAULT].kl, peer, found[budget, peer].kl)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    traces: Annotated[Path, typer.Option(help="Directory of traces that kvstore capture wrote.")],
    other: Annotated[Path | None, typer.Option(help="Traces of the same layers of another text.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One trace, one share, one short place of text.")] = False,
    kl: Annotated[bool, typer.Option(help="Compare predictions end to end; needs the model.")] = True,
    faiss: Annotated[bool, typer.Option(help="Measure FAISS's indexes too.")] = True,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every library.")] = 2,
) -> None:
    """Quality of every kind of index on traces, beside exact selection and FAISS at equal bytes."""
    set_threads(threads)
    from kvstore.traces import read_traces

    options = Options(shares=(0.1,), kl_places=1, kl_context=1024, kl_tokens=32) if quick else Options()
    report = Report("index quality", machine_with_peers())
    with reported(report, json) as tell:
        mine = read_traces(traces)[: 1 if quick else None]
        others = read_traces(other) if other is not None else []
        run_quality(mine, others, replace(options, faiss=faiss), report, tell)
        if kl:
            _run_kl(model, text, options, report, tell)


def _run_kl(path: str | None, text: Path | None, options: Options, report: Report, tell: Tell) -> None:
    from kvstore.adapters.model_files import load_model

    loaded = load_model(path, report=tell)
    run_kl(loaded.model, inputs.tokens_of(inputs.read_text(text), loaded.tokenizer), options, report, tell)


if __name__ == "__main__":
    app()
