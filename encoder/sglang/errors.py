"""What a call in this dialect can end with, and which HTTP status tells it.

Statuses are members of `http.HTTPStatus` without exception: the other side turns them into that enumeration on its
scheduler's loop, where any other number would end the process.
"""

from http import HTTPStatus
from typing import Final

from encoder.errors import EncoderError
from encoder.quoting import cut
from preprocess.errors import MediaError

_MAX_MESSAGE_CHARS: Final = 2000
_KNOWN: Final = frozenset(int(status) for status in HTTPStatus)


class DialectError(Exception):
    """A call that fails. `status` is a member of `http.HTTPStatus`, `message` goes to the client's user."""

    status = int(HTTPStatus.INTERNAL_SERVER_ERROR)

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = cut(message, _MAX_MESSAGE_CHARS)
        self.retry_after_s = retry_after_s
        if status is not None:
            self.status = known_status(status)


class BadRequest(DialectError):
    """The call itself makes no sense."""

    status = int(HTTPStatus.BAD_REQUEST)


class NotObject(DialectError):
    """The body is not a JSON object."""

    status = int(HTTPStatus.UNPROCESSABLE_ENTITY)


class BodyTooLarge(DialectError):
    """The body is above the limit."""

    status = int(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class BodyTooSlow(DialectError):
    """The body stopped coming, or comes too slowly."""

    status = int(HTTPStatus.REQUEST_TIMEOUT)


class DuplicatePart(DialectError):
    """A part with this id is being encoded."""

    status = int(HTTPStatus.CONFLICT)


class Overloaded(DialectError):
    """A limit on calls at a time is reached."""

    status = int(HTTPStatus.SERVICE_UNAVAILABLE)


class TimedOut(DialectError):
    """The other half of a transfer did not come in time."""

    status = int(HTTPStatus.GATEWAY_TIMEOUT)


class ReceiverUnreachable(DialectError):
    """A receiver took no connection, or stopped reading."""

    status = int(HTTPStatus.GATEWAY_TIMEOUT)


class CallerGone(DialectError):
    """The call of a part was broken off. What others use 499 for, which is not in the enumeration."""

    status = int(HTTPStatus.BAD_REQUEST)


class NotServed(DialectError):
    """A part of the protocol that this encoder does not speak."""

    status = int(HTTPStatus.NOT_IMPLEMENTED)


class HeaderRefused(Exception):
    """Frame 0 is not a header of this protocol. The message says why."""


def known_status(status: int) -> int:
    """The status itself if Python knows it, else the plain one of its class."""
    if status in _KNOWN:
        return status
    return int(HTTPStatus.BAD_REQUEST) if 400 <= status < 500 else int(HTTPStatus.INTERNAL_SERVER_ERROR)


def dialect_error(error: MediaError | EncoderError | DialectError, *, place: str | None = None) -> DialectError:
    """Any foreseen error in the dialect's terms. A fault of the medium is a bad request here, whatever its kind.

    `place` is where the medium stands in the call; errors of the encoder are not of one medium.
    """
    match error:
        case DialectError():
            return error
        case MediaError():
            is_faulty = 400 <= error.status < 500
            message = error.message if place is None else f"{place}: {error.message}"
            return DialectError(message, status=int(HTTPStatus.BAD_REQUEST) if is_faulty else error.status)
        case EncoderError():
            return DialectError(error.message, status=error.status, retry_after_s=error.retry_after_s)
