"""How the service and its gradient process write their logs: lines for people, or JSON."""

import logging
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["text", "json"]

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure(log_format: LogFormat) -> None:
    """Write what is logged to the standard error, from INFO on."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(
            JsonFormatter(_FIELDS, rename_fields={"asctime": "time", "levelname": "level"})
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
