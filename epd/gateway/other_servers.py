"""What users of other servers (OpenAI's own, vLLM, SGLang, Ollama) look for here, and what it is called instead.

docs/api.md has the same for people.
"""

from collections.abc import Container, Mapping

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"

ROUTES: Mapping[str, str] = {
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/embeddings": "/v1/encode, which embeds media",
    "/v1/audio/transcriptions": f"{_CHAT} with an input_audio part",
    "/v1/audio/translations": f"{_CHAT} with an input_audio part",
    "/version": "/openapi.json",
    "/docs": "/openapi.json",
    "/redoc": "/openapi.json",
    "/ping": "/health",
    "/healthz": "/health",
    "/readyz": "/ready",
    "/health_generate": "/ready",
    "/load": "/metrics",
    "/get_server_info": "/v1/pipeline",
    "/server_info": "/v1/pipeline",
    "/get_model_info": "/v1/models",
    "/model_info": "/v1/models",
    "/generate": _TEXT,
    "/invocations": _CHAT,
    "/api/chat": _CHAT,
    "/api/generate": _TEXT,
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/api/version": "/openapi.json",
    "/api/embed": "/v1/encode, which embeds media",
    "/api/embeddings": "/v1/encode, which embeds media",
}

FIELDS: Mapping[str, str] = {
    "ebnf": "guided_grammar",
    "regex": "guided_regex",
    "json_schema": "guided_json",
    "structural_tag": "guided_grammar",
    "grammar": "guided_grammar",
    "format": "response_format",
    "thinking_token_budget": "reasoning_effort",
    "thinking": "reasoning_effort",
    "reasoning": "reasoning_effort",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "functions": "tools",
    "function_call": "tool_choice",
    "messages.function_call": "tool_calls",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "random_seed": "seed",
    "input": "messages",
    "instructions": "messages",
    "system": "messages",
}
"""Fields of a request, without the indices of arrays."""


def route_instead(path: str, known: Container[str]) -> str | None:
    """What to ask instead of a `path` that is not among the `known` ones."""
    bare = path.rstrip("/")
    if bare in ROUTES:
        return ROUTES[bare]
    # A slash too many, or a base URL without /v1 or with it twice.
    near = (bare, f"/v1{bare}", bare.removeprefix("/v1"))
    return next((candidate for candidate in near if candidate in known), None)
