"""Pages of consecutive rows that are scored, and chosen, as one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.index.base import FloatArray
from kvstore.index.coded import CodedIndex
from kvstore.index.page_kernels import add_to_bounds, add_to_sums, page_scan
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import RowView
from kvstore.index.threads import run_parallel, run_sized
from kvstore.index.workspace import Workspace

MINMAX, MEAN = "minmax", "mean"


class PageIndex(CodedIndex):
    """A digest for each page of `page_tokens` rows, counted from `first_row`; the last page may be incomplete.

    `digest="minmax"` keeps the smallest and largest number of each channel; a page scores by the largest inner product
    that a key within these bounds could have (Quest, arXiv 2406.10774, section 3.3), so no row scores below its own.
    `digest="mean"` keeps the sum and scores by the mean key (as the block representatives of InfLLM, arXiv 2402.04617,
    with every row as a representative). All rows of a page have its score: a search takes whole pages, best first,
    equal ones from the lower row on, and cuts the last at k.

    Rows added to an incomplete page change its digest. `truncate` inside a page cannot take back what the rows cut off
    have done to it, for their keys are not kept: its bounds stay those of all rows it has had, still upper bounds for
    those left, and its mean stays the mean it was. Cutting where a page begins leaves nothing behind.

    Args:
        page_tokens: rows a page. digest: "minmax" or "mean".
        rope, seed: what a store gives to every kind; neither matters here.

    float32: `8 * head_dim / page_tokens` bytes a key with bounds, half with means. Nothing is trained. Scan
    O(n / page_tokens * group * head_dim + n * group) a KV head.
    """

    kind: ClassVar[str] = "page"

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        page_tokens: int = 16,
        digest: str = MINMAX,
        first_row: int = 0,
        rope: RopeSpec | None = None,
        seed: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        if page_tokens < 1:
            raise ConfigError(f"page_tokens must be at least 1, not {page_tokens}")
        if digest not in (MINMAX, MEAN):
            raise ConfigError(f"digest must be 'minmax' or 'mean', not {digest!r}")
        self.page_tokens, self.digest = page_tokens, digest
        parts: list[tuple[int, npt.DTypeLike]] = [(head_dim, np.float32)] * (2 if digest == MINMAX else 1)
        super().__init__(
            n_kv_heads, head_dim, parts=parts, rows_per_line=page_tokens, first_row=first_row, workspace=workspace
        )

    @property
    def trained(self) -> bool:
        """Always true: there is nothing to train."""
        return True

    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on; what stays of a page cut in two is described above."""
        before = self.n_rows
        super().truncate(stop_row)
        page, left = divmod(self.n_rows, self.page_tokens)
        if self.digest == MEAN and left:
            had = min(self.page_tokens, before - page * self.page_tokens)
            self._parts[0][:, page] *= np.float32(left / had)

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index."""
        return {**super().describe(), "page_tokens": self.page_tokens, "digest": self.digest}

    def _learned(self) -> tuple[npt.NDArray[Any], ...]:
        return ()

    def _learn(self, keys: FloatArray) -> None:
        pass

    def _encode(self, keys: FloatArray, start: int) -> None:
        kernel = add_to_bounds if self.digest == MINMAX else add_to_sums
        run_sized(0.3 * keys.size, kernel, keys, self.page_tokens, start, *self._parts)

    def _score_ns(self, group: int) -> float:
        return group * (0.2 + 0.2 * self.head_dim / self.page_tokens)

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        first = self.first_row
        kernel = page_scan(self.digest == MINMAX)
        digests = (self._parts[0], self._parts[-1])
        run_parallel(kernel, *digests, q, self.page_tokens, self.n_rows, start - first, stop - first, out)

    def _check(self) -> None:
        super()._check()
        digests = [part[:, : self._n_lines] for part in self._parts]
        assert all(np.isfinite(digest).all() for digest in digests)
        assert (digests[0] <= digests[-1]).all()
