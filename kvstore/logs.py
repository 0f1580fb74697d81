"""What the package tells `logging`: events with names and fields, under the logger "kvstore".

Nothing is set up here: as long as the program configures no logging, warnings go where Python sends them, and the rest
is not even put together.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("kvstore")


def log_event(logger: logging.Logger, level: int, event: str, text: str, /, **fields: Any) -> None:
    """Log an event: `text % fields` for people; `record.kvstore`, the fields and "event", for programs.

    >>> log_event(log, logging.DEBUG, "store.opened", "%(path)s is open", path="book.kv")
    """
    if logger.isEnabledFor(level):
        extra = {"kvstore": {**fields, "event": event}}
        logger.log(level, text, *([fields] if fields else []), extra=extra, stacklevel=2)


class JsonFormatter(logging.Formatter):
    """Makes one JSON object a line: time (ISO 8601, UTC), level, event, message, fields, and error where there is one.

    Records that are no events of this package have an empty event and no fields, so it serves a whole program.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what JSON does not know is written as `str` gives it."""
        fields = dict(getattr(record, "kvstore", None) or {})
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": fields.pop("event", ""),
            "message": record.getMessage(),
            "fields": fields,
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
