"""What goes wrong in a buffer pool, one class a meaning. Settings out of range are `kvstore.errors.ConfigError`."""

from kvstore.errors import KVStoreError


class BufferPoolError(KVStoreError):
    """Base of the errors of this package."""


class InvalidBatchError(BufferPoolError, ValueError):
    """Raised when ids, weights, counts or a number of frames are of a wrong shape or kind, or when ids repeat."""


class FrameStateError(BufferPoolError, ValueError):
    """Raised when a frame does not exist, or is not in the state that a call needs."""


class FrameMemoryError(BufferPoolError, MemoryError):
    """Raised when a device has no room for the frames of a new pool."""


class FramePinnedError(BufferPoolError, RuntimeError):
    """Raised when blocks are dropped, or a pool is closed, while guards pin their frames."""


class GuardReleasedError(BufferPoolError, RuntimeError):
    """Raised when a guard is used after its release, or released twice."""


class PoolClosedError(BufferPoolError, RuntimeError):
    """Raised when a closed pool is used."""
