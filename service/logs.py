"""Logs of the service and of its gradient process: text lines or JSON.

A record is one line. Line breaks and escape sequences in a path or a name are escaped, and the
lines of a traceback are indented, so that none of them can pass for a record.
"""

import logging
import sys
from types import TracebackType
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from models.printable import printable
from service.request_trace import TRACE

LogFormat = Literal["text", "json"]

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"
_TRACE_IDS = ("trace_id", "span_id")


class _TextFormatter(logging.Formatter):
    """Formatter that appends the ids of the current trace to the message; see the module docs."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        ids = {name: vars(record)[name] for name in _TRACE_IDS if name in vars(record)}
        message = " ".join((super().formatMessage(record), *(f"{n}={v}" for n, v in ids.items())))
        return printable(message)

    def formatException(self, ei: tuple[Any, Any, Any]) -> str:  # noqa: N802 - logging's name
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


def configure(log_format: LogFormat) -> None:
    """Configure logging to standard error, at level INFO and above, in the given format."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(
            JsonFormatter(_FIELDS, rename_fields={"asctime": "time", "levelname": "level"})
        )
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(_add_trace_ids)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # By default Python prints warnings and uncaught exceptions as plain text, in JSON logs too.
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _add_trace_ids(record: logging.LogRecord) -> bool:
    """Add the ids of the current trace to a record; a filter of the handler, which keeps all."""
    trace = TRACE.get()
    if trace is not None:
        vars(record).update(trace.ids)
    return True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger("vitrine").critical("uncaught exception", exc_info=(kind, error, traceback))
