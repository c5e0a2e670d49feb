"""TLS of the HTTP side: the certificate and its key from files, read again when they change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)


class TlsUnusable(ValueError):
    """Files that are no certificate and key, or not of each other."""


class Tls:
    """A server's context. New connections get the newest certificate; those that stand keep theirs."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """PEM files; `certificate` may hold its chain. Raises TlsUnusable."""
        self._files = certificate, key
        self._stamp = self._now()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(self.context)

    def renew(self) -> None:
        """Read the files again if they have changed. What does not fit together (yet) is told, and nothing changes."""
        stamp = self._now()
        if stamp == self._stamp:
            return
        try:
            # A file at a time may have been replaced: a context that is thrown away tries them first.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except TlsUnusable as error:
            logger.error("the certificate stays as it is: %s", error)
        else:
            logger.info("the certificate was read again from %s", self._files[0])
        self._stamp = stamp

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            # A key with a passphrase would ask for it on the terminal.
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        except ValueError:
            raise TlsUnusable(
                f"gateway.tls_key is {str(key)!r}, which is encrypted; allowed: a key without a passphrase"
            ) from None
        except OSError as error:
            reason = error.strerror or "no certificate and key in PEM that belong together"
            raise TlsUnusable(
                f"gateway.tls_certificate is {str(certificate)!r} and gateway.tls_key {str(key)!r}: {reason}"
            ) from None

    def _now(self) -> tuple[int | None, ...]:
        stamps: list[int | None] = []
        for file in self._files:
            try:
                stamps.append(file.stat().st_mtime_ns)
            except OSError:
                stamps.append(None)
        return tuple(stamps)


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
