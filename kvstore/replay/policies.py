"""Running the buffer pool's replacement policies over a recorded trace, beside the best that any could do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.buffer_pool import BufferPool, admission_limit, policy_names
from kvstore.errors import ConfigError
from kvstore.replay.belady import Belady
from kvstore.replay.trace import Batch, BlockTrace, BlockTraceError

DEFAULT_SHARES = (0.05, 0.1, 0.2)
FRAME_BYTES = 64  # contents do not matter here

Tell = Callable[[str, int, int], None]
"""Is given a stage, and steps done of all."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one policy found in one pool.

    Attributes:
        policy, n_frames: which. admit_blocks: blocks that each batch may let in.
        lookups, hits: blocks asked for, and found. rows, rows_found: rows selected, and those in blocks found.
        loaded: blocks let in, each of which was copied.
    """

    policy: str
    n_frames: int
    admit_blocks: int
    lookups: int
    hits: int
    rows: int
    rows_found: int
    loaded: int

    @property
    def hit_rate(self) -> float:
        """Blocks found, as a share of those asked for; 0 where none was."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def row_rate(self) -> float:
        """Rows in blocks found, as a share of those selected; 0 where none was."""
        return self.rows_found / self.rows if self.rows else 0.0


@dataclass(frozen=True, slots=True)
class SizeResult:
    """All policies in pools of one size.

    Attributes:
        share, n_frames: of all blocks that fit into the pool, and how many these are.
        best_hits: blocks that Belady's MIN finds, of as many lookups: no policy finds more.
        policies: what each found.
    """

    share: float
    n_frames: int
    best_hits: int
    policies: tuple[Replayed, ...]

    def of_best(self, found: Replayed) -> float:
        """Return a policy's hits as a share of Belady's; 1 where there is nothing to find."""
        return found.hits / self.best_hits if self.best_hits else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        lookups = self.policies[0].lookups if self.policies else 0
        return {
            "share": self.share,
            "n_frames": self.n_frames,
            "belady": {"hits": self.best_hits, "hit_rate": self.best_hits / lookups if lookups else 0.0},
            "policies": [
                {**asdict(one), "hit_rate": one.hit_rate, "row_rate": one.row_rate, "of_belady": self.of_best(one)}
                for one in self.policies
            ],
        }


def run_policy(batches: Sequence[Batch], n_frames: int, policy: str, admit_blocks: int) -> Replayed:
    """Look every batch up, then let in the blocks that hold most of its rows, `admit_blocks` at most.

    Raises `ConfigError` for a policy that is not known. O(batches * n_frames).
    """
    rows = rows_found = 0
    with BufferPool(n_frames, FRAME_BYTES, policy=policy, admit_blocks=admit_blocks) as pool:
        for ids, counts in batches:
            is_found = pool.lookup(ids) >= 0
            rows += int(counts.sum())
            rows_found += int(counts[is_found].sum())
            pool.admit(ids, counts, _no_bytes)
        pool._check()
        seen = pool.counters
        return Replayed(
            policy, n_frames, admit_blocks, seen.lookups, seen.hits, rows, rows_found, loaded=seen.admissions
        )


def replay(
    trace: BlockTrace,
    shares: Sequence[float] = DEFAULT_SHARES,
    policies: Sequence[str] | None = None,
    *,
    admit_blocks: int | None = None,
    tell: Tell | None = None,
) -> list[SizeResult]:
    """Run policies (None: all that are known) in pools of these shares of all blocks, all layers in one pool.

    admit_blocks: blocks that a layer may let in at each step; None: as `admission_limit` says. Raises `ConfigError` for
    a share or a policy out of range, and `BlockTraceError` for a trace in which nothing is read.
    """
    names = _checked_policies(policies)
    for share in shares:
        if not 0 < share <= 1:
            raise ConfigError(f"a pool holds more than 0 % and up to 100 % of all blocks, not {100 * share:g} %")
    if not len(trace.blocks):
        raise BlockTraceError("no step of the trace selects any rows; record a longer text, or a lower budget")
    batches = list(trace.batches())
    belady = Belady(batches)
    found = []
    for i, share in enumerate(shares):
        n_frames = max(1, round(share * trace.total_blocks))
        limit = admission_limit(n_frames, trace.n_layers) if admit_blocks is None else admit_blocks
        results = []
        for j, name in enumerate(names):
            if tell is not None:
                tell("replaying", i * len(names) + j, len(shares) * len(names))
            results.append(run_policy(batches, n_frames, name, limit))
        found.append(SizeResult(share, n_frames, int(belady.run(n_frames)[0].sum()), tuple(results)))
    return found


def _checked_policies(policies: Sequence[str] | None) -> list[str]:
    known = policy_names()
    names = known if policies is None else list(dict.fromkeys(policies))
    strange = [name for name in names if name not in known]
    if strange or not names:
        what = ", ".join(map(repr, strange)) or "given"
        raise ConfigError(f"no replacement policies {what}; known are {', '.join(known)}")
    return names


def _no_bytes(block: int, frame: object) -> None:
    """Load nothing."""
