"""The memory of a pool: equal frames, allocated once, and where each of them begins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvstore.buffer_pool.errors import FrameMemoryError

ALIGN_BYTES = 64  # a cache line
POISON = 0xFF  # a run of these bytes is NaN in float16, bfloat16 and float32

IntArray = npt.NDArray[np.int64]


class Frames:
    """`n_frames` frames of `frame_bytes` bytes on a device, each at a multiple of 64 bytes.

    Attributes:
        data: uint8 [n_frames, frame_bytes]; a row is contiguous, rows are `stride_bytes` apart.
        addresses: int64 [n_frames], where the frames begin, for kernels that read by address.
        stride_bytes: frame_bytes rounded up to 64.
    """

    def __init__(self, n_frames: int, frame_bytes: int, device: torch.device, *, poisoned: bool = False) -> None:
        self.stride_bytes = -(-frame_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._room = _allocate(n_frames * self.stride_bytes + ALIGN_BYTES, device)
        if poisoned:
            self._room.fill_(POISON)
        first = -self._room.data_ptr() % ALIGN_BYTES
        rows = self._room[first : first + n_frames * self.stride_bytes].view(n_frames, self.stride_bytes)
        self.data = rows[:, :frame_bytes]
        self.addresses: IntArray = np.arange(n_frames, dtype=np.int64) * self.stride_bytes
        self.addresses += self._room.data_ptr() + first

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return int(self._room.nbytes)

    def write(self, frames: IntArray, rows: torch.Tensor) -> None:
        """Copy rows, uint8 [n, frame_bytes], into frames, int64 [n]."""
        self.data.index_copy_(0, self._index(frames), rows)

    def poison(self, frames: IntArray) -> None:
        """Fill frames, int64 [n], with NaN, so that whoever still reads them shows."""
        self.data.index_fill_(0, self._index(frames), POISON)

    def is_poisoned(self, frames: IntArray) -> bool:
        """Whether all bytes of these frames are poison."""
        return bool((self.data[self._index(frames)] == POISON).all())

    def _index(self, frames: IntArray) -> torch.Tensor:
        return torch.from_numpy(frames.copy()).to(self.data.device)  # torch takes no reversed or read-only arrays


def _allocate(n_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's own, also for memory that the host does not have
        raise FrameMemoryError(f"{device} cannot give {n_bytes} bytes to a buffer pool; take fewer frames") from error
