"""The body of a request on its way in: JSON or files, how large, how fast, and how much all requests together hold."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from encoder.front.items import (
    OPTION_NAMES,
    OPTION_SHAPES,
    EncodeBody,
    Item,
    checked_format,
    form_source,
    read_encode_body,
)
from encoder.front.problems import Refused, invalid
from encoder.pace import Pace, PaceLimits
from encoder.quoting import shown
from preprocess.types import Modality

# Bodies up to this size are not counted: what all sockets together can hold of them is small.
_SMALL_BODY_BYTES: Final = 64 << 10
# More commas, and it is no list of media, and would take seconds to judge.
_MAX_COMMAS: Final = 100_000
_COUNTED_AT_ONCE_BYTES: Final = 4 << 20
_MAX_FIELD_BYTES: Final = 4096
_CODECS: Final = ("", "binary", "8bit", "7bit")


class _Arrival:
    """The body of one request, counted until the request ends."""

    def __init__(self, owner: "BodyReader", pace: Pace) -> None:
        self._owner = owner
        self._pace = pace
        self.size_bytes = 0

    @property
    def counted_bytes(self) -> int:
        return self.size_bytes if self.size_bytes > _SMALL_BODY_BYTES else 0

    def take(self, num_bytes: int) -> None:
        """So much more has come. Raises Refused when it is too much."""
        self.size_bytes += num_bytes
        self._owner.check(self)
        self._pace.note(self.size_bytes)


class BodyReader:
    """Reads bodies of at most `max_bytes`. Those of all requests in flight hold at most twice that."""

    def __init__(self, *, max_bytes: int, pace: PaceLimits, max_items: int) -> None:
        self._max_bytes = max_bytes
        self._pace = pace
        self._max_items = max_items
        self._arrivals: set[_Arrival] = set()

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncGenerator[EncodeBody, None]:
        """What the request asks for; its memory is counted until the block ends. Raises Refused."""
        _check_headers(request)
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large()
        pace = Pace(self._pace)
        arrival = _Arrival(self, pace)
        self._arrivals.add(arrival)
        try:
            try:
                async with pace.timeout:
                    if request.content_type == "application/json":
                        raw = await _read_json(request, arrival)
                        read = None
                    else:
                        read = await _Form(self._max_items).read(request, arrival)
                        raw = bytearray()
            except TimeoutError as error:
                if not pace.timeout.expired():
                    raise
                raise Refused(408, "body_timeout", pace.complaint(arrival.size_bytes)) from error
            except (BadHttpMessage, web.RequestPayloadError) as error:
                raise invalid("the body is not framed as its headers say") from error
            if read is None:
                small = len(raw) <= _SMALL_BODY_BYTES
                parsed = _parse_json(raw) if small else await asyncio.to_thread(_parse_json, raw)
                raw.clear()
                read = read_encode_body(parsed, max_items=self._max_items)
            yield read
        finally:
            self._arrivals.discard(arrival)

    def check(self, arrival: _Arrival) -> None:
        """Raises Refused when this body, or all of them, have become too large."""
        if arrival.size_bytes > self._max_bytes:
            raise self._too_large()
        if arrival.counted_bytes and sum(other.counted_bytes for other in self._arrivals) > 2 * self._max_bytes:
            raise Refused(503, "overloaded", "too many large requests are in flight at once", retry_after_s=5.0)

    def _too_large(self) -> Refused:
        return Refused(413, "body_too_large", f"the body is larger than this server takes: {self._max_bytes} bytes")


def _check_headers(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _unsupported("Content-Encoding", encoding, "identity")
    given = request.headers.get("Content-Type", "absent")
    if "Content-Type" not in request.headers or request.content_type not in ("application/json", "multipart/form-data"):
        raise _unsupported("Content-Type", given, "application/json, multipart/form-data")
    # A browser asks before a foreign page may post JSON, but not before it posts a form.
    if request.content_type != "application/json" and request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise Refused(403, "foreign_page", "forms are not taken from pages of other sites")


def _unsupported(header: str, given: str, allowed: str) -> Refused:
    return Refused(415, "unsupported_media_type", f"{header} is {given[:80]}; allowed: {allowed}", param=header)


async def _read_json(request: web.Request, arrival: _Arrival) -> bytearray:
    raw = bytearray()
    while chunk := await request.content.readany():
        arrival.take(len(chunk))
        raw += chunk
    return raw


def _parse_json(raw: bytearray) -> object:
    """Raises Refused. Thread-safe."""
    starts = range(0, len(raw), _COUNTED_AT_ONCE_BYTES)
    num_commas = sum(raw.count(b",", start, start + _COUNTED_AT_ONCE_BYTES) for start in starts)
    if num_commas > _MAX_COMMAS:
        raise invalid(f"the body has {num_commas} commas; allowed: at most {_MAX_COMMAS}")
    try:
        return msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise invalid("the body is nested far too deeply") from error
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {str(error).partition(' - at ')[0]}") from error


class _Form:
    """A form with files. Fields that are no files are settings: model, encoding_format, and options of media.

    A file's field is named for what it is, image, video or audio; under any other name its content type says it.
    An option goes to the files it means something for, and is a mistake when there are none.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._files: list[tuple[str, Modality, bytes]] = []
        self._settings: dict[str, str] = {}
        self._options: dict[str, Any] = {}

    async def read(self, request: web.Request, arrival: _Arrival) -> EncodeBody:
        """Raises Refused."""
        try:
            reader = await request.multipart()
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader):
                    raise invalid("a part of the form is itself a form; allowed: files and fields")
                await self._take(part, arrival)
        except ValueError as error:
            raise invalid(f"the body is no form: {error}") from error
        if not self._files:
            raise invalid("the form has no file; allowed: fields image, video and audio, each with a file")
        self._check_takers()
        return EncodeBody(
            items=tuple(self._items()),
            model=self._settings.get("model"),
            encoding_format=checked_format(self._settings.get("encoding_format", "base64")),
        )

    async def _take(self, part: BodyPartReader, arrival: _Arrival) -> None:
        name = part.name or ""
        codec = part.headers.get("Content-Transfer-Encoding", "").strip().lower()
        if codec not in _CODECS:
            allowed = ", ".join(filter(None, _CODECS))
            raise invalid(f"Content-Transfer-Encoding of {shown(name)} is {shown(codec)}; allowed: {allowed}", name)
        if part.filename is None and name not in set(Modality):
            self._note(name, await _content(part, arrival, max_bytes=_MAX_FIELD_BYTES))
            return
        if len(self._files) == self._max_items:
            raise invalid(f"the form has more than {self._max_items} files, which is the most allowed", name)
        modality = _modality(part, name)
        self._files.append((name, modality, await _content(part, arrival)))

    def _note(self, name: str, raw: bytes) -> None:
        text = raw.decode("utf-8", "replace").strip()
        if name in ("model", "encoding_format"):
            self._settings[name] = text
        elif name in OPTION_NAMES:
            # Written as in JSON; a word needs no quotes.
            try:
                self._options[name] = json.loads(text)
            except ValueError:
                self._options[name] = text
        else:
            allowed = ", ".join(["model", "encoding_format", *OPTION_NAMES])
            raise invalid(f"unknown field {shown(name)}; allowed: files as {', '.join(Modality)}, and {allowed}", name)

    def _items(self) -> Iterator[Item]:
        seen: Counter[str] = Counter()
        for name, modality, content in self._files:
            param = f"{name or 'file'}[{seen[name]}]"
            seen[name] += 1
            source = form_source(modality, self._options)
            given = {option: option for option in self._options}
            yield Item(param, source, content, given)

    def _check_takers(self) -> None:
        modalities = {modality for _, modality, _ in self._files}
        for option in self._options:
            takers = [modality for modality in Modality if option in OPTION_SHAPES[modality]]
            if modalities.isdisjoint(takers):
                raise invalid(
                    f"{option} is an option of {' and '.join(takers)}; there is no such file in the form", option
                )


def _modality(part: BodyPartReader, name: str) -> Modality:
    if name in set(Modality):
        return Modality(name)
    kind = part.headers.get("Content-Type", "")
    family = kind.partition("/")[0].strip().lower()
    if family in set(Modality):
        return Modality(family)
    raise invalid(
        f"file {shown(name)} has Content-Type {shown(kind)}; allowed: image/*, video/*, audio/*, or name the field "
        "image, video or audio",
        name,
    )


async def _content(part: BodyPartReader, arrival: _Arrival, *, max_bytes: int | None = None) -> bytes:
    content = bytearray()
    while chunk := await part.read_chunk(1 << 18):
        arrival.take(len(chunk))
        content += chunk
        if max_bytes is not None and len(content) > max_bytes:
            raise invalid(f"field {shown(part.name or '')} has more than {max_bytes} bytes", part.name or None)
    return bytes(content)
