"""What all shapes of untrusted bodies have in common. Unknown fields are errors at every level."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

TAG = "~"
"""Begins the elements that pydantic adds to a location for a union; they name no field of the body."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""What travels to other processes must fit their integers; whether it makes sense is judged with the medium."""


EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]
"""What another server would read and this one does not: nothing in it changes nothing."""


class Conflict(ValueError):
    """Two fields do not go together; `param` is the one to change."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _exact(schema: Any) -> Any:
    """A core schema in which literal booleans and numbers take values of their own kind only."""
    if isinstance(schema, list | tuple):
        return type(schema)(_exact(item) for item in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "function-before" and isinstance(schema["function"]["function"], _SameKind):
        return schema
    if kind != "literal":
        return {key: value if key == "metadata" else _exact(value) for key, value in schema.items()}
    if all(isinstance(value, str) for value in schema["expected"]):
        return schema
    return core_schema.no_info_before_validator_function(_SameKind(schema["expected"]), schema)


class _SameKind:
    """Refuses booleans where none is expected, and all else where nothing but booleans are."""

    def __init__(self, expected: Sequence[object]) -> None:
        self._expected = " or ".join(repr(value) for value in expected)
        self._takes_booleans = any(isinstance(value, bool) for value in expected)
        self._takes_others = not all(isinstance(value, bool) for value in expected)

    def __call__(self, value: object) -> object:
        if not (self._takes_booleans if isinstance(value, bool) else self._takes_others):
            raise PydanticKnownError("literal_error", {"expected": self._expected})
        return value


class Shape(BaseModel):
    """Base of every shape. Where only one value is allowed, what Python calls equal to it is not: false is no 0."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _exact(handler(source))
        return schema


def content_kind(value: object) -> str:
    """Tells a text from a list, for unions of the two."""
    return f"{TAG}parts" if isinstance(value, list | tuple) else f"{TAG}text"
