"""Any error a request can meet, as an HTTP status and an OpenAI error object. The only place where the two meet."""

import json
import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder.errors import EncoderError
from epd.errors import ServeError
from preprocess.errors import MediaError

logger = logging.getLogger(__name__)

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What the client is told."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After is whole seconds; a busy server always gives one. A 401 says how keys are sent (RFC 9110)."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        retry_after_s = self.retry_after_s
        if retry_after_s is None and self.status in (429, 503):
            retry_after_s = 1.0
        return {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}

    def json_bytes(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False).encode()


def problem_of(error: ServeError | MediaError | EncoderError, *, param: str | None = None) -> Problem:
    """`param` names the part of the request for errors that do not know it."""
    match error:
        case ServeError():
            return Problem(error.status, error.code, error.message, error.param or param, error.retry_after_s)
        case MediaError():
            text = error.message if param is None else f"{param}: {error.message}"
            return Problem(error.status, error.code, text, param)
        case EncoderError():
            return Problem(error.status, error.code, error.message, param, error.retry_after_s)


def internal_problem(request_id: str) -> Problem:
    """For an error nobody foresaw: the log has it, the client gets the id to ask about."""
    return Problem(500, "internal_error", f"internal error; the server's log has it under request {request_id}")


def new_request_id() -> str:
    """For a request whose client gave it none that can be used."""
    return f"req-{uuid.uuid4().hex}"


class Refused(ServeError):
    """A problem that was known whole: a media part's fault, or a worker's own words in its `Finish`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message, param=problem.param, retry_after_s=problem.retry_after_s)
        self.status = problem.status
        self.code = problem.code
