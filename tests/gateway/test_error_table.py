"""docs/api.md names every code of every error that a client can see, with its status."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import epd.gateway
from encoder.errors import EncoderError
from epd.errors import ServeError
from epd.gateway.operations import MEDIA_ERRORS
from preprocess.errors import MediaError

ROOT = Path(__file__).parent.parent.parent
# Bases, what is turned into another code before a client sees it, and what ends a process at its start.
NEVER_SENT = {"media_error", "wire_error", "cancelled", "arena_unavailable"}


def kinds(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def rows() -> dict[tuple[int, str], str]:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\d{3}) \| (.+?) \| (.+?) \|$", text.partition("## Errors")[2], re.MULTILINE)
    return {(int(status), code): when for status, codes, when in table for code in re.findall(r"`(\w+)`", codes)}


@pytest.mark.parametrize("base", [ServeError, MediaError, EncoderError])
def test_every_error_has_its_row(base: type[Exception]) -> None:
    for module in pkgutil.iter_modules(epd.gateway.__path__):
        if not module.ispkg:
            importlib.import_module(f"epd.gateway.{module.name}")
    documented = rows()
    missing = {
        (kind.status, kind.code)  # type: ignore[attr-defined]
        for kind in kinds(base)
        if kind.__module__.split(".")[0] in ("epd", "encoder", "preprocess") and kind.code not in NEVER_SENT  # type: ignore[attr-defined]
    } - documented.keys()
    assert not missing


def test_routes_that_read_media_document_all_that_media_can_cause() -> None:
    possible = {
        kind.status  # type: ignore[attr-defined]
        for base in (MediaError, EncoderError)
        for kind in kinds(base)
        if kind.code not in NEVER_SENT  # type: ignore[attr-defined]
    }
    assert possible - {400, 500} <= set(MEDIA_ERRORS)
