"""What all shapes of untrusted bodies have in common. Unknown fields are errors at every level."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TAG = "~"
"""Begins the elements that pydantic adds to a location for a union; they name no field of the body."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""What travels to other processes must fit their integers; whether it makes sense is judged with the medium."""


class Conflict(ValueError):
    """Two fields do not go together; `param` is the one to change."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def content_kind(value: object) -> str:
    """Tells a text from a list, for unions of the two."""
    return f"{TAG}parts" if isinstance(value, list | tuple) else f"{TAG}text"
