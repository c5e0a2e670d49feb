"""API keys: who may ask. Compared as SHA-256 digests, all of them for every request, each in constant time.

A key is a text of its own, or `sha256:` and its digest in 64 hex digits, so that settings need not hold the key itself.
A file has one a line; it is read again when it changes, so that keys come and go without a restart. One that holds no
key any more is believed at the second look.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


class KeysUnusable(ValueError):
    """A key or a file of keys that cannot be used; no key is in the message."""


class ApiKeys:
    """The keys of one gateway, from its settings and from a file."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        """Raises KeysUnusable."""
        self._fixed = _digests(keys, "gateway.api_keys")
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._found_none = False
        self._of_file: tuple[bytes, ...] = ()
        if file is not None:
            self._of_file = self._read(file)
            self._stamp = _stamp(file)

    @property
    def are_asked_for(self) -> bool:
        """Without any key everybody may ask. A file asks for keys also when it has none left."""
        return bool(self._fixed) or self._file is not None

    def accepts(self, candidate: bytes) -> bool:
        digest = hashlib.sha256(candidate).digest()
        matches = [hmac.compare_digest(digest, known) for known in (*self._fixed, *self._of_file)]
        return any(matches)

    def renew(self) -> None:
        """Read the file again if it has changed. What cannot be read is told, and the keys stay as they are."""
        if self._file is None or _stamp(self._file) == self._stamp:
            return
        stamp = _stamp(self._file)
        try:
            found = self._read(self._file, may_be_empty=True)
        except KeysUnusable as error:
            logger.error("API keys stay as they are: %s", error)
        else:
            if self._of_file and not found and not self._found_none:
                # A file that is written in place is empty for a moment.
                self._found_none = True
                logger.warning("API keys stay as they are until the next look: %s holds none", self._file)
                return
            self._of_file = found
            level = logging.INFO if found else logging.WARNING
            logger.log(level, "API keys were read again: %d in %s", len(found), self._file)
        self._found_none = False
        self._stamp = stamp

    def _read(self, file: Path, *, may_be_empty: bool = False) -> tuple[bytes, ...]:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise KeysUnusable(f"gateway.api_keys_file is {str(file)!r}, which cannot be read: {reason}") from None
        keys = _digests([line for line in lines if line and not line.startswith("#")], str(file))
        if not keys and not may_be_empty:
            raise KeysUnusable(f"gateway.api_keys_file is {str(file)!r}, which holds no key; allowed: one key a line")
        return keys


def _digests(keys: Iterable[str], where: str) -> tuple[bytes, ...]:
    digests = []
    for number, key in enumerate(keys, 1):
        given = _DIGEST.fullmatch(key)
        if key.lower().startswith("sha256:") and given is None:
            raise KeysUnusable(f"key {number} of {where} begins with sha256: and has not 64 hex digits after it")
        if not key.strip() or key != key.strip() or not key.isprintable():
            raise KeysUnusable(f"key {number} of {where} is empty, or has spaces around it or control characters in it")
        digests.append(bytes.fromhex(given[1]) if given else hashlib.sha256(key.encode()).digest())
    return tuple(digests)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Changes with the file; None while there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
