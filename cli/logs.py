"""The log of a process that serves: one format in every mode, for people or for machines."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")


def log_to_stderr(name: str, log_format: LogFormat = "text") -> None:
    """Show what this process, called `name` in a deployment, logs from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines(name) if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class JsonLines(logging.Formatter):
    """An object per line: `time` (RFC 3339, UTC), `level`, `process`, `logger`, `message`, what a record carries as
    `facts` (of a request: its id, route, status, seconds), and `error` with the traceback of one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get("facts", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
