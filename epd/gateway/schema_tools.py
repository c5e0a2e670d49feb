"""The shapes of tools and of what an answer may look like. Whether a schema can be enforced is judged later, see
`epd.gateway.grammar`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.schema_parts import CacheControl
from epd.gateway.shape import TAG, Conflict, Shape

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_SchemaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
JsonSchema = dict[str, Any]


class FunctionDefinition(Shape):
    """`parameters` is a JSON schema and belongs to the client: it is passed on as it is. With `strict` a call of the
    function fits it, or is not made."""

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Shape):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = None
    """Taken, and without effect: prompts are always cached."""


class NamedFunction(Shape):
    name: FunctionName


class NamedTool(Shape):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Shape):
    """Some of the declared ones."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1)]


class ToolChoice(Shape):
    """One function that is called, or some that may be."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _says_which(self) -> "ToolChoice":
        _check_owner("tool_choice", self.type, {"function": self.function, "allowed_tools": self.allowed_tools})
        return self


def _choice_kind(value: object) -> str:
    return f"{TAG}choice" if isinstance(value, dict | ToolChoice) else f"{TAG}word"


ToolChoices = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(f"{TAG}word")] | Annotated[ToolChoice, Tag(f"{TAG}choice")],
    Discriminator(_choice_kind),
]


class SchemaFormat(Shape):
    """With `strict` false, what of the schema cannot be enforced is left out of account instead of refused."""

    name: _SchemaName
    description: str | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> "ResponseFormat":
        _check_owner("response_format", self.type, {"json_schema": self.json_schema})
        return self


def _schema_kind(value: object) -> str:
    return f"{TAG}text" if isinstance(value, str) else f"{TAG}schema"


SchemaOrText = Annotated[
    Annotated[str, Tag(f"{TAG}text")] | Annotated[JsonSchema, Tag(f"{TAG}schema")], Discriminator(_schema_kind)
]
"""A JSON schema, or the text of one."""
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(fail_fast=True, min_length=1, max_length=1024)
]


class StructuredOutputs(Shape):
    """vLLM's words for what a text is to be; one of them. `grammar` is Lark as llguidance reads it, or GBNF."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Choices | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: bool | None = None


def _check_owner(name: str, kind: str, fields: dict[str, object]) -> None:
    """Each field belongs to the type of its name. Raises Conflict."""
    for field, value in fields.items():
        if field == kind and value is None:
            raise Conflict(f"{name}.{field}", f'field {name}.{field} is required, since {name}.type is "{kind}"')
        if field != kind and value is not None:
            raise Conflict(f"{name}.{field}", f'{name}.{field} is given; {name}.type is "{kind}"')
