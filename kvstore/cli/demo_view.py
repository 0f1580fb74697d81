"""The demo's report for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.budget import Budget
from kvstore.demo.report import FULL, DemoReport, Outcome


def show_report(report: DemoReport, console: Console) -> None:
    """Print a report: what was asked, one column an engine, sizes, and one explained query."""
    place = f"at token {report.place:,} of {report.n_context_tokens:,}"
    console.print(
        _labelled(
            ("Model", report.model),
            ("Text", report.text),
            ("Hidden", f'"{report.sentence}" {place}'),
            ("Protocol", report.protocol),
        )
    )
    console.print()
    console.print(_table(report.outcomes))
    console.print()
    console.print(_labelled(("Index", _index(report)), ("Result", _verdict(report.outcomes))))
    console.print()
    console.print(Text(report.explanation), soft_wrap=True)


def _labelled(*lines: tuple[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for label, text in lines:
        grid.add_row(Text(label, style="bold"), Text(text))
    return grid


def _index(report: DemoReport) -> str:
    return (
        f"{report.index_bytes_per_key:.1f} bytes a key ({report.key_bytes} in the model); with codebooks "
        f"{_mib(report.index_bytes)}, for {_mib(report.rows_bytes)} of keys and values"
    )


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(show_edge=False, pad_edge=False, padding=(0, 2))
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(_title(outcome), overflow="fold")
    table.add_row("answer", *(Text(outcome.answer.partition("\n")[0]) for outcome in outcomes))
    table.add_row("", *(_judgement(outcome) for outcome in outcomes))
    table.add_row("rows a step reads", *(f"{outcome.rows_a_step:,.0f}" for outcome in outcomes))
    table.add_row("attention mass caught", *(f"{outcome.mass:.1%}" for outcome in outcomes))
    table.add_row("tokens a second", *(f"{outcome.tokens_per_s:.1f}" for outcome in outcomes))
    table.add_row("context read in", *(f"{outcome.read_s:.1f} s" for outcome in outcomes))
    table.add_row("time to first token", *(f"{outcome.first_token_s:.1f} s" for outcome in outcomes))
    return table


def _title(outcome: Outcome) -> str:
    return outcome.engine if outcome.engine == FULL else f"{outcome.engine} {_budget(outcome.budget)}"


def _budget(budget: Budget) -> str:
    if budget is None:
        return "all rows"
    return f"{100 * budget:g}%" if isinstance(budget, float) else f"{budget} rows"


def _judgement(outcome: Outcome) -> Text:
    return Text("right", style="green") if outcome.right else Text("wrong", style="red")


def _verdict(outcomes: list[Outcome]) -> str:
    full, *selective = outcomes
    if not full.right:
        return "the model misses the number even with full attention, so this prompt says little about the store"
    wrong = [_budget(outcome.budget) for outcome in selective if not outcome.right]
    if wrong:
        return f"full attention is right; the store's answer is WRONG at {' and '.join(wrong)}"
    return "every answer is right"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):.1f} MiB"
