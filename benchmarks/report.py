"""What a benchmark found: figures beside a peer's, as JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

Better = Literal["lower", "higher", "neither"]


class ReportError(ValueError):
    """Raised for a report that does not have the shape of one."""


@dataclass(frozen=True)
class Metric:
    """What a figure measures.

    Attributes:
        name, unit: in words; the unit of a count or a share is "tokens", "share" and so on, never empty.
        better: which direction is the better one; `"neither"` for figures that are not compared by a ratio.
    """

    name: str
    unit: str
    better: Better

    def ratio(self, ours: float | None, peer: float | None) -> float | None:
        """How many times better ours is than the peer's (above 1: better); None where that says nothing.

        >>> Metric("time", "s", "lower").ratio(2.0, 6.0)
        3.0
        >>> Metric("rate", "tokens/s", "higher").ratio(2.0, 6.0)
        0.3333333333333333
        """
        if self.better == "neither" or ours is None or peer is None or ours <= 0 or peer <= 0:
            return None
        return peer / ours if self.better == "lower" else ours / peer


@dataclass(frozen=True)
class Row:
    """One figure, and the peer's in the same run; `ratio` above 1 means that ours is better."""

    case: str
    metric: str
    unit: str
    ours: float | None
    peer: str
    peer_value: float | None
    ratio: float | None


class Report:
    """The rows of one benchmark and the machine that they were taken on."""

    def __init__(self, name: str, machine: Mapping[str, Any]) -> None:
        self.name = name
        self.machine = dict(machine)
        self.rows: list[Row] = []

    def add(self, case: str, metric: Metric, ours: float | None, peer: str, peer_value: float | None) -> Row:
        """Append a row; None stands for a figure that does not exist. Raises `ReportError` for NaN or infinity."""
        row = Row(case, metric.name, metric.unit, ours, peer, peer_value, metric.ratio(ours, peer_value))
        check_row(asdict(row))
        self.rows.append(row)
        return row

    def as_dict(self) -> dict[str, Any]:
        """Return `{"name", "machine", "rows"}`, plain values that JSON can hold."""
        return {"name": self.name, "machine": self.machine, "rows": [asdict(row) for row in self.rows]}

    def write(self, path: Path) -> None:
        """Write the report as JSON, making the folder if need be."""
        data = self.as_dict()
        check_report(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """Return the rows as a table for a terminal."""
        from rich.table import Table

        table = Table(title=self.name, caption="ratio above 1: ours is better")
        table.add_column("case")
        table.add_column("metric")
        table.add_column("ours", justify="right")
        table.add_column("peer")
        table.add_column("peer's", justify="right")
        table.add_column("ratio", justify="right")
        case = None
        for row in self.rows:
            cells = (f"{row.metric}, {row.unit}", _shown(row.ours), row.peer, _shown(row.peer_value), _ratio(row.ratio))
            if case not in (None, row.case):
                table.add_section()
            table.add_row("" if row.case == case else row.case, *cells)
            case = row.case
        return table


def check_report(data: Mapping[str, Any]) -> None:
    """Raise `ReportError` unless data is what `Report.as_dict` returns."""
    if set(data) != {"name", "machine", "rows"}:
        raise ReportError(f"a report has the keys name, machine and rows, not {sorted(data)}")
    if not isinstance(data["name"], str) or not data["name"]:
        raise ReportError(f"the name of a report must be a non-empty string, not {data['name']!r}")
    if not isinstance(data["machine"], Mapping) or not data["machine"]:
        raise ReportError("a report must describe the machine that it was taken on")
    if not data["rows"]:
        raise ReportError("a report must hold at least one row")
    for row in data["rows"]:
        check_row(row)


def check_row(row: Mapping[str, Any]) -> None:
    """Raise `ReportError` unless row has the fields of `Row`, with texts that say something and finite numbers."""
    names = [field.name for field in fields(Row)]
    if list(row) != names:
        raise ReportError(f"a row has the fields {names}, not {list(row)}")
    for name in ("case", "metric", "unit", "peer"):
        if not isinstance(row[name], str) or not row[name]:
            raise ReportError(f"{name} must be a non-empty string, not {row[name]!r}")
    for name in ("ours", "peer_value", "ratio"):
        value = row[name]
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ReportError(f"{name} of {row['metric']!r} must be a finite number or None, not {value!r}")


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.2f}[/]"
