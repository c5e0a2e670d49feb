"""Requests to show in the document: each works as it stands, whatever is served."""

from collections.abc import Mapping
from typing import Any

# A red square on white, 32 x 32.
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgAQMAAABJtOi3AAAABlBMVEX////cHh7/Hx2WAAAAF0lEQVR42mNgIBb8/"
    "8/AxMDAQCWCWAAA9BUCHTVYa/EAAAAASUVORK5CYII="
)

CHAT: Mapping[str, Mapping[str, Any]] = {
    "text": {
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 16,
        "temperature": 0.5,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "picture": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": PICTURE}},
                    {"type": "text", "text": "What is shown?"},
                ],
            }
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 16,
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use the tools."},
            {"role": "user", "content": "How warm is it in Paris?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "warmth", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "warmth",
                    "description": "The temperature in a city",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                        "required": ["city"],
                    },
                },
            }
        ],
        "tool_choice": "auto",
        "max_tokens": 16,
    },
}

COMPLETION: Mapping[str, Mapping[str, Any]] = {
    "text": {"prompt": "Once upon a time", "max_tokens": 8, "n": 2, "seed": 7, "logprobs": 2, "stop": ["."]},
    "tokens": {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 4, "echo": True, "stream": True},
}

TOKENIZE: Mapping[str, Mapping[str, Any]] = {
    "text": {"prompt": "How many tokens?", "return_token_strs": True},
    "conversation": {"messages": [{"role": "user", "content": "How many tokens?"}]},
}

DETOKENIZE: Mapping[str, Mapping[str, Any]] = {"tokens": {"tokens": [1, 2, 3]}}

ENCODE: Mapping[str, Mapping[str, Any]] = {
    "picture": {"input": [{"type": "image_url", "image_url": {"url": PICTURE}}], "encoding_format": "base64"},
}
