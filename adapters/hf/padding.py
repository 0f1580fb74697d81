"""Telling left padding from every other attention mask."""

from __future__ import annotations

import torch


def left_padding(mask: torch.Tensor, n_batch: int) -> list[int] | None:
    """Return how many rows at the left each batch row hides from its newest token, or None.

    mask bool [n_batch or 1, 1, n_queries, n_rows], True where a query may look. None means that the newest
    token does not see all the rows from some row on (holes, right padding), or that the mask is not of this
    form.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        return None
    seen = mask[:, 0, -1]
    n_rows = seen.shape[-1]
    n_seen, first = seen.sum(-1).tolist(), seen.to(torch.uint8).argmax(-1).tolist()
    hidden = [n_rows - n for n in n_seen]
    if any(n and at != p for n, at, p in zip(n_seen, first, hidden, strict=True)):
        return None
    return hidden * n_batch if len(hidden) == 1 else hidden
