"""Progress of a long run, on stderr."""

from __future__ import annotations

import time
from types import TracebackType


class Progress:
    """Prints a line for each stage with the minutes since the beginning; in a terminal the line is redrawn."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._started = time.perf_counter()
        self._status = self._console.status("starting") if self._console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def __call__(self, line: str) -> None:
        """Show what is being done."""
        minutes, seconds = divmod(int(time.perf_counter() - self._started), 60)
        text = f"{minutes:3d}:{seconds:02d}  {line}"
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text, markup=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()
