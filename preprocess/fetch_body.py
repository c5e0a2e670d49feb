"""The body of an answer, collected under a byte cap, inflated on the way where the server compressed it."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from preprocess.errors import MediaTooLarge, MediaUnreachable, MediaUnsupported

# Encodings that change nothing; aws-chunked is what object stores leave behind after having undone it.
_PLAIN: Final = frozenset({"", "identity", "none", "binary", "aws-chunked"})
_COMPRESSED: Final = frozenset({"gzip", "x-gzip", "deflate"})
# Between two pieces of this size other requests get the event loop: a few bytes may inflate to the whole cap.
_PIECE_BYTES: Final = 1 << 20
_GZIP_MAGIC: Final = 0x1F
_GZIP: Final = zlib.MAX_WBITS | 16
_ZLIB: Final = zlib.MAX_WBITS
_RAW: Final = -zlib.MAX_WBITS


class Body:
    """Content as it was sent."""

    def __init__(self, *, host: str, max_bytes: int) -> None:
        self._host = host
        self._max_bytes = max_bytes
        self._num_received = 0
        self._content = bytearray()

    async def feed(self, chunk: bytes) -> None:
        """Raises MediaTooLarge once there is more than the cap, MediaUnreachable for what does not inflate."""
        self._count(chunk)
        self._content += chunk

    def finish(self) -> bytes:
        """Everything. Raises MediaUnreachable when the end is missing."""
        return bytes(self._content)

    def _count(self, chunk: bytes) -> None:
        self._num_received += len(chunk)
        if self._num_received > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> MediaTooLarge:
        return MediaTooLarge(f"{self._host} sends over {self._max_bytes} bytes, which is the limit")


class InflatingBody(Body):
    """gzip (one member after another), zlib, or the bare deflate that some servers send under that name.

    Both what comes and what it inflates to are counted. What follows the compressed content is ignored, as browsers
    do: the content's own checksum has been verified by then.
    """

    def __init__(self, *, host: str, max_bytes: int) -> None:
        super().__init__(host=host, max_bytes=max_bytes)
        self._inflate: zlib._Decompress | None = None
        self._form: int | None = None
        self._is_over = False

    async def feed(self, chunk: bytes) -> None:
        self._count(chunk)
        piece = b""
        # A full piece means that the decompressor may hold more without needing another byte.
        while (chunk or len(piece) == _PIECE_BYTES) and not self._is_over:
            if self._inflate is None and not self._open(chunk):
                return
            piece, chunk = self._step(chunk)
            self._content += piece
            if len(self._content) > self._max_bytes:
                raise self._too_large()
            if len(piece) == _PIECE_BYTES:
                await asyncio.sleep(0)

    def finish(self) -> bytes:
        if self._inflate is not None or self._form is None:
            raise MediaUnreachable(f"{self._host} ended its compressed content early")
        return super().finish()

    def _open(self, chunk: bytes) -> bool:
        """Ready for the content that starts here; False when what starts here is none."""
        if self._form is None:
            # zlib's header names method 8 in the low half of its first byte.
            self._form = _GZIP if chunk[0] == _GZIP_MAGIC else _ZLIB if chunk[0] & 15 == 8 else _RAW
        elif self._form != _GZIP or chunk[0] != _GZIP_MAGIC:
            self._is_over = True
            return False
        self._inflate = zlib.decompressobj(self._form)
        return True

    def _step(self, chunk: bytes) -> tuple[bytes, bytes]:
        """At most one piece, and what of the chunk is left."""
        inflate = self._inflate
        assert inflate is not None
        try:
            piece = inflate.decompress(chunk, _PIECE_BYTES)
        except zlib.error as error:
            raise MediaUnreachable(f"{self._host} sends compressed content that does not inflate") from error
        if not inflate.eof:
            return piece, inflate.unconsumed_tail
        self._inflate = None
        return piece, inflate.unused_data


def open_body(encoding: str, *, host: str, max_bytes: int) -> Body:
    """What collects the content of an answer with this Content-Encoding. Raises MediaUnsupported for other ones."""
    names = {name.strip().lower() for name in encoding.split(",")} - _PLAIN
    if not names:
        return Body(host=host, max_bytes=max_bytes)
    if len(names) == 1 and names <= _COMPRESSED and encoding.count(",") == 0:
        return InflatingBody(host=host, max_bytes=max_bytes)
    raise MediaUnsupported(f"{host} sends content encoded as {encoding[:40]!r} although none was asked for")
