"""One error class a meaning; each message names the numbers and the remedy."""


class KVStoreError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """Raised when a setting of a schema, a store or an index is out of its range."""


class SchemaMismatchError(KVStoreError, ValueError):
    """Raised when rows or queries do not have the shape, dtype or device of the schema."""


class InvalidQueryError(KVStoreError, ValueError):
    """Raised when k, a budget, a head, a position or a reduction is out of its range."""


class NonFiniteError(KVStoreError, ValueError):
    """Raised when keys or queries hold NaN or infinity."""


class LayerNotFoundError(KVStoreError, IndexError):
    """Raised when a layer or a KV head does not exist in the schema."""


class StepError(KVStoreError, RuntimeError):
    """Raised when a step is used out of order: no open step, a layer skipped, unequal lengths."""


class SequenceNotFoundError(KVStoreError, KeyError):
    """Raised when no sequence has the given name, or when it has been dropped."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class SequenceExistsError(KVStoreError, ValueError):
    """Raised when a sequence is created under a name that is taken."""


class HeapFullError(KVStoreError, MemoryError):
    """Raised when the heap's byte limit leaves no room for another block."""


class StoreClosedError(KVStoreError, RuntimeError):
    """Raised when a closed store is used."""


class IndexNotTrainedError(KVStoreError, RuntimeError):
    """Raised when rows are added to, or searched in, an index that has no codebook yet."""


class MaintenanceError(KVStoreError, RuntimeError):
    """Raised once, at the next step or by `wait`, when work in the background failed; rows and index are as before."""


class UnsupportedModelError(KVStoreError, ValueError):
    """Raised when a model's attention cannot be served by the store (MLA, ALiBi, no attention interface)."""


class StorageError(KVStoreError, OSError):
    """Raised when the disk, or the file system, refuses a read or a write for a reason other than room."""


class SpillFullError(StorageError):
    """Raised when a batch fits neither into the spill's byte limit nor onto the disk; nothing of it is written."""


class CorruptStoreError(KVStoreError, ValueError):
    """Raised when a file of a store is damaged, is not what its name says, or must not be followed (a link)."""


class BlockNotFoundError(CorruptStoreError, KeyError):
    """Raised when rows that a sequence needs are on no tier; they are never replaced by anything else."""

    __str__ = Exception.__str__  # KeyError's would put the message into quotes


class CorruptBlockError(CorruptStoreError):
    """Raised when a record is damaged, or lies under another record's key; its bytes are never handed out."""


class UnsupportedFormatError(KVStoreError, ValueError):
    """Raised when a file is of a newer format, needs a feature unknown here, or was not written by this package."""


class StoreLockedError(KVStoreError, RuntimeError):
    """Raised when another writer has the directory of a store open; the message names it."""


class ReadOnlyStoreError(KVStoreError, RuntimeError):
    """Raised when something is written to a store that was opened to be read."""


class ForkedStoreError(KVStoreError, RuntimeError):
    """Raised when a store is used in a process that did not open it: in a forked child, or sent there by pickling."""
