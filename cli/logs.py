"""The log of a process that serves: one format in every mode, for people or for machines."""

import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")


def log_to_stderr(name: str, log_format: LogFormat = "text") -> None:
    """Show what this process, called `name` in a deployment, logs from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines(name) if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if log_format == "json":
        # What would be text on standard error: warnings of Python, and the traceback of what nobody has caught.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread


def json_line(process: str, level: str, message: str, facts: Mapping[str, Any], *, unix_s: float | None = None) -> str:
    """An object: `time` (RFC 3339, UTC; now unless given), `level`, `process`, `message`, then what else is known.

    Logs and events are both made here, so that whoever reads standard error finds the same keys in every line.
    """
    moment = datetime.fromtimestamp(time.time() if unix_s is None else unix_s, UTC)
    shared = {
        "time": moment.isoformat(timespec="milliseconds"),
        "level": level,
        "process": process,
        "message": message,
    }
    return json.dumps({**shared, **facts, **shared}, ensure_ascii=False, default=str)


class JsonLines(logging.Formatter):
    """An object per line: `time` (RFC 3339, UTC), `level`, `process`, `logger`, `message`, what a record carries as
    `facts` (of a request: its id, route, status, seconds), and `error` with the traceback of one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {"logger": record.name, **record.__dict__.get("facts", {})}
        if record.exc_info:
            facts["error"] = self.formatException(record.exc_info)
        level = record.levelname.lower()
        return json_line(self._process, level, record.getMessage(), facts, unix_s=record.created)


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("ended by a fault: %r", error, exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(fault: threading.ExceptHookArgs) -> None:
    if fault.exc_value is not None and not isinstance(fault.exc_value, SystemExit):
        name = "a thread" if fault.thread is None else f"thread {fault.thread.name}"
        info = (fault.exc_type, fault.exc_value, fault.exc_traceback)
        logging.getLogger(__name__).error("%s ended by a fault: %r", name, fault.exc_value, exc_info=info)
