"""Which tokens the rows of a sequence are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidQueryError

IntArray = npt.NDArray[np.int64]


class Tokens:
    """Ids of the tokens of a sequence's first rows, as far as they have been said.

    Attributes:
        ids: int64 [n]; replaced, never changed in place.
        version: grows with every change.
    """

    __slots__ = ("ids", "version")

    def __init__(self, ids: IntArray | None = None) -> None:
        self.ids: IntArray = ids if ids is not None else np.empty(0, np.int64)
        self.version = 0

    def extend(self, ids: npt.ArrayLike | torch.Tensor, n_rows: int) -> None:
        """Add the tokens of the next rows, int64 [n]; raises `InvalidQueryError` beyond n_rows rows."""
        more = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
        if more.ndim != 1 or not (more.size == 0 or np.issubdtype(more.dtype, np.integer)):
            raise InvalidQueryError(f"tokens must be integers [n], not {more.dtype} {list(more.shape)}")
        if len(self.ids) + len(more) > n_rows:
            raise InvalidQueryError(
                f"{len(more)} tokens after {len(self.ids)} known ones are more than the {n_rows} rows; commit first"
            )
        if len(more):
            self.ids, self.version = np.concatenate([self.ids, more.astype(np.int64)]), self.version + 1

    def truncate(self, n_rows: int) -> None:
        """Forget the tokens of the rows from n_rows on."""
        if n_rows < len(self.ids):
            self.ids, self.version = self.ids[:n_rows], self.version + 1

    def clone(self) -> Tokens:
        """Return an independent copy."""
        return Tokens(self.ids)
