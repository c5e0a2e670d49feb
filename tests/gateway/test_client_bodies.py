"""What programs send that people point at such a server, and what their users set: it is taken as it comes.

Each body is as its program builds it; the text is ours. Fields that programs fill with defaults or null must not be in
anybody's way, and what would change an answer and is not done is refused by its name.
"""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from epd.gateway.schema import ChatBody
from epd.gateway.schema_completion import CompletionBody
from tests.fakes.gateway import MODEL, running_gateway, says

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi", "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "1", "name": "f"},
    {"role": "assistant", "content": "done", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"role": "user", "content": "more"},
]
USAGE = {"include_usage": True}
# All that the SDK knows beside the model and the question.
NULL_IN_CHATS = (
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "reasoning_effort",
    "prompt_cache_retention",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
)
NULL_IN_TEXTS = (
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
)
CHATS: dict[str, dict[str, Any]] = {
    "openai, all left at null": {
        "messages": MESSAGES,
        **dict.fromkeys(NULL_IN_CHATS),
    },
    "langchain": {
        "messages": CALLED,
        "stream": True,
        "stream_options": USAGE,
        "n": 1,
        "temperature": 0.7,
        "max_completion_tokens": 64,
        "stop": ["\n\n"],
        "parallel_tool_calls": True,
    },
    "litellm": {"messages": MESSAGES, "stream": True, "stream_options": USAGE, "user": "u", "metadata": {"a": "b"}},
    "open webui": {
        "messages": MESSAGES,
        "stream": True,
        "stream_options": USAGE,
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 64,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": 1,
        "stop": [],
        "logit_bias": {},
    },
    "continue": {
        "messages": CALLED,
        "max_tokens": 64,
        "temperature": 0.5,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stop": ["```"],
        "stream": True,
    },
    "guidellm": {
        "messages": MESSAGES,
        "max_tokens": 16,
        "max_completion_tokens": 16,
        "stop": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    },
    "aiperf": {
        "messages": [{"role": "user", "content": "hi", "name": "text_0"}],
        "stream": True,
        "stream_options": USAGE,
        "max_completion_tokens": 16,
        "min_tokens": 16,
        "ignore_eos": True,
    },
    "genai-bench": {
        "messages": MESSAGES,
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": USAGE,
    },
    "vllm bench serve": {
        "messages": MESSAGES,
        "max_completion_tokens": 16,
        "stream": True,
        "stream_options": USAGE,
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
    "vllm's own defaults": {
        "messages": MESSAGES,
        "logprobs": False,
        "top_logprobs": 0,
        "n": 1,
        "best_of": None,
        "use_beam_search": False,
        "top_k": 0,
        "length_penalty": 1.0,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "echo": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "include_reasoning": True,
        "documents": None,
        "chat_template": None,
        "mm_processor_kwargs": None,
        "priority": 0,
        "logits_processors": None,
        "cache_salt": None,
        "kv_transfer_params": None,
        "vllm_xargs": None,
        "tool_choice": "none",
    },
    "sglang's own defaults": {
        "messages": MESSAGES,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "no_stop_trim": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "lora_path": None,
        "session_params": None,
        "rid": None,
        "return_hidden_states": False,
        "custom_params": None,
        "stop_regex": None,
    },
}
TEXTS: dict[str, dict[str, Any]] = {
    "openai, all left at null": {
        "prompt": "hi",
        **dict.fromkeys(NULL_IN_TEXTS),
    },
    "vllm bench serve": {
        "prompt": "hi",
        "repetition_penalty": 1.0,
        "max_tokens": 16,
        "logprobs": None,
        "stream": True,
        "stream_options": USAGE,
        "ignore_eos": True,
        "temperature": 0.0,
    },
    "guidellm": {
        "prompt": "hi",
        "max_tokens": 16,
        "stop": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    },
    "sglang bench": {
        "prompt": "hi",
        "temperature": 0.0,
        "best_of": 1,
        "max_tokens": 16,
        "stream": True,
        "ignore_eos": True,
    },
    "continue": {"prompt": "<|im_start|>a", "max_tokens": 64, "stop": ["\n"], "stream": True, "suffix": None},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(path, body, id=f"{path} {name}")
        for path, bodies in (("/v1/chat/completions", CHATS), ("/v1/completions", TEXTS))
        for name, body in bodies.items()
    ],
)
async def test_bodies_of_programs_are_answered(path: str, body: dict[str, Any]) -> None:
    async with (
        running_gateway(says("word " * 30)) as stack,
        stack.session.post(path, json={"model": MODEL, **body}) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    if not body.get("stream"):
        assert json.loads(text)["usage"]["completion_tokens"] > 0
        return
    *events, done = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert done == "[DONE]"
    if body.get("stream_options"):
        assert json.loads(events[-1])["usage"]["completion_tokens"] > 0
    if body.get("ignore_eos") and body.get("max_tokens", body.get("max_completion_tokens")) == 16:
        reasons = [choice["finish_reason"] for event in events for choice in json.loads(event)["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]


REFUSED: dict[str, Any] = {
    "prediction": {"type": "content", "content": "x"},
    "audio": {"voice": "alloy", "format": "wav"},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "web_search_options": {},
    "verbosity": "low",
    "store": True,
    "prompt_cache_retention": "24h",
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "best_of": 2,
    "echo": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "include_reasoning": False,
    "chat_template": "x",
    "documents": [{"text": "x"}],
    "mm_processor_kwargs": {"fps": 1},
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "logits_processors": ["a"],
    "priority": 1,
    "cache_salt": "a",
    "length_penalty": 2,
    "request_id": "mine",
    "return_token_ids": True,
    "lora_path": "a",
    "top_k": -2,
    "n": 0,
    "max_length": 5,
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_is_not_done_is_refused_by_name(field: str) -> None:
    async with running_gateway() as stack:
        status, body, _ = await stack.ask(**{field: REFUSED[field]})
        assert status == 400
        assert body["error"]["param"] == field or body["error"]["param"].startswith(f"{field}[")
        assert field in body["error"]["message"]
        assert not stack.worker.submitted


@pytest.mark.parametrize("shape", [ChatBody, CompletionBody])
def test_null_is_the_same_as_absent(shape: type[BaseModel]) -> None:
    required = {"model": MODEL, "messages": MESSAGES, "prompt": "hi"}
    given = {name: None for name in shape.model_fields if name not in required}
    least = {name: value for name, value in required.items() if name in shape.model_fields}
    assert shape.model_validate({**given, **least}) == shape.model_validate(least)
