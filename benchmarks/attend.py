"""How long does one decoded token's attention over one layer take, beside the best that torch does over all rows?

One layer of Llama-3.1-8B: 32 query heads, 8 KV heads, head_dim 128. Ours is `Sequence.attend` with an index and a
budget. torch attends to everything, in four layouts; ratios are against the fastest of them in the same dtype. Rows
and queries are synthetic (see `synthetic`), a different query each call. Before anything is timed, every layout is
compared with exact attention, and ours with exact attention over the rows that it chose.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from benchmarks import attend_ours, attend_rows
from benchmarks.attend_ours import KINDS, Tap
from benchmarks.attend_peers import Layer, Reference, attend_to, layouts, read_bytes_per_s, reference, relative_error
from benchmarks.attend_rows import Beside, Found, Marks, budget_label
from benchmarks.report import Report
from benchmarks.setup import reported, set_threads
from benchmarks.speed import WrongResultError
from benchmarks.synthetic import make_rows
from benchmarks.timing import Contender, Tell, interleave, medians

if TYPE_CHECKING:
    from kvstore import RopeSpec, Sequence

SCAN = "scan alone"
LIMITS = {"float32": 1e-5, "bfloat16": 4e-3}
"""Largest error of ours against exact attention over the same rows."""
FULL_LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest error of torch against exact attention; by hand its scores are bfloat16 too, and a few percent off."""
ROUND_S = 0.05
"""Seconds of one turn of a contender, unless a single call takes longer."""
CHECKED = 2
"""Queries whose results are compared; each costs exact attention over all rows."""


@dataclass(frozen=True)
class Options:
    """Sizes of the layer; rows, dtypes, kinds of index and budgets to measure; different queries; rounds of timing."""

    lengths: tuple[int, ...] = (2048, 8192, 32_768, 131_072, 524_288)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kinds: tuple[str, ...] = tuple(KINDS)
    budgets: tuple[float | int, ...] = (1024, attend_rows.TENTH)
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    queries: int = 8
    rounds: int = 7

    def needed_bytes(self, n_rows: int, dtype: str) -> int:
        """Bytes that a run at this length needs at once, roughly: the rows as they are made, for torch, for the store,
        and the keys again for the index and for torch's transposed layout."""
        made, size = 2 * 4, 4 if dtype == "float32" else 2
        for_torch = 0 if dtype == "float32" else 2 * size  # in float32 those that were made
        return self.heads * self.head_dim * n_rows * (made + for_torch + 2 * size + size + 4)


QUICK = Options(lengths=(2048, 8192, 32_768), rounds=3, queries=4)


@dataclass(frozen=True)
class Dense:
    """A layer in one dtype, torch's ways to attend to all of it with their errors, and exact attention.

    Attributes:
        peers: by name, number of the query -> out. errors: of each against `exact`, which holds the first queries'.
    """

    dtype: str
    layer: Layer
    peers: dict[str, Callable[[int], Any]]
    errors: dict[str, float]
    exact: list[Reference]

    @classmethod
    def of(cls, layer: Layer, dtype: str) -> Dense:
        """Compute exact attention and compare torch with it; raises `WrongResultError`."""
        exact = [reference(layer, i) for i in range(min(CHECKED, len(layer.q)))]
        peers = layouts(layer)
        return cls(dtype, layer, peers, _check_torch(peers, exact, dtype), exact)


def run_attend(options: Options, report: Report, tell: Tell) -> None:
    """Measure everything and add the rows; raises `WrongResultError` before anything wrong is timed."""
    gains: dict[tuple[str, str, float | int], dict[int, float]] = {}
    for n_rows in sorted(options.lengths):
        dtypes = [dtype for dtype in options.dtypes if _fits(options, n_rows, dtype, tell)]
        for dtype, layer, rope in _layers(options, n_rows, dtypes, tell):
            at = _told(tell, f"{n_rows:,} rows, {dtype}")
            at("exact attention")
            dense = Dense.of(layer, dtype)
            for kind in options.kinds:
                for budget, gain in _measure(dense, rope, kind, options, report, at).items():
                    gains.setdefault((kind, dtype, budget), {})[n_rows] = gain
    attend_rows.add_crossings(report, gains, sorted(options.lengths))


