"""Everything that can be wrong with one medium. Each error carries the HTTP status and code an API edge should answer.

    MediaError
    |- MediaInvalid        400  the URL or an option makes no sense
    |- MediaForbidden      400  address, scheme or root rules refuse the source
    |- MediaUnreachable    400  no bytes came (504 when the reason was the deadline)
    |- MediaTooLarge       413  bytes, pixels, frames or seconds over a limit
    |- MediaUnsupported    415  recognised, but a kind this pipeline does not decode
    |- MediaUndecodable    422  not recognised, truncated, damaged, empty
    |  `- DecoderCrashed   422  the worker process that decoded it died or failed in a way nobody foresaw
    |- MediaDecodeTimeout  504  decoding ran past its deadline
    `- DecoderUnavailable  503  this side lacks a process, memory or descriptors; says nothing about the medium

    OptionInvalid, a ValueError: an option that is wrong for any medium, found before there is one
    BackendUnavailable, a ValueError: a setting asks for a library that does not work here

Messages say what was found and what was allowed, and what the sender can do about it. What only the operator could
change is said by `hint`, for a log. Naming the request's part is the caller's business.
"""

from __future__ import annotations

import errno
from typing import Final

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS})


class MediaError(Exception):
    """Base of all of them.

    Attributes: `message` for the client, `status` an HTTP status, `code` a snake_case word that does not change, `hint`
    what the operator could change, for a log, empty where nothing.
    """

    status: int = 400
    code: str = "media_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class MediaInvalid(MediaError):
    """The source or its options are malformed or contradict each other. `field` names the option at fault, if any."""

    status = 400
    code = "media_invalid"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class OptionInvalid(ValueError):
    """A media option that makes no sense whatever the medium and the model. `field` names it.

    A ValueError, so that decoding a message reports it as a fault of the message.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class BackendUnavailable(ValueError):
    """A video backend that the settings ask for does not work here. Says why, and what to install."""


class MediaForbidden(MediaError):
    """The source is refused by policy: scheme, address range, port, or a path outside the configured roots."""

    status = 400
    code = "media_forbidden"


class MediaUnreachable(MediaError):
    """The bytes could not be fetched. `timed_out` turns the status into 504."""

    status = 400
    code = "media_unreachable"

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        if timed_out:
            self.status = 504
            self.code = "media_timeout"


class MediaTooLarge(MediaError):
    """A limit on bytes, pixels, frames or seconds was exceeded."""

    status = 413
    code = "media_too_large"


class MediaUnsupported(MediaError):
    """The content was recognised and is a kind that is not decoded here (SVG, PDF, HTML, an absent codec)."""

    status = 415
    code = "media_unsupported"


class MediaUndecodable(MediaError):
    """The content is empty, damaged, truncated, or not media at all."""

    status = 422
    code = "media_undecodable"


class MediaDecodeTimeout(MediaError):
    """Decoding did not end before its deadline."""

    status = 504
    code = "media_decode_timeout"


class DecoderCrashed(MediaUndecodable):
    """The isolated decoder died on this content, or raised what none of its callers expects: a fault of the decoder.

    `reason` says for a log how: a signal's name, an exit status, or a traceback. It is not for the client.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class DecoderUnavailable(MediaError):
    """Worker processes cannot be started, or memory or descriptors are short. Another attempt may succeed."""

    status = 503
    code = "decoder_unavailable"


def unavailable(error: OSError) -> DecoderUnavailable | None:
    """What to raise in place of a system's refusal that no medium is to blame for; None for any other."""
    if error.errno not in _SHORTAGES:
        return None
    what = "open files" if error.errno in (errno.EMFILE, errno.ENFILE) else "memory"
    return DecoderUnavailable(f"the server is short of {what} at present", hint=f"{error}; see ulimit -a")
