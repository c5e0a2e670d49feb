"""Errors of the pipeline that a client sees. Each knows its HTTP status and a code in snake_case."""


class ServeError(Exception):
    """Base: `param` names the request field or part at fault, when one is."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ServeError):
    status = 400
    code = "invalid_request"


class ContextTooLong(ServeError):
    """Prompt, or prompt plus `max_tokens`, beyond the model's context."""

    status = 400
    code = "context_length_exceeded"


class InvalidApiKey(ServeError):
    status = 401
    code = "invalid_api_key"


class ModelNotFound(ServeError):
    status = 404
    code = "model_not_found"


class BodyTooLarge(ServeError):
    status = 413
    code = "body_too_large"


class BodyTimeout(ServeError):
    """The client did not send its request in time."""

    status = 408
    code = "body_timeout"


class UnsupportedMediaType(ServeError):
    """The body is not declared as plain JSON."""

    status = 415
    code = "unsupported_media_type"


class DeadlineExceeded(ServeError):
    status = 504
    code = "deadline_exceeded"


class Overloaded(ServeError):
    """Refused at admission; `retry_after_s` says when to come back."""

    status = 503
    code = "overloaded"


class StageUnavailable(ServeError):
    """A stage is down and the retry was used up."""

    status = 503
    code = "stage_unavailable"


class ShuttingDown(ServeError):
    """The gateway stops: nothing new is taken, and what did not end in time is ended."""

    status = 503
    code = "shutting_down"


class UnknownMedia(ServeError):
    """A part names content by uuid or key, and nobody has it (any more). Sending the content helps."""

    status = 404
    code = "unknown_media"


class UnknownFile(ServeError):
    """No such file: it was never there, is another key's, was deleted, or has expired."""

    status = 404
    code = "file_not_found"


class FileTooLarge(ServeError):
    """One file is larger than is taken."""

    status = 413
    code = "file_too_large"


class FilesFull(ServeError):
    """The files of one API key would be more than it may keep."""

    status = 413
    code = "file_storage_full"


class TooManyRequests(ServeError):
    """Beyond what one client may ask; `retry_after_s` says when to come back. `limit` is what it may, and `reset_s` is
    when it may all of it again."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, limit: int, reset_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = {
            "X-RateLimit-Limit-Requests": str(limit),
            "X-RateLimit-Remaining-Requests": "0",
            "X-RateLimit-Reset-Requests": f"{reset_s:.3f}s",
        }


class ForeignPage(ServeError):
    """What a page of another site makes a browser send, which needs nobody's leave."""

    status = 403
    code = "foreign_page"
