"""The picture that `benchmarks.drift --plot` draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.drift_runs import ALWAYS, AUTO, BY_DRIFT, NEVER, Point

STYLES = {NEVER: "-", ALWAYS: "--", BY_DRIFT: ":", AUTO: "-."}


def draw(found: Mapping[tuple[str, str], Mapping[float, Point]], title: str, file: Path) -> None:
    """Write a picture of the share of exact selection's mass over generated length, a line an index kind and policy.

    Colours are kinds, styles of lines policies.
    """
    figure = Figure(figsize=(9, 4.5), layout="constrained")  # not pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    for (kind, policy), points in found.items():
        if policy == BY_DRIFT and points == found.get((kind, NEVER)):
            continue  # nothing drifted: the same line
        factors = sorted(points)
        shares = [points[factor].mid / points[factor].exact_mid for factor in factors]
        color, label = f"C{kinds.index(kind)}", f"{kind}, again {policy}"
        axes.plot(factors, shares, STYLES.get(policy, "-"), color=color, marker="o", markersize=4, label=label)
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set(xlabel="generated length, prompts", ylabel="of the mass exact selection finds", title=title)
    figure.legend(loc="outside right upper", fontsize=8, title="codebook trained", title_fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