def _told(tell: Tell, where: str) -> Tell:
    return lambda line: tell(f"{where}, {line}")


def _fits(options: Options, n_rows: int, dtype: str, tell: Tell) -> bool:
    """Whether memory allows a length; says so where it does not."""
    import psutil

    needed, there = options.needed_bytes(n_rows, dtype), psutil.virtual_memory().available
    if needed > 0.9 * there:
        tell(f"{n_rows:,} rows, {dtype}: LEFT OUT, needs {needed / 2**30:.1f} GiB of {there / 2**30:.1f} available")
    return needed <= 0.9 * there


def _layers(options: Options, n_rows: int, dtypes: list[str], tell: Tell) -> Iterator[tuple[str, Layer, RopeSpec]]:
    """Give the same layer in each dtype."""
    import torch

    if not dtypes:
        return
    tell(f"making {n_rows:,} rows")
    made = make_rows(options.heads, n_rows, options.head_dim, options.group * options.queries)
    keys, q = torch.from_numpy(made.keys), torch.from_numpy(made.q)
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    q = q.view(options.heads, options.queries, options.group, -1).transpose(0, 1).flatten(1, 2)
    for dtype in dtypes:
        kind = getattr(torch, dtype)
        yield dtype, Layer(keys.to(kind), values.to(kind), q.to(kind).contiguous(), options.head_dim**-0.5), made.rope


def _measure(
    dense: Dense, rope: RopeSpec, kind: str, options: Options, report: Report, tell: Tell
) -> dict[float | int, float]:
    """Add the rows of one kind of index; return by budget how many times as fast as torch's best it is."""
    layer, dtype, peers = dense.layer, dense.dtype, dense.peers
    bytes_per_s = read_bytes_per_s()
    case = f"{layer.n_rows:,} rows, {dtype}, {kind}"
    report.add(case, attend_rows.BANDWIDTH, bytes_per_s / 1e9, "sum of 512 MiB", None)
    tell(f"storing, {kind}")
    with attend_ours.stored(layer, rope, kind) as seq:
        tell(f"checking, {kind}")
        marks = {budget: _checked(seq, dense, budget) for budget in options.budgets}
        times, spent, taps = _time(seq, layer, peers, options, _told(tell, kind))
    beside = Beside(
        {peer: times[peer] for peer in peers},
        min(spent[peer] for peer in peers),
        dense.errors,
        options.heads * layer.n_rows * layer.row_bytes,
        bytes_per_s,
        LIMITS[dtype],
    )
    gains = {}
    for budget, marked in marks.items():
        name = budget_label(budget)
        found = Found(times[name], spent[name], times[SCAN], *taps[budget].split_ms(), marked)
        gains[budget] = attend_rows.add_attend(report, (kind, dtype, budget), layer.n_rows, found, beside)
    return gains


def _check_torch(peers: dict[str, Callable[[int], Any]], exact: list[Reference], dtype: str) -> dict[str, float]:
    """Return how far each layout is from exact attention; raises `WrongResultError` when one is too far."""
    errors = {}
    for name, attend in peers.items():
        errors[name] = max(relative_error(attend(i).float().numpy(), one.out) for i, one in enumerate(exact))
        if not errors[name] <= FULL_LIMITS[dtype]:
            raise WrongResultError(f"{name}, {dtype}: {errors[name]:.2g} from exact attention")
    return errors


def _checked(seq: Sequence, dense: Dense, budget: float | int) -> Marks:
    """Return what ours is worth, means over queries; raises `WrongResultError` for rows or a result that are wrong."""
    layer, dtype, marks = dense.layer, dense.dtype, []
    for i, found in enumerate(dense.exact):
        with attend_ours.tapped(seq, Tap()) as tap:
            out = seq.attend(0, layer.q[i], budget=budget).float().numpy()
        rows, plan = tap.rows(), tap.plans[-1]
        if rows.min() < 0 or rows.max() >= layer.n_rows or any(len(set(line)) < len(line) for line in rows.tolist()):
            raise WrongResultError(f"{budget_label(budget)}, {dtype}: rows outside the table, or a row twice")
        error = relative_error(out, attend_to(layer, i, rows))
        if not error <= LIMITS[dtype]:
            raise WrongResultError(f"{budget_label(budget)}, {dtype}: {error:.2g} from attention over the same rows")
        best = attend_ours.mass_caught(found, attend_ours.exact_rows(found, plan))
        mass, full_error = attend_ours.mass_caught(found, rows), relative_error(out, found.out)
        marks.append(Marks(attend_ours.moved_bytes(seq, plan, layer.row_bytes), error, full_error, mass, best))
    return Marks.mean(marks)


