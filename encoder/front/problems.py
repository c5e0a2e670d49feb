"""Any error a request can meet, as an HTTP status and an OpenAI error object."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from encoder.errors import EncoderError
from encoder.quoting import cut
from preprocess.errors import MediaError

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Whatever is quoted from a request, and however often.
_MAX_MESSAGE_CHARS: Final = 2000
_MAX_PARAM_CHARS: Final = 200


class Refused(Exception):
    """A request that is answered with an error, known whole: `param` names the field or part at fault."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, code, message, param, retry_after_s)


def invalid(message: str, param: str | None = None) -> Refused:
    """400: a field, its value and what is allowed."""
    return Refused(400, "invalid_request", message, param=param)


@dataclass(frozen=True, slots=True)
class Problem:
    """What the client is told."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        message, param = cut(self.message, _MAX_MESSAGE_CHARS), self.param and cut(self.param, _MAX_PARAM_CHARS)
        return {"message": message, "type": kind, "param": param, "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After is whole seconds; a busy server always gives one."""
        retry_after_s = self.retry_after_s
        if retry_after_s is None and self.status in (429, 503):
            retry_after_s = 1.0
        return {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}

    def json_bytes(self, **more: Any) -> bytes:
        return json.dumps({"error": self.error, **more}, ensure_ascii=False).encode()


def problem_of(error: MediaError | EncoderError, *, param: str | None = None, option: str | None = None) -> Problem:
    """`param` names the part of the request. `option` is what its medium's error is about: that is a fault of the
    request, whichever side of the limits the value is on."""
    match error:
        case MediaError():
            text = error.message if param is None else placed(error.message, option, param)
            return Problem(error.status, "invalid_request" if option else error.code, text, param)
        case EncoderError():
            return Problem(error.status, error.code, error.message, param, error.retry_after_s)


def placed(message: str, field: str | None, place: str) -> str:
    """A message, with its place in the request. Where it begins with a field's bare name, the place says it in full."""
    if field is not None and message.startswith(f"{field} "):
        return place + message[len(field) :]
    return f"{place}: {message}"


def internal_problem(request_id: str, *, param: str | None = None) -> Problem:
    """For an error nobody foresaw: the log has it, the client gets the id to ask about."""
    message = f"internal error; the server's log has it under request {request_id}"
    return Problem(500, "internal_error", message, param)
