"""Values of a request in what is said of it, short whatever their size."""

import json
from typing import Final

_SHOWN_CHARS: Final = 80


def shown(value: object) -> str:
    """A JSON value for people, short whatever its size."""
    match value:
        case str():
            text = json.dumps(value[:_SHOWN_CHARS], ensure_ascii=False)
            return text + ("..." if len(value) > _SHOWN_CHARS else "")
        case list():
            return f"an array with {len(value)} item{'s'[: len(value) != 1]}" if value else "[]"
        case dict():
            return f"an object with {len(value)} field{'s'[: len(value) != 1]}" if value else "{}"
        case int() if value.bit_length() > 4 * _SHOWN_CHARS:
            return "a number too large to show"
        case _:
            return json.dumps(value)


def cut(text: str, max_chars: int) -> str:
    """The text, or its beginning."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."
