"""The checkpoint's own chat template, rendered in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from epd.errors import InvalidRequest


class _Refused(Exception):
    """The template called `raise_exception`."""


class ChatTemplate:
    """Thread-safe. `variables` are the names the template reads; what it does not read it cannot honour."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are bos_token, eos_token and the like. Raises ValueError when `source` is no template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """chat_template.jinja, else `chat_template` of tokenizer_config.json. Raises ValueError when there is none."""
        config_path = model_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        template_path = model_dir / "chat_template.jinja"
        source = template_path.read_text(encoding="utf-8") if template_path.exists() else config.get("chat_template")
        if not isinstance(source, str):
            raise ValueError(
                f"{model_dir.name} has neither chat_template.jinja nor a chat_template in its tokenizer config"
            )
        tokens = {name: _spelling(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, {name: text for name, text in tokens.items() if text is not None})

    @property
    def renders_tools(self) -> bool:
        return "tools" in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt's text, up to where the model starts to write. Raises InvalidRequest."""
        for name in options:
            if name not in self.variables:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: this model's chat template has no such option",
                    param=f"chat_template_kwargs.{name}",
                )
        given = {**self._special_tokens, "messages": messages, "tools": tools or None, **options}
        try:
            return self._template.render(given, add_generation_prompt=True)
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except (jinja2.TemplateError, TypeError) as error:
            # A template meets shapes its author did not think of with either of the two.
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


def _spelling(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with `content`, or null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML; templates are written for this one.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
