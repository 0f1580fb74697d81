"""The picture of a timeline; needs the package matplotlib (extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.timeline import Timeline

COLOURS = {
    "step": "0.85", "append": "tab:blue", "commit": "0.6", "build": "tab:orange", "wait": "tab:red",
    "attend": "tab:green", "search": "tab:olive", "save": "tab:purple", "flush": "tab:pink", "read": "tab:brown",
}  # fmt: skip


def draw(timeline: Timeline, file: Path) -> None:
    """Write a picture with a line for each lane; raises `ConfigError` when that cannot be done."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; run: pip install 'kvstore-engine[bench]'") from None
    lanes = timeline.lanes
    figure = Figure(figsize=(12, 1.5 + 0.6 * len(lanes)), layout="constrained")  # not pyplot: no global state
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_events(axes, timeline)
    axes.set_xlabel("milliseconds")
    if lanes:
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format of pictures
        raise ConfigError(f"cannot draw {file}: {error}") from error


def _draw_events(axes: Any, timeline: Timeline) -> None:
    zero = min((event.start_us for event in timeline.events), default=0.0)
    lanes = {lane: number for number, lane in enumerate(timeline.lanes)}
    for name, colour in COLOURS.items():
        events = [event for event in timeline.events if event.name == name]
        for lane in dict.fromkeys(event.lane for event in events):
            bars = [
                ((event.start_us - zero) / 1000, (event.stop_us - event.start_us) / 1000)
                for event in events
                if event.lane == lane
            ]
            axes.broken_barh(bars, (lanes[lane] - 0.4, 0.8), facecolors=colour)
        if events:
            axes.broken_barh([], (0, 0), facecolors=colour, label=name)
