"""A request's fields about the look of its answer as one `Wish`, and what of them contradicts itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epd.errors import InvalidRequest
from epd.gateway.grammar import Calls, Form, Function, GrammarMaker, Wish
from epd.gateway.json_text import json_fault
from epd.gateway.render import MediaSlot, Prompt
from epd.gateway.schema import ChatBody
from epd.gateway.schema_sampling import GenerationBody
from epd.gateway.schema_tools import ToolChoice

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def wish_of_chat(body: ChatBody, prompt: Prompt, grammars: GrammarMaker) -> Wish:
    """Raises InvalidRequest. Not for an event loop."""
    form, calls = form_of(body), calls_of(body)
    if form is not None and calls is not None and calls.must_call:
        raise InvalidRequest(
            f"{form.param} is given, and tool_choice asks for calls and nothing else; give one", param="tool_choice"
        )
    wish = Wish(form, calls)
    if wish.is_free:
        return wish
    last = prompt.pieces[-1] if prompt.pieces else ()
    tail = () if isinstance(last, MediaSlot) else last
    return Wish(form, calls, grammars.reasoning_of(tail, opens=prompt.opens_reasoning))


def form_of(body: GenerationBody) -> Form | None:
    """Raises InvalidRequest where several fields say what the text is to be."""
    forms = [*_of_response_format(body), *_of_structured_outputs(body), *_of_guided(body)]
    if len(forms) > 1:
        raise InvalidRequest(f"{forms[0].param} and {forms[1].param} are given; give one", param=forms[1].param)
    return forms[0] if forms else None


def calls_of(body: ChatBody) -> Calls | None:
    """None where nothing may be called. Raises InvalidRequest for a choice among tools that are not there."""
    choice, tools = body.tool_choice, body.tools or []
    names: dict[str, int] = {}
    for i, tool in enumerate(tools):
        first = names.setdefault(tool.function.name, i)
        if first != i:
            param = f"tools[{i}].function.name"
            raise InvalidRequest(
                f'{param} is "{tool.function.name}", which is the name of tools[{first}], too; give each its own',
                param=param,
            )
    if choice == "none":
        return None
    functions = tuple(
        Function(
            name=tool.function.name,
            parameters=tool.function.parameters or {},
            param=f"tools[{i}].function.parameters",
            is_strict=bool(tool.function.strict),
        )
        for i, tool in enumerate(tools)
    )
    if not functions:
        if choice in (None, "auto"):
            return None
        raise InvalidRequest("tool_choice is given; it needs tools to choose from", param="tool_choice")
    at_most_one = body.parallel_tool_calls is False
    if not isinstance(choice, ToolChoice):
        return Calls(functions, must_call=choice == "required", at_most_one=at_most_one)
    if choice.function is not None:
        named = _among(functions, [choice.function.name], ["tool_choice.function.name"])
        return Calls(named, must_call=True, at_most_one=True)
    assert choice.allowed_tools is not None, "a choice is of one kind"
    chosen = [tool.function.name for tool in choice.allowed_tools.tools]
    params = [f"tool_choice.allowed_tools.tools[{i}].function.name" for i in range(len(chosen))]
    allowed = _among(functions, chosen, params)
    return Calls(
        allowed,
        must_call=choice.allowed_tools.mode == "required",
        at_most_one=at_most_one,
        is_limited=len(allowed) < len(functions),
    )


def _among(functions: Sequence[Function], names: Sequence[str], params: Sequence[str]) -> tuple[Function, ...]:
    declared = {function.name: function for function in functions}
    for name, param in zip(names, params, strict=True):
        if name not in declared:
            listed = ", ".join(list(declared)[:20])
            raise InvalidRequest(f'{param} is "{name}", which is not among the tools: {listed}', param=param)
    return tuple(declared[name] for name in dict.fromkeys(names))


def _of_response_format(body: GenerationBody) -> list[Form]:
    wanted = body.response_format if isinstance(body, ChatBody) else None
    if wanted is None or wanted.type == "text":
        return []
    if wanted.json_schema is None:
        return [Form("json", _ANY_OBJECT, "response_format")]
    schema = wanted.json_schema.schema_
    value = _ANY_OBJECT if schema is None else schema
    return [Form("json", value, "response_format.json_schema.schema", is_lenient=wanted.json_schema.strict is False)]


def _of_structured_outputs(body: GenerationBody) -> list[Form]:
    wanted, name = body.structured_outputs, "structured_outputs"
    if wanted is None:
        return []
    forms = _forms(name + ".", json=wanted.json_, regex=wanted.regex, choice=wanted.choice, grammar=wanted.grammar)
    if wanted.json_object:
        forms.append(Form("json", _ANY_OBJECT, f"{name}.json_object"))
    return forms


def _of_guided(body: GenerationBody) -> list[Form]:
    return _forms(
        "guided_",
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )


def _forms(
    prefix: str, *, json: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Form]:
    forms = []
    if json is not None:
        forms.append(Form("json", _read(json, f"{prefix}json"), f"{prefix}json"))
    if regex is not None:
        forms.append(Form("regex", regex, f"{prefix}regex"))
    if choice is not None:
        forms.append(Form("choice", tuple(choice), f"{prefix}choice"))
    if grammar is not None:
        forms.append(Form("grammar", grammar, f"{prefix}grammar"))
    return forms


def _read(schema: dict[str, Any] | str, param: str) -> object:
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is no JSON: {json_fault(schema, error)}", param=param) from error
