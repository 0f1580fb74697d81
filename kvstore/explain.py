"""EXPLAIN for attention: what a query will do, and with `analyze` what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.planner import DENSE, INDEX, Plan
from kvstore.schema import Schema


@dataclass(frozen=True, slots=True)
class Measured:
    """What running the plan gave.

    Attributes:
        search_ms, attend_ms: time for candidates, and for rerank + fetch + softmax, all KV heads.
        mass: share of the full softmax that the rows read hold, mean over query heads.
        middle_mass: the same of the mass between sinks and tail (1 where nothing lies there).
        chosen: int64 [n_kv_heads, n_selected], rows picked from the middle, ascending; -1 where a head picks fewer.
    """

    search_ms: float
    attend_ms: float
    mass: float
    middle_mass: float
    chosen: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan in words; `str()` is the operator tree, `as_dict()` the same for machines.

    n_blocks, n_spilled: blocks of the table, and those of them that lie on the disk only.
    """

    sequence: str
    layer: int
    schema: Schema
    plan: Plan
    index: dict[str, Any] | None
    measured: Measured | None = None
    n_blocks: int = 0
    n_spilled: int = 0

    def __str__(self) -> str:
        p, m = self.plan, self.measured
        head = f"Attend layer={self.layer} sequence={self.sequence!r}  rows {p.n_attended} of {p.n_rows - p.first}"
        head += f" ({p.n_attended / max(1, p.n_rows - p.first):.1%})  plan: {p.method}, {p.reason}"
        if m is not None:
            head += f"\n  actual: {m.search_ms + m.attend_ms:.2f} ms, attention mass caught {m.mass:.4f}"
            head += f", of the middle {m.middle_mass:.4f}"
        if self.n_spilled:
            head += f"\n  Blocks: {self.n_blocks - self.n_spilled} in the heap, {self.n_spilled} on the disk only"
        return "\n".join([head, *("  " + line for line in self._operators())])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        measured = None
        if self.measured is not None:
            measured = asdict(self.measured)
            measured["chosen"] = self.measured.chosen.tolist()
        return {
            "sequence": self.sequence,
            "layer": self.layer,
            "plan": asdict(self.plan)
            | {"by_head": [list(n) for n in self.plan.by_head], "n_attended": self.plan.n_attended},
            "index": self.index,
            "measured": measured,
            "blocks": {"heap": self.n_blocks - self.n_spilled, "disk": self.n_spilled},
        }

    def _operators(self) -> list[str]:
        p, m = self.plan, self.measured
        row_bytes = (self.schema.head_dim + self.schema.value_dim) * self.schema.torch_dtype.itemsize
        heads = self.schema.n_kv_heads
        if p.method == DENSE:
            return [f"Softmax rows=[{p.first},{p.n_rows})  {_size((p.n_rows - p.first) * row_bytes * heads)} of rows"]
        kept = p.n_rows - p.first - p.n_middle
        lines = [
            f"Softmax rows={p.n_attended}  attend {m.attend_ms:.2f} ms" if m else f"Softmax rows={p.n_attended}",
            f"  Exact sinks=[{p.first},{p.sinks_stop}) tail=[{p.tail_start},{p.n_rows})"
            f"  {_size(kept * row_bytes * heads)} of rows",
        ]
        key_bytes = self.schema.key_bytes
        source = f"[{p.sinks_stop},{p.tail_start})"
        if p.method == INDEX and self.index is not None:
            code_bytes = self.index["bytes_per_key"]
            shown = {k: v for k, v in self.index.items() if k not in ("kind", "rows", "bytes_per_key")}
            settings = " ".join(f"{k}={v}" for k, v in shown.items())
            lines += [
                f"  Rerank {p.n_candidates} -> {_chosen(p)} a KV head"
                f"  {_size(p.n_candidates * key_bytes * heads)} of keys",
                f"    Scan {self.index['kind']} {settings} rows={source}"
                f"  {_size(p.n_middle * code_bytes * heads)} of codes",
            ]
        else:
            keys = _size(p.n_middle * key_bytes * heads)
            lines += [f"  Scan flat rows={source} -> {_chosen(p)} a KV head  {keys} of keys"]
        if m is not None:
            lines[-1] += f"  search {m.search_ms:.2f} ms"
        return lines


def _chosen(plan: Plan) -> str:
    """Rows picked: a number, or the smallest and largest of the KV heads."""
    return f"{min(plan.by_head)[1]} to {plan.n_selected}" if plan.by_head else str(plan.n_selected)


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024 or unit == "MiB":
            break
        n_bytes /= 1024
    return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
