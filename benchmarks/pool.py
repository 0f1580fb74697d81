"""How much does a buffer pool find with each replacement policy, beside the best possible, and what does a lookup cost?

python -m benchmarks.pool --trace build/bench/blocks.npz --json build/bench/pool.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks import inputs
from benchmarks.report import Metric, Report
from benchmarks.timing import Contender, Tell, interleave, medians
from kvstore.replay.belady import Belady, most_rows
from kvstore.replay.policies import FRAME_BYTES, run_policy
from kvstore.replay.trace import BlockTrace, read_block_trace, write_block_trace

if TYPE_CHECKING:
    from kvstore.buffer_pool import BufferPool

IntArray = npt.NDArray[np.int64]

BLOCKS = Metric("blocks found", "share", "higher")
ROWS = Metric("selected rows found", "share", "higher")
LOADED = Metric("blocks let in a step", "blocks", "neither")
LOOKUP = Metric("lookup", "us", "lower")
USE = Metric("lookup and touch", "us", "lower")
STEP = Metric("lookup, touch, and misses let in", "us", "lower")
BELADY, BOUND, READ = "Belady", "bound for any pool", "blocks read a step"
NO_LIMIT, SPLIT = "all blocks let in", "a pool for each layer"
DEFAULT = "lru"


class UnequalHitsError(AssertionError):
    """Raised when what is about to be compared does not find the same blocks."""


@dataclass(frozen=True)
class Options:
    """Sizes.

    Attributes:
        shares: of all blocks that fit into the pool. block_tokens: rows of a block.
        prompt_tokens, steps, budget: of the trace, where one is recorded; it is recorded in blocks of `grain` tokens.
        lookups: of a batch; frames, blocks: of the pool that is timed, and how many different ones are asked for.
        batches: of a round that is timed. rounds: how many.
    """

    shares: tuple[float, ...] = (0.05, 0.1, 0.2)
    block_tokens: int = 64
    prompt_tokens: int = 7936
    steps: int = 256
    budget: float = 0.1
    grain: int = 16
    lookups: int = 512
    frames: int = 2048
    blocks: int = 8192
    batches: int = 50
    rounds: int = 15


QUICK = Options(prompt_tokens=1984, steps=64, batches=20, rounds=5)


# ---- how much is found ----


def add_hit_rates(trace: BlockTrace, options: Options, report: Report, tell: Tell) -> None:
    """Replay the trace with every policy at every pool size, and add the rows."""
    from kvstore.buffer_pool import admission_limit, policy_names

    batches, steps = list(trace.batches()), trace.steps()
    n_blocks, n_rows = sum(len(ids) for ids, _ in batches), sum(int(counts.sum()) for _, counts in batches)
    belady = Belady(batches)
    for share in options.shares:
        n_frames = round(share * trace.total_blocks)
        best_blocks = int(belady.run(n_frames)[0].sum()) / n_blocks
        bound = most_rows(steps, n_frames) / n_rows
        limit = admission_limit(n_frames, trace.n_layers)
        where = f"{share:.0%}: {n_frames} of {trace.total_blocks} blocks"
        for name in policy_names():
            tell(f"{where}, {name}")
            found = run_policy(batches, n_frames, name, limit)
            case = f"{where}, {name}"
            report.add(case, BLOCKS, found.hit_rate, BELADY, best_blocks)
            report.add(case, ROWS, found.row_rate, BOUND, bound)
            report.add(case, LOADED, found.loaded / trace.n_steps, READ, n_blocks / trace.n_steps)
            if name == DEFAULT:
                everything = run_policy(batches, n_frames, name, n_frames)
                report.add(case, ROWS, found.row_rate, NO_LIMIT, everything.row_rate)
                report.add(case, ROWS, found.row_rate, SPLIT, _split_rows(trace, n_frames, name))


def _split_rows(trace: BlockTrace, n_frames: int, policy: str) -> float:
    """Share of rows found by pools of a layer each, which have n_frames together."""
    from kvstore.buffer_pool import admission_limit

    found = []
    for number in range(trace.n_layers):
        batches = list(trace.layer(number).batches())
        size = n_frames * (number + 1) // trace.n_layers - n_frames * number // trace.n_layers
        found.append(run_policy(batches, size, policy, admission_limit(size, 1)))
    return sum(one.rows_found for one in found) / sum(one.rows for one in found)


# ---- what it costs ----


def add_costs(options: Options, report: Report, tell: Tell) -> None:
    """Time batches of lookups beside cachetools, and add the rows; raises `UnequalHitsError`."""
    batches = skewed_batches(options.batches * options.rounds, options.lookups, options.blocks)
    case = f"{options.lookups} lookups of {options.frames} blocks"
    for policy, metric in (("lru", LOOKUP), ("lru", USE), ("lfu", USE), ("lru", STEP)):
        tell(f"{metric.name}, {policy}")
        ours, peer = Ours(options.frames, policy), Cachetools(options.frames, policy)
        for start in range(0, options.frames, options.lookups):  # both hold the same before the clock starts
            for side in (ours, peer):
                side.step(np.arange(start, min(start + options.lookups, options.frames)))
        runs = [Contender(side.name, _rounds(side, metric, batches, options.batches)) for side in (ours, peer)]
        times = medians(interleave(runs, options.rounds))
        if ours.hits != peer.hits or not ours.hits:
            raise UnequalHitsError(f"{metric.name}: the pool found {ours.hits} blocks, {peer.name} {peer.hits}")
        per_batch = {name: 1e6 * seconds / options.batches for name, seconds in times.items()}
        report.add(f"{case}, {policy}", metric, per_batch[ours.name], peer.name, per_batch[peer.name])


class Ours:
    """A buffer pool, a batch at a time."""

    def __init__(self, n_frames: int, policy: str) -> None:
        from kvstore.buffer_pool import BufferPool

        self.name = "buffer pool"
        self.pool: BufferPool = BufferPool(n_frames, FRAME_BYTES, policy=policy)

    @property
    def hits(self) -> int:
        """Blocks found so far."""
        return self.pool.counters.hits

    def lookup(self, ids: IntArray) -> None:
        """Find blocks."""
        self.pool.lookup(ids)

    def use(self, ids: IntArray) -> None:
        """Find blocks, and tell the policy."""
        self.pool.touch(self.pool.lookup(ids))

    def step(self, ids: IntArray) -> None:
        """Find blocks, tell the policy, and make room for those that are missing."""
        frames = self.pool.lookup(ids)
        self.pool.touch(frames)
        missing = ids[frames < 0]
        reserved = self.pool.reserve(len(missing), protected=frames)
        assert reserved is not None
        self.pool.commit(missing, reserved)


class Cachetools:
    """The cache of cachetools with the same policy, a block at a time."""

    def __init__(self, n_frames: int, policy: str) -> None:
        import cachetools

        kinds: dict[str, Callable[[int], Any]] = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache}
        self.cache = kinds[policy](n_frames)
        self.name = f"cachetools {type(self.cache).__name__}"
        self.hits = 0

    def lookup(self, ids: IntArray) -> None:
        """Find blocks."""
        cache = self.cache
        self.hits += sum([block in cache for block in ids.tolist()])

    def use(self, ids: IntArray) -> list[int]:
        """Find blocks, and tell the policy; return those that are missing."""
        cache = self.cache
        missing = [block for block in ids.tolist() if cache.get(block) is None]
        self.hits += len(ids) - len(missing)
        return missing

    def step(self, ids: IntArray) -> None:
        """Find blocks, tell the policy, and let in those that are missing."""
        cache = self.cache
        for block in self.use(ids):
            cache[block] = True


def _rounds(side: Ours | Cachetools, metric: Metric, batches: Sequence[IntArray], n: int) -> Callable[[], None]:
    """Return what runs the next n batches at each call."""
    calls: dict[str, Callable[[IntArray], object]] = {
        LOOKUP.name: side.lookup,
        USE.name: side.use,
        STEP.name: side.step,
    }
    call, upcoming = calls[metric.name], iter(batches)

    def run() -> None:
        for _ in range(n):
            call(next(upcoming))

    return run


def skewed_batches(n: int, size: int, n_blocks: int, seed: int = 0) -> list[IntArray]:
    """Return batches of different blocks, int64 [size]: few are asked for often, and which these are drifts."""
    random = np.random.default_rng(seed)
    log_share = -np.log(np.arange(1, n_blocks + 1))
    found = []
    for number in range(n):
        order = (log_share + random.gumbel(size=n_blocks)).argpartition(-size)[-size:]
        found.append((order * 7919 + number) % n_blocks)
    return found


# ---- the command ----

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Block trace; recorded into this file when it is missing.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short trace, few repeats.")] = False,
) -> None:
    """Hit rates of every replacement policy beside Belady's, and the cost of lookups beside cachetools'."""
    from benchmarks.machine import describe_machine
    from benchmarks.setup import reported

    options = QUICK if quick else Options()
    report = Report("pool", describe_machine())
    with reported(report, json) as tell:
        add_costs(options, report, tell)
        found = read_block_trace(trace) if trace is not None and trace.exists() else _record(options, trace, tell)
        add_hit_rates(found.in_blocks_of(options.block_tokens), options, report, tell)


def _record(options: Options, path: Path | None, tell: Tell) -> BlockTrace:
    from kvstore.adapters.hf.block_trace import record_decoding
    from kvstore.adapters.model_files import load_model

    loaded = load_model(report=tell)
    ids = inputs.tokens_of(inputs.read_text(None), loaded.tokenizer)[: options.prompt_tokens + options.steps]
    found = record_decoding(
        loaded.model, ids.tolist(), options.steps, budget=options.budget, block_tokens=options.grain, name=loaded.name,
        tell=lambda stage, done, total: tell(f"{stage}, {done} of {total}") if done % 32 == 0 else None,
    )  # fmt: skip
    if path is not None:
        write_block_trace(path, found)
    return found


if __name__ == "__main__":
    app()
