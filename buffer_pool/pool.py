"""The buffer pool: frames on a device, and which blocks they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstore.buffer_pool.admission import Load, Staging, best_first
from kvstore.buffer_pool.errors import FramePinnedError, InvalidBatchError, PoolClosedError
from kvstore.buffer_pool.events import Recorder, event_recorder
from kvstore.buffer_pool.frames import Frames
from kvstore.buffer_pool.guard import PinGuard
from kvstore.buffer_pool.pins import Pins
from kvstore.buffer_pool.policy import BoolArray, FloatArray, IntArray, Policy
from kvstore.buffer_pool.registry import make_policy
from kvstore.buffer_pool.residency import Residency
from kvstore.buffer_pool.stats import PoolCounters, PoolStats
from kvstore.buffer_pool.validate import as_found, as_frames, as_ids, as_size, as_unique_ids, as_weights
from kvstore.errors import ConfigError

DEFAULT_ADMIT_BLOCKS = 32


class BufferPool:
    """Copies of blocks in frames allocated once; every call is a batch, and changes all that it should or nothing.

    A block id is any int64; what it stands for is the caller's matter. Blocks are sealed: a frame's bytes do not change
    while it is resident, so an evicted block needs no writing back. One thread at a time.

    >>> pool = BufferPool(n_frames=2, frame_bytes=4)
    >>> frames = pool.reserve(2)
    >>> pool.frames[frames] = torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2]], dtype=torch.uint8)
    >>> pool.commit([70, 80], frames)
    >>> pool.lookup([80, 90]).tolist()
    [1, -1]
    >>> with pool.pin(pool.lookup([80])) as guard:
    ...     pool.reserve(2) is None, pool.frames[guard.frames].tolist()
    (True, [[2, 2, 2, 2]])
    """

    def __init__(
        self,
        n_frames: int,
        frame_bytes: int,
        *,
        device: torch.device | str = "cpu",
        policy: str | Policy = "lru",
        policy_options: Mapping[str, Any] | None = None,
        admit_blocks: int = DEFAULT_ADMIT_BLOCKS,
        debug: bool = False,
        record_event: Recorder | None = None,
    ) -> None:
        """Allocate the frames; raises `ConfigError` for settings out of range, and `FrameMemoryError`.

        policy: a name that `policy_names()` has, with its options, or an object. admit_blocks: blocks that one `admit`
        considers; `admission_limit` says how many are wise. debug: fill frames that hold no block with NaN.
        record_event: in place of the device's own events.
        """
        self.n_frames = as_size("n_frames", n_frames, 0)
        self.frame_bytes = as_size("frame_bytes", frame_bytes, 1)
        self.admit_blocks = as_size("admit_blocks", admit_blocks, 0)
        self.device = _as_device(device)
        self.policy = _as_policy(policy, self.n_frames, policy_options)
        self.counters = PoolCounters()
        self._debug = debug
        self._memory = Frames(self.n_frames, self.frame_bytes, self.device, poisoned=debug)
        self._staging = Staging(min(self.admit_blocks, self.n_frames), self.frame_bytes, self.device, debug=debug)
        self._pins = Pins(self.n_frames, record_event or event_recorder(self.device))
        self._residency = Residency(self.policy, self._pins)
        self._closed = False

    @property
    def frames(self) -> torch.Tensor:
        """All frames, uint8 [n_frames, frame_bytes]; write to reserved ones only, read pinned ones only."""
        self._check_open()
        return self._memory.data

    @property
    def frame_addresses(self) -> IntArray:
        """Where frames begin, int64 [n_frames], multiples of 64; valid until the pool is closed."""
        self._check_open()
        return self._memory.addresses

    def __len__(self) -> int:
        return self._residency.states.n_resident

    def __contains__(self, block: int) -> bool:
        return bool(self._residency.table.find(as_ids([block]))[0] >= 0)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- finding and reading ----

    def lookup(self, ids: npt.ArrayLike) -> IntArray:
        """Return the frames of blocks, int64 [n], -1 for a miss; ids may repeat. O(n log len)."""
        self._check_open()
        frames = self._residency.table.find(as_ids(ids))
        self.counters.lookups += len(frames)
        self.counters.hits += int(np.count_nonzero(frames >= 0))
        return frames

    def resident(self) -> IntArray:
        """Return the ids of all visible blocks, int64 [len], ascending; no lookup."""
        self._check_open()
        return self._residency.table.ids

    def touch(self, frames: npt.ArrayLike, weights: npt.ArrayLike = 1.0) -> None:
        """Tell the policy that blocks were used, the last one most recently; frames as `lookup` returns them.

        weights: how much a use counts, one for all or one a frame; -1 and its weight are passed over. Raises
        `FrameStateError` for frames that hold no block, `InvalidBatchError` for weights. O(n).
        """
        self._check_open()
        found, is_found = as_found(frames, self.n_frames)
        amounts = as_weights("weights", weights, len(is_found))[is_found]
        self._residency.check_resident(found, "touched")
        self.policy.touch(found, amounts)

    def pin(self, frames: npt.ArrayLike) -> PinGuard:
        """Keep blocks where they are while the guard lives; frames as `lookup` returns them, -1 is passed over.

        Raises `FrameStateError` for frames that hold no block. O(n).
        """
        self._check_open()
        found, _ = as_found(frames, self.n_frames)
        self._residency.check_resident(found, "pinned")
        self.counters.pins += len(found)
        return self._pins.add(found)

    # ---- filling ----

    def available(self, protected: npt.ArrayLike = ()) -> int:
        """Return how many frames `reserve` could give. O(n_frames)."""
        self._check_open()
        keep, _ = as_found(protected, self.n_frames)
        return self._residency.states.n_free + int(np.count_nonzero(self._residency.evictable(keep)))

    def reserve(self, n: int, protected: npt.ArrayLike = ()) -> IntArray | None:
        """Return n frames to be written, int64 [n], or None, with nothing changed, where there are not so many.

        Takes free frames, then evicts: never pinned frames, nor those of protected (as `lookup` returns them). What was
        evicted is gone, also when the reservation is aborted. O(n_frames).
        """
        self._check_open()
        n = as_size("n", n, 0, InvalidBatchError)
        keep, _ = as_found(protected, self.n_frames)
        frames = self._reserve(n, self._residency.evictable(keep))
        self.counters.stalls += frames is None
        return frames

    def commit(self, ids: npt.ArrayLike, frames: npt.ArrayLike, weights: npt.ArrayLike = 1.0) -> None:
        """Make blocks visible in reserved frames; it counts as a use, with weights as in `touch`.

        The caller says that the copies are complete, or ordered in the device's stream before every reader. Raises
        `InvalidBatchError` for ids that repeat or are resident, `FrameStateError` for frames not reserved. O(len).
        """
        self._check_open()
        blocks, homes = as_unique_ids(ids), as_frames(frames, self.n_frames)
        self._commit(blocks, homes, as_weights("weights", weights, len(blocks)))

    def abort(self, frames: npt.ArrayLike) -> None:
        """Free reserved frames, which nothing may write to any more; raises `FrameStateError` for other frames."""
        self._check_open()
        homes = as_frames(frames, self.n_frames)
        self._residency.abort(homes)
        self._poison(homes)

    def admit(self, ids: npt.ArrayLike, counts: npt.ArrayLike, load: Load, *, limit: int | None = None) -> IntArray:
        """Let in the blocks that hold most of what a step selected; return the ids admitted, the best first.

        counts: selected rows (or attention mass) in each block. The best `limit` of them count, `admit_blocks` at most:
        those that are resident are touched and kept, the others loaded, as many as find a frame. `load(id, uint8
        [frame_bytes])` must not use the pool; what it raises goes through, and the pool is then as it was. Raises
        `InvalidBatchError`.
        """
        self._check_open()
        blocks = as_unique_ids(ids)
        amounts = as_weights("counts", counts, len(blocks))
        most = self.admit_blocks if limit is None else as_size("limit", limit, 0, InvalidBatchError)
        best = best_first(amounts, min(most, self.admit_blocks, self.n_frames))
        blocks, amounts = blocks[best], amounts[best]
        homes = self._residency.table.find(blocks)
        known, missing = np.flatnonzero(homes >= 0), np.flatnonzero(homes < 0)
        evictable = self._residency.evictable(homes[known])
        new = missing[: self._residency.states.n_free + np.count_nonzero(evictable)]
        if len(new):
            rows = self._staging.fill(blocks[new], load)
            self._move_in(blocks[new], rows, amounts[new], evictable)
        self.counters.stalls += len(new) < len(missing)
        self.policy.touch(homes[known[::-1]], amounts[known[::-1]])  # the best last: the most recent
        return blocks[new]

    def drop(self, ids: npt.ArrayLike) -> int:
        """Forget blocks and free their frames; return how many were resident, the others are passed over.

        Waits for the device where it may still read them. Raises `FramePinnedError` when guards pin some. O(len).
        """
        self._check_open()
        frames = self._residency.drop(np.unique(as_ids(ids)))
        self.counters.drops += len(frames)
        self._poison(frames)
        return len(frames)

    # ---- the pool itself ----

    def stats(self) -> PoolStats:
        """Return sizes and counters. O(n_frames)."""
        self._check_open()
        states = self._residency.states
        return PoolStats(
            n_frames=self.n_frames,
            free_frames=states.n_free,
            reserved_frames=states.n_reserved,
            resident_blocks=states.n_resident,
            pinned_frames=int(np.count_nonzero(self._pins.counts)),
            guards=self._pins.n_guards,
            frame_bytes=self.frame_bytes,
            allocated_bytes=self._memory.nbytes + self._staging.nbytes,
            policy=type(self.policy).__name__,
            counters=replace(self.counters),
        )

    def close(self) -> None:
        """Give the memory back once the device has finished with it; a second call does nothing.

        Raises `FramePinnedError` while guards live: whoever holds them may be reading.
        """
        if self._closed:
            return
        self._pins.settle(wait=True)
        if n := self._pins.n_guards:
            raise FramePinnedError(f"{n} guards pin frames of this pool; release them before it is closed")
        self._closed = True
        del self._memory, self._staging

    def _reserve(self, n: int, evictable: BoolArray) -> IntArray | None:
        found = self._residency.reserve(n, evictable)
        if found is None:
            return None
        frames, victims = found
        self.counters.evictions += len(victims)
        self._poison(victims)
        return frames

    def _commit(self, ids: IntArray, frames: IntArray, weights: FloatArray) -> None:
        self._residency.commit(ids, frames, weights)
        self.counters.admissions += len(ids)

    def _move_in(self, ids: IntArray, rows: torch.Tensor, weights: FloatArray, evictable: BoolArray) -> None:
        """Give rows of staging, the best first, frames of their own; there are enough that are free or evictable."""
        frames = self._reserve(len(ids), evictable)
        assert frames is not None, "load has used the pool"
        try:
            self._memory.write(frames, rows)
        except BaseException:
            self._residency.abort(frames)
            raise
        self._commit(ids[::-1], frames[::-1], weights[::-1])

    def _poison(self, frames: IntArray) -> None:
        if self._debug:
            self._memory.poison(frames)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosedError("this buffer pool is closed; make another")

    def _check(self) -> None:
        """Assert the invariants: frames are free, reserved or resident and nothing else, everybody agrees which, blocks
        in frames equal admissions less evictions and drops, and in debug mode free frames hold nothing but NaN."""
        self._check_open()
        self._residency._check()
        counters = self.counters
        assert 0 <= counters.hits <= counters.lookups
        assert counters.admissions - counters.evictions - counters.drops == len(self) <= self.n_frames
        if self._debug:
            assert self._memory.is_poisoned(self._residency.states.free_frames()), "a free frame is not poisoned"


def _as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"torch knows no device {device!r}") from error


def _as_policy(policy: str | Policy, n_frames: int, options: Mapping[str, Any] | None) -> Policy:
    if isinstance(policy, str):
        return make_policy(policy, n_frames, **(options or {}))
    if policy.n_frames != n_frames:
        raise ConfigError(f"the policy was made for {policy.n_frames} frames, the pool has {n_frames}")
    if options:
        raise ConfigError(f"policy_options {dict(options)} go with a policy's name, not with an object")
    return policy
