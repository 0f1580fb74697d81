"""The picture that `kvstore tune --plot` draws."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvstore.errors import ConfigError
from kvstore.tuning import Tuning


def draw(found: Tuning, file: Path) -> None:
    """Write a picture of quality over bytes with the Pareto front; raises `ConfigError` when that cannot be done."""
    figure = Figure(figsize=(8, 5), layout="constrained")  # not pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for over_fetch in sorted({trial.method.over_fetch for trial in found.trials}):
        some = [trial for trial in found.trials if trial.method.over_fetch == over_fetch]
        points = [trial.bytes_per_key for trial in some], [trial.quality.mid for trial in some]
        axes.scatter(*points, label=f"over-fetch {over_fetch:g}", zorder=2)
    front = [trial for trial in found.trials if trial.on_front]
    axes.step([t.bytes_per_key for t in front], [t.quality.mid for t in front], where="post", color="0.6", zorder=1)
    for trial in front:
        axes.annotate(trial.name, (trial.bytes_per_key, trial.quality.mid), fontsize=7, rotation=20)
    axes.axhline(found.exact.mid, color="0.4", linestyle=":", label="exact selection")
    axes.set(xscale="log", xlabel="bytes a key", ylabel="mass of the middle found", title=f"picking {found.budget:g}")
    axes.legend(loc="lower right", fontsize=8)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format of pictures
        raise ConfigError(f"cannot draw {file}: {error}") from error
