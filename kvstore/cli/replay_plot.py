"""The picture that `kvstore replay --plot` draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvstore.errors import ConfigError
from kvstore.replay.policies import SizeResult
from kvstore.replay.trace import BlockTrace


def draw(trace: BlockTrace, found: Sequence[SizeResult], file: Path) -> None:
    """Write a picture of hit rates over pool sizes; raises `ConfigError` when that cannot be done."""
    figure = Figure(figsize=(8, 5), layout="constrained")  # not pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ordered = sorted(found, key=lambda one: one.share)
    percents = [100 * one.share for one in ordered]
    best = [one.best_hits / one.policies[0].lookups for one in ordered]
    axes.plot(percents, best, color="0.4", linestyle=":", marker="o", label="Belady")
    for number, policy in enumerate(ordered[0].policies):
        rates = [one.policies[number].hit_rate for one in ordered]
        axes.plot(percents, rates, marker="o", label=policy.policy)
    title = f"{trace.model or 'decoding'}: blocks of {trace.block_tokens} rows, {trace.n_steps} steps"
    axes.set(xlabel="size of the pool, % of all blocks", ylabel="blocks found, share", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=8)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format of pictures
        raise ConfigError(f"cannot draw {file}: {error}") from error
