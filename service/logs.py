"""Logs of the service and of its gradient process: text lines or JSON."""

import logging
import sys
from types import TracebackType
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["text", "json"]

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure(log_format: LogFormat) -> None:
    """Configure logging to standard error, at level INFO and above, in the given format."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(
            JsonFormatter(_FIELDS, rename_fields={"asctime": "time", "levelname": "level"})
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # By default Python prints warnings and uncaught exceptions as plain text, in JSON logs too.
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger("vitrine").critical("uncaught exception", exc_info=(kind, error, traceback))
