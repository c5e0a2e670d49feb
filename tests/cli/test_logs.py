"""Logs for machines: one object per line, whatever is logged."""

import json
import logging

from cli.logs import JsonLines


def line_of(record: logging.LogRecord) -> dict[str, object]:
    text = JsonLines("decode-0").format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_line_says_who_when_and_what() -> None:
    record = logging.LogRecord("epd.engine", logging.WARNING, __file__, 1, "%d pages\nshort", (3,), None)
    record.created = 1_800_000_000.25
    assert line_of(record) == {
        "time": "2027-01-15T08:00:00.250+00:00",
        "level": "warning",
        "process": "decode-0",
        "logger": "epd.engine",
        "message": "3 pages\nshort",
    }


def test_facts_are_fields_and_errors_have_their_traceback() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), info)
    record.__dict__["facts"] = {"request_id": "req-1", "seconds": 0.5}
    found = line_of(record)
    assert (found["request_id"], found["seconds"]) == ("req-1", 0.5)
    assert "ValueError: no\nway" in str(found["error"])
