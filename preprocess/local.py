"""Bytes that need no network: data: URLs in every spelling seen in requests, and files under the configured roots."""

from __future__ import annotations

import binascii
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from preprocess.config import FetchLimits
from preprocess.errors import MediaForbidden, MediaInvalid, MediaTooLarge, MediaUnreachable, unavailable

_WHITESPACE: Final = b" \t\r\n\f\v"
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_PIECE_DIGITS: Final = 1 << 17
"""Four digits are three bytes: a multiple of four."""
_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The content of a data: URL.

    Base64 may be percent-encoded, broken by whitespace, in the URL-safe alphabet, with padding missing or too long. The
    word `base64` may stand anywhere before the comma, and alone. Any other character is an error: a payload that lost
    its `+` to a space somewhere must not become a slightly different picture. Raises MediaInvalid or MediaTooLarge.
    """
    comma = url.find(",")
    if comma < 0:
        raise MediaInvalid("the data: URL has no comma between its type and its content")
    is_base64 = "base64" in (word.strip().lower() for word in url[len("data:") : comma].split(";"))
    payload = url[comma + 1 :]
    # Worst case before decoding: base64 shrinks by a quarter, percent-encoding by two thirds.
    if len(payload) // 3 > max_bytes:
        raise MediaTooLarge(f"the data: URL has {len(payload)} characters, allowed are {max_bytes} bytes of content")
    try:
        raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii" if is_base64 else "utf-8")
    except UnicodeEncodeError as error:
        kind = "base64" if is_base64 else "text"
        raise MediaInvalid(f"the data: URL has a character that is not {kind} at {error.start}") from error
    content = _decode_base64(raw) if is_base64 else raw
    if len(content) > max_bytes:
        raise MediaTooLarge(f"the data: URL holds {len(content)} bytes, allowed are {max_bytes}")
    return content


def _decode_base64(raw: bytes) -> bytes:
    try:
        # Nearly every payload is plain, and this is several times faster than looking for what is not.
        return _decode_plain_base64(raw)
    except binascii.Error:
        pass
    padded = raw.translate(_URL_SAFE, delete=_WHITESPACE)
    digits = padded.rstrip(b"=")
    foreign = digits.translate(None, delete=_ALPHABET)
    if foreign:
        raise MediaInvalid(f"the data: URL holds {foreign[:1]!r}, which is not base64")
    if b" " in raw.strip() and len(padded) % 4:
        raise MediaInvalid(
            "the data: URL has spaces within its base64 and digits missing; a + arrives as a space unless it is sent "
            "as %2B"
        )
    if len(digits) % 4 == 1:
        raise MediaInvalid(f"the data: URL has {len(digits)} base64 digits; no content encodes to that many")
    return binascii.a2b_base64(digits + b"=" * (-len(digits) % 4))


def _decode_plain_base64(raw: bytes) -> bytes:
    """Raises binascii.Error for anything but digits and the right padding.

    In pieces: the interpreter's lock is held for each, and a picture of a few megabytes would hold up every other
    thread for tens of milliseconds.
    """
    padding = raw.find(b"=")
    if 0 <= padding < len(raw) - 2:
        raise binascii.Error("padding within the digits")
    view = memoryview(raw)
    pieces = (view[start : start + _PIECE_DIGITS] for start in range(0, len(raw), _PIECE_DIGITS))
    return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)


def read_file_url(url: str, limits: FetchLimits) -> bytes:
    """The content of a file: URL, which must lie under one of `limits.media_roots` with all links resolved.

    Raises MediaForbidden, MediaUnreachable, MediaTooLarge, MediaInvalid, or DecoderUnavailable where descriptors are
    short here. Whether a path outside the roots exists is not told.
    """
    if not limits.media_roots:
        raise MediaForbidden("file: URLs are off; the server was started without a media root")
    real = Path(os.path.realpath(_path_of(url)))
    for root in limits.media_roots:
        real_root = Path(os.path.realpath(root))
        if real.is_relative_to(real_root):
            return _read_beneath(real_root, real.relative_to(real_root), limits.max_bytes)
    raise MediaForbidden("the file: URL leads outside the media roots")


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        raise MediaForbidden(f"file: URLs name no host, this one names {parts.netloc}")
    if parts.query or parts.fragment:
        raise MediaInvalid("the file: URL has a query or a fragment; write ? as %3F and # as %23")
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if "\0" in path:
        raise MediaInvalid("the file: URL has a zero byte in its path")
    if not path.startswith("/"):
        raise MediaInvalid("the file: URL has no absolute path")
    return path


def _read_beneath(root: Path, relative: Path, max_bytes: int) -> bytes:
    """Walks down from the root without following links: what was resolved a moment ago may have changed since."""
    try:
        with _descend(root, relative) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MediaForbidden(f"{relative.name or root.name} is not a regular file")
            if status.st_size > max_bytes:
                raise MediaTooLarge(f"{relative.name} has {status.st_size} bytes, allowed are {max_bytes}")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                content = file.read(max_bytes + 1)
    except OSError as error:
        shortage = unavailable(error)
        if shortage is not None:
            raise shortage from error
        raise MediaUnreachable(f"{relative.name} cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise MediaTooLarge(f"{relative.name} has over {max_bytes} bytes, which is the limit")
    return content


@contextmanager
def _descend(root: Path, relative: Path) -> Iterator[int]:
    # O_NONBLOCK: opening a named pipe must not wait for a writer.
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in relative.parts:
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)
