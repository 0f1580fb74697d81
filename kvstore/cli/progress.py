"""Showing how far a command is, on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Stages:
    """Shows the stage that work is in: a bar on a terminal, else one line as each stage begins."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._stage = ""
        self._task: TaskID | None = None
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Say the stage, and steps done of all (0: not known)."""
        if stage != self._stage:
            self._begin(stage)
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total or None)

    def _begin(self, stage: str) -> None:
        self._stage = stage
        if self._bars.disable:
            self._console.print(f"{stage} ...", highlight=False, soft_wrap=True)
            return
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(stage, total=None)
