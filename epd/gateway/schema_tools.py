"""The shapes of tools and of what an answer may look like."""

from typing import Annotated, Any, Literal

from pydantic import Field

from epd.gateway.shape import Shape


class FunctionDefinition(Shape):
    """`parameters` is a JSON schema and belongs to the client: it is passed on as it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Shape):
    type: Literal["function"]
    function: FunctionDefinition


class ResponseFormat(Shape):
    type: Literal["text"]