def _time(
    seq: Sequence, layer: Layer, peers: dict[str, Callable[[int], Any]], options: Options, tell: Tell
) -> tuple[dict[str, float], dict[str, float], dict[float | int, Tap]]:
    """Return medians by contender, of ms and of ms of processor time, and what the store did meanwhile, by budget."""
    taps = {budget: Tap() for budget in options.budgets}
    grouped = [np.ascontiguousarray(layer.grouped(i).float().numpy()) for i in range(len(layer.q))]
    calls: dict[str, Callable[[int], object]] = dict(peers)
    calls[SCAN] = lambda i: attend_ours.scan_only(seq, grouped[i])
    for budget in options.budgets:
        calls[budget_label(budget)] = lambda i, budget=budget: seq.attend(0, layer.q[i], budget=budget)  # type: ignore[misc]
    counts = {name: _calls(call) for name, call in calls.items()}
    spent_s: dict[str, list[float]] = {name: [] for name in calls}
    contenders = [
        Contender(name, _turn(call, counts[name], len(layer.q), spent_s[name])) for name, call in calls.items()
    ]
    interleave(contenders, 1)
    for figures in spent_s.values():
        figures.clear()
    of_budget = {budget_label(budget): budget for budget in options.budgets}
    noted = [
        replace(one, scope=lambda name=one.name: attend_ours.tapped(seq, taps[of_budget[name]]))  # type: ignore[misc]
        if one.name in of_budget
        else one
        for one in contenders
    ]
    seconds = medians(interleave(noted, options.rounds, tell))
    wall, processor = (
        {name: 1e3 * figure / counts[name] for name, figure in each.items()} for each in (seconds, medians(spent_s))
    )
    return wall, processor, taps


def _calls(call: Callable[[int], object]) -> int:
    """Calls of a turn: as many as take a twentieth of a second, at least one. Also compiles what is to be compiled."""
    call(0)
    started = time.perf_counter()
    call(0)
    return max(1, min(64, round(ROUND_S / (time.perf_counter() - started))))


def _turn(call: Callable[[int], object], n_calls: int, n_queries: int, spent_s: list[float]) -> Callable[[], None]:
    """Return a turn of so many calls, each with the next query, so that rows chosen are seldom in the cache.

    A turn appends to spent_s what it took of the processor's time, all threads: what others do matters less to that.
    """
    import torch

    queries = itertools.cycle(range(n_queries))

    def run() -> None:
        started = time.process_time()
        with torch.inference_mode():
            for i in itertools.islice(queries, n_calls):
                call(i)
        spent_s.append(time.process_time() - started)

    return run


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="2K to 32K rows, few rounds: a minute.")] = False,
    lengths: Annotated[str | None, typer.Option(help="Rows, separated by commas.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="float32, bfloat16, or both with a comma.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each competitor.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every library.")] = 2,
) -> None:
    """Time, split, memory floor and quality of one layer's attention beside torch over all rows."""
    from benchmarks.decode import _lengths

    base = QUICK if quick else Options()
    options = replace(
        base,
        lengths=base.lengths if lengths is None else _lengths(lengths),
        dtypes=base.dtypes if dtypes is None else _dtypes(dtypes),
        rounds=rounds or base.rounds,
    )
    set_threads(threads)
    from benchmarks.machine import describe_machine

    report = Report("attend", describe_machine())
    with reported(report, json) as tell:
        run_attend(options, report, tell)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(LIMITS):
        raise typer.BadParameter(f"dtypes are {', '.join(LIMITS)}, not {text!r}")
    return names


if __name__ == "__main__":
    app()
