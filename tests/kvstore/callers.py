"""Calls on threads of their own, so that one that never ends fails a test instead of stopping it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 60  # after which a call counts as one that never ends


class Caller(threading.Thread):
    """Makes a call, and keeps what it raised."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(name="caller", daemon=True)
        self.raised: BaseException | None = None
        self._call, self._arguments = call, arguments
        self.start()

    def run(self) -> None:
        """Make the call."""
        try:
            self._call(*self._arguments)
        except BaseException as error:
            self.raised = error

    def has_ended(self) -> bool:
        """Whether it ends."""
        self.join(LIMIT_S)
        return not self.is_alive()
