"""Failures on the wire: an exception to the `EncodeFailure` that stands for it, and back to its class."""

from typing import Any

from encoder.errors import ArenaFull, EncoderError
from encoder.types import EncodeFailure
from preprocess.errors import MediaError


def failure_of(request_id: str, error: EncoderError | MediaError) -> EncodeFailure:
    """The reply that tells a request why it could not be served."""
    return EncodeFailure(
        request_id=request_id,
        code=error.code,
        message=error.message,
        status=error.status,
        retry_after_s=error.retry_after_s if isinstance(error, EncoderError) else None,
        needed_bytes=error.needed_bytes if isinstance(error, ArenaFull) else None,
    )


def error_of(failure: EncodeFailure) -> EncoderError | MediaError:
    """The exception a failure stands for, of the class that raised it on the encoder."""
    kind = _error_classes().get(failure.code, EncoderError)
    if kind is ArenaFull:
        return ArenaFull(failure.message, retry_after_s=failure.retry_after_s, needed_bytes=failure.needed_bytes)
    if issubclass(kind, EncoderError):
        return kind(failure.message, retry_after_s=failure.retry_after_s)
    return kind(failure.message)


def _error_classes() -> dict[str, type[EncoderError] | type[MediaError]]:
    kinds: list[type[Any]] = [EncoderError, MediaError]
    found: dict[str, type[Any]] = {}
    while kinds:
        kind = kinds.pop()
        found[kind.code] = kind
        kinds += kind.__subclasses__()
    return found
