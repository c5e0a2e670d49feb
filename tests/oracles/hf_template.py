"""How Transformers renders a chat template, written from its documented behaviour: the environment, the filters, the
functions and the variables that published templates are written for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def hf_render(
    model_dir: Path,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """The text of `apply_chat_template(messages, tools=..., add_generation_prompt=True, tokenize=False, **options)`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    template = environment.from_string((model_dir / "chat_template.jinja").read_text(encoding="utf-8"))
    config = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    return template.render(
        messages=messages, tools=tools, documents=None, add_generation_prompt=True, **tokens, **options
    )
