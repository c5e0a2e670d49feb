"""The checkpoint's own chat template, rendered the way Transformers does: same sandbox, filters, functions and tags.

A template comes with its checkpoint. It can reach nothing but the messages, and a render has a budget (see
`epd.gateway.sandbox`); a template that fails, refuses or runs away is an error of the request, never of the process.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta

from epd.errors import InvalidRequest
from epd.gateway.sandbox import Budget, RanAway, Sandbox

# What a template can meet in shapes its author did not think of, beside jinja's own errors.
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)


class _Refused(Exception):
    """The template called `raise_exception`."""


class ChatTemplate:
    """Thread-safe. What the template does not read it cannot honour: see `reads`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_use: str | None = None) -> None:
        """`special_tokens` are bos_token, eos_token and the like; `tool_use` is the template of conversations with
        tools, where the checkpoint has one apart. Raises ValueError when a source is no template."""
        self._default = _Compiled(source)
        self._tool_use = self._default if tool_use is None else _Compiled(tool_use)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """From chat_template.jinja (and additional_chat_templates/), else chat_template.json, else the tokenizer's
        configuration. Raises ValueError when there is none, or none that is the default."""
        config = _read_json(model_dir / "tokenizer_config.json")
        sources = _sources(model_dir, config)
        if "default" not in sources:
            found = f"only templates named {', '.join(map(repr, sources))}" if sources else "no chat template"
            raise ValueError(
                f"{model_dir.name} has {found}; looked for a default in chat_template.jinja, chat_template.json and "
                "chat_template of tokenizer_config.json"
            )
        tokens = {name: _spelling(value) for name, value in config.items() if name.endswith("_token")}
        special_tokens = {name: text for name, text in tokens.items() if text is not None}
        return cls(sources["default"], special_tokens, tool_use=sources.get("tool_use"))

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def renders_tools(self) -> bool:
        return self.reads("tools", with_tools=True)

    def reads(self, variable: str, *, with_tools: bool) -> bool:
        return variable in self._compiled(with_tools).variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt's text, up to where the model starts to write. Raises InvalidRequest."""
        for name in options:
            if not self.reads(name, with_tools=bool(tools)):
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: this model's chat template has no such option",
                    param=f"chat_template_kwargs.{name}",
                )
        given = {**self._special_tokens, "messages": messages, "tools": tools or None, "documents": None, **options}
        try:
            return self._compiled(bool(tools)).render({**given, "add_generation_prompt": True})
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except (jinja2.TemplateError, RanAway, *_FAILURES) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {_reason(error)}", param="messages"
            ) from error

    def _compiled(self, with_tools: bool) -> "_Compiled":
        return self._tool_use if with_tools else self._default


class _Compiled:
    """One template. `variables` are the names it reads."""

    def __init__(self, source: str) -> None:
        sandbox = Sandbox()
        sandbox.globals["raise_exception"] = _refuse
        sandbox.globals["strftime_now"] = _strftime_now
        try:
            self._template, tree = sandbox.compile_counted(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:
            raise ValueError(f"chat template: nested too deeply ({error})") from error
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))

    def render(self, given: Mapping[str, Any]) -> str:
        return self._template.render({**given, **Budget().variables()})


def _sources(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's templates by name, from the first place that has any."""
    if (path := model_dir / "chat_template.jinja").exists():
        others = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
        named = {other.stem: other for other in others} | {"default": path}
        return {name: file.read_text(encoding="utf-8") for name, file in named.items()}
    declared = _read_json(model_dir / "chat_template.json").get("chat_template")
    return _named(tokenizer_config.get("chat_template") if declared is None else declared)


def _named(declared: object) -> dict[str, str]:
    """One template, or a list of them with names."""
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    entries = declared if isinstance(declared, list) else [declared]
    names = [(entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else None for entry in entries]
    sources = {name: text for name, text in filter(None, names) if isinstance(name, str) and isinstance(text, str)}
    if len(sources) != len(entries):
        raise ValueError("chat_template is neither a template nor a list of objects with name and template")
    return sources


def _read_json(path: Path) -> Mapping[str, Any]:
    """Empty when there is no such file."""
    content = json.loads(path.read_text(encoding="utf-8-sig")) if path.exists() else {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def _spelling(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with `content`, or null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _reason(error: Exception) -> str:
    # Some say nothing: MemoryError().
    return str(error) or type(error).__name__


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
