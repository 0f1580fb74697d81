"""How good are the rows that an index picks as a text grows far beyond the prompt that its codebook was trained on?

A real text is read by the model and recorded. Its first rows are the prompt; the rest is appended as if it had been
generated, up to eight times the prompt, and the recorded queries at increasing distances ask for a tenth of the rows
between sinks and window. Beside each figure stands exact selection's, of as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import inputs
from benchmarks.drift_runs import AUTO, BY_DRIFT, KINDS, NEVER, POLICIES, Point, bins, play
from benchmarks.report import Metric, Report
from benchmarks.setup import reported
from benchmarks.timing import Tell

if TYPE_CHECKING:
    from kvstore.traces import Trace

MID = Metric("mass of the middle found", "share", "higher")
MASS = Metric("attention mass caught", "share", "neither")
DRIFT = Metric("drift of recent rows", "times the error of training", "neither")
BUILDS = Metric("trainings of an index", "trainings", "neither")
KEPT = Metric("of exact selection's mass at the end", "share", "higher")
EXACT, AT_PROMPT, LIMIT = "exact selection", "behind the prompt", "limit"

Found = Mapping[tuple[str, str], Mapping[float, Point]]


@dataclass(frozen=True)
class Options:
    """Tokens of the prompt; generated lengths in prompts, ascending; tokens about each of them whose queries ask;
    share of the rows that is picked; kinds of index and when they are trained again; layers, None for four of them."""

    prompt: int = 512
    factors: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
    width: int = 128
    share: float = 0.1
    kinds: tuple[str, ...] = tuple(KINDS)
    policies: tuple[str, ...] = tuple(POLICIES)
    layers: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the text."""
        return round(self.prompt * (1 + self.factors[-1])) + self.width // 2


QUICK = Options(factors=(0.0, 1.0, 2.0), policies=(NEVER, BY_DRIFT))


def record(model: Any, ids: Sequence[int], options: Options, tell: Tell) -> list[Trace]:
    """Return the traces of the layers while the model reads the first tokens of ids."""
    from kvstore.adapters.hf.capture import capture, default_layers

    if len(ids) < options.tokens:
        raise ValueError(f"the text has {len(ids)} tokens; these lengths need {options.tokens}")
    layers = options.layers or tuple(default_layers(model))
    return capture(
        model,
        ids[: options.tokens],
        layers,
        n_queries=options.width // 2,
        tell=lambda what, at, n: tell(f"{what}, {at} of {n}"),
    )


def run_drift(traces: Sequence[Trace], options: Options, report: Report, tell: Tell) -> dict[tuple[str, str], Any]:
    """Measure every kind and policy, add the rows, and return the points by kind and policy."""
    places = bins(traces[0], options.prompt, options.factors, options.width)
    found: dict[tuple[str, str], Mapping[float, Point]] = {}
    for kind in options.kinds:
        for policy in options.policies:
            tell(f"{kind}, trained again {policy}")
            found[kind, policy] = play(traces, kind, policy, options.prompt, options.share, places)
            _add(report, options, kind, policy, found[kind, policy])
    return found


def _add(report: Report, options: Options, kind: str, policy: str, points: Mapping[float, Point]) -> None:
    for factor, point in points.items():
        case = f"{kind}, trained again {policy}, {factor:g} x {options.prompt} generated"
        report.add(case, MID, point.mid, EXACT, point.exact_mid)
        report.add(case, MASS, point.mass, "all rows", 1.0)
        if math.isfinite(point.drift):
            report.add(case, DRIFT, point.drift, LIMIT, 2.0 if policy in (BY_DRIFT, AUTO) else None)
        report.add(case, BUILDS, point.builds, "the prompt's", 1.0)
    first, last = points[min(points)], points[max(points)]
    case = f"{kind}, trained again {policy}, all lengths"
    report.add(case, KEPT, last.mid / last.exact_mid, AT_PROMPT, first.mid / first.exact_mid)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture (needs matplotlib).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Up to twice the prompt, two policies: half a minute.")
    ] = False,
    prompt: Annotated[int | None, typer.Option(min=400, help="Tokens of the prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
) -> None:
    """Quality of the rows picked by generated length, with and without training again, beside exact selection."""
    base = QUICK if quick else Options()
    options = replace(base, prompt=prompt or base.prompt)
    from benchmarks.machine import describe_machine
    from kvstore.adapters.model_files import load_model

    report = Report("drift", describe_machine())
    with reported(report, json) as tell:
        loaded = load_model(model, report=tell)
        ids = inputs.tokens_of(inputs.read_text(text), loaded.tokenizer).tolist()
        found = run_drift(record(loaded.model, ids, options, tell), options, report, tell)
    if plot is not None:
        from benchmarks.drift_plot import draw

        draw(found, f"a tenth of the rows, prompt of {options.prompt} tokens", plot)


if __name__ == "__main__":
    app()
