"""POST /v1/completions: bare prompts in four forms, and what comes back."""

import json
from typing import Any

import openai
import pytest

from epd.gateway.vocabulary import Vocabulary
from epd.types import GenerateRequest, Role
from tests.fakes.gateway import MODEL, MODEL_DIR, RENDERER, Stack, running_gateway, says, tiny_renderer
from tests.fakes.stages import CONTEXT_TOKENS, until

VOCABULARY = RENDERER.vocabulary
TEXT = "alpha beta gamma"
TOKENS = VOCABULARY.encode(TEXT)


async def complete(stack: Stack, prompt: Any = "hello", **fields: Any) -> tuple[int, dict[str, Any]]:
    async with stack.session.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields}) as response:
        return response.status, await response.json()


async def streamed(stack: Stack, prompt: Any = "hello", **fields: Any) -> list[Any]:
    body = {"model": MODEL, "prompt": prompt, "stream": True, **fields}
    async with stack.session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")
    payloads = [block.removeprefix("data: ") for block in blocks if block]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def repeats(request: GenerateRequest) -> list[int]:
    return [*request.token_ids, *VOCABULARY.encode(f"/{request.sampling.seed}")]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("one two", ["one two"]),
        (["one two", "three"], ["one two", "three"]),
        (VOCABULARY.encode("one two"), ["one two"]),
        ([VOCABULARY.encode("one two"), VOCABULARY.encode("three")], ["one two", "three"]),
        (["one two"], ["one two"]),
    ],
)
@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
async def test_four_forms_of_prompts(prompt: Any, read: list[str], roles: tuple[Role, ...]) -> None:
    async with running_gateway(repeats, roles=roles) as stack:
        status, body = await complete(stack, prompt, n=2, seed=4)
        assert status == 200, body
        assert texts(body) == [f"{text}/{seed}" for text in read for seed in (4, 5)]
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(read)))
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        num_prompt = sum(len(VOCABULARY.encode(text)) for text in read)
        assert body["usage"]["prompt_tokens"] == num_prompt, "each prompt is counted once"
        _, echoed = await complete(stack, prompt, n=2, seed=4, echo=True)
        assert texts(echoed) == [f"{text}{text}/{seed}" for text in read for seed in (4, 5)]


async def test_sixteen_tokens_unless_asked_for_more() -> None:
    async with running_gateway(says("word " * 50)) as stack:
        _, body = await complete(stack)
        assert body["usage"]["completion_tokens"] == 16
        assert body["choices"][0]["finish_reason"] == "length"
        _, body = await complete(stack, max_tokens=20)
        assert body["usage"]["completion_tokens"] == 20


async def test_a_stream_says_the_same() -> None:
    async with running_gateway(says(TEXT)) as stack:
        events = await streamed(stack, ["a", "b"], echo=True, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        *chunks, usage = events[:-1]
        for index, prompt in enumerate("ab"):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in own) == prompt + TEXT
            assert [choice["finish_reason"] for choice in own[-2:]] == [None, "stop"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2 * len(TOKENS) + 2
        assert all(chunk["usage"] is None for chunk in chunks)


async def test_running_usage_in_every_chunk() -> None:
    async with running_gateway(says(TEXT)) as stack:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await streamed(stack, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == [*range(1, len(TOKENS) + 1), len(TOKENS) + 1, len(TOKENS) + 1]
        assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {1}
        events = await streamed(stack, stream_options={"continuous_usage_stats": True})
        assert [event["usage"]["completion_tokens"] for event in events[:-1]] == counts[:-1], "no usage of its own"
        events = await stack.events(stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == [0, *range(1, len(TOKENS) + 1), len(TOKENS) + 1, len(TOKENS) + 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_in_the_old_shape(stream: bool) -> None:
    text = "wörld \U0001f600!"
    ids = VOCABULARY.encode(text)
    async with running_gateway(says(text)) as stack:
        if stream:
            parts = [event["choices"][0]["logprobs"] for event in (await streamed(stack, logprobs=1))[:-1]]
            found = {name: [value for part in parts if part for value in part[name]] for name in parts[0]}
        else:
            _, body = await complete(stack, logprobs=1)
            found = body["choices"][0]["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert found["token_logprobs"] == [-0.5] * len(ids)
    assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]
    spelled = [VOCABULARY.spell([token_id]) for token_id in ids]
    for token, spelling in zip(found["tokens"], spelled, strict=True):
        if token.startswith("bytes:"):
            assert bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) == spelling
        else:
            assert token.encode() == spelling
    assert any(token.startswith("bytes:") for token in found["tokens"])
    before = [b"".join(spelled[:i]).decode("utf-8", "ignore") for i in range(len(ids))]
    assert found["text_offset"] == [len(shown) for shown in before]


async def test_logprobs_end_with_the_token_that_completes_a_stop() -> None:
    async with running_gateway(says(TEXT)) as stack:
        _, body = await complete(stack, logprobs=0, stop="gam", return_tokens_as_token_ids=True)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("alpha beta ", "stop", "gam")
        num_read = next(i for i in range(len(TOKENS)) if b"gam" in VOCABULARY.spell(TOKENS[: i + 1])) + 1
        assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in TOKENS[:num_read]]
        # The drawn token is told even where no others are asked for.
        assert choice["logprobs"]["top_logprobs"] == [{f"token_id:{token_id}": -0.5} for token_id in TOKENS[:num_read]]
        assert body["usage"]["completion_tokens"] == num_read
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1, "known though the worker never ended it"
        await until(lambda: not stack.worker.num_running)


@pytest.mark.parametrize(("shows", "text"), [(False, "alpha beta "), (True, "alpha beta gam")])
async def test_the_stop_is_shown_when_asked_for(shows: bool, text: str) -> None:
    async with running_gateway(says(TEXT)) as stack:
        for name in ("include_stop_str_in_output", "no_stop_trim"):
            _, body = await complete(stack, stop=["gam"], **{name: shows})
            assert texts(body) == [text]
        _, body, _ = await stack.ask(stop=["gam"], include_stop_str_in_output=shows)
        assert body["choices"][0]["message"]["content"] == text


async def test_tokens_that_stop() -> None:
    stop = TOKENS[3]
    async with running_gateway(says(TEXT)) as stack:
        _, body = await complete(stack, stop_token_ids=[stop], min_tokens=2)
        assert (body["choices"][0]["stop_reason"], body["choices"][0]["finish_reason"]) == (stop, "stop")
        assert texts(body) == [VOCABULARY.spell(TOKENS[:3]).decode()]
        sampling = stack.worker.submitted[-1].sampling
        assert sampling.min_tokens == 2
        assert stop in sampling.stop_token_ids
        assert set(RENDERER.eos_token_ids) < set(sampling.stop_token_ids)
        _, body = await complete(stack, stop_token_ids=[stop], include_stop_str_in_output=True, ignore_eos=True)
        assert texts(body) == [VOCABULARY.spell(TOKENS[:4]).decode()]
        assert stack.worker.submitted[-1].sampling.stop_token_ids == (stop,)


async def test_special_tokens_of_a_prompt_are_special() -> None:
    async with running_gateway(says("x<|im_start|>y")) as stack:
        _, body = await complete(stack, "<|im_start|>user\nhi<|im_end|>")
        ids = stack.worker.submitted[0].token_ids
        assert (ids[0], ids[-1]) == (VOCABULARY.special_ids["<|im_start|>"], VOCABULARY.special_ids["<|im_end|>"])
        assert texts(body) == ["xy"]
        _, body = await complete(stack, skip_special_tokens=False)
        assert texts(body) == ["x<|im_start|>y"]


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "words"),
    [
        ("", {}, "prompt", "empty"),
        ([], {}, "prompt", "empty"),
        ([[]], {}, "prompt[0]", "empty"),
        (["a", ""], {}, "prompt[1]", "empty"),
        ([1, "a"], {}, "prompt[1]", "integer"),
        ([[1], [2, 10**6]], {}, "prompt[1][1]", "ids of this model"),
        ([-1], {}, "prompt[0]", "at least 0"),
        ([True], {}, "prompt[0]", "string"),
        ("<|image_pad|>", {}, "prompt", "stands for media"),
        (["a"] * 5, {}, "prompt", "at most 4"),
        ("a", {"logprobs": 1, "echo": True}, "logprobs", "echo"),
        ("a", {"logprobs": 21}, "logprobs", "at most 20"),
        ("a", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("a", {"best_of": 2}, "best_of", "nothing is ranked"),
        ("a", {"suffix": "b"}, "suffix", 'allowed: ""'),
        ("a", {"min_tokens": 17}, "min_tokens", "at most max_tokens"),
        ("a", {"stop_token_ids": [5, 10**6]}, "stop_token_ids[1]", "ids of this model"),
        ("a", {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ("a", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "false"),
        ("word " * 5000, {}, "prompt", "context"),
        ([5] * CONTEXT_TOKENS, {}, "prompt", "context"),
        ([5] * 150_000, {}, "prompt", "context"),
        ("a", {"messages": []}, "messages", "unknown field"),
    ],
)
async def test_refused_by_name(prompt: Any, fields: dict[str, Any], param: str, words: str) -> None:
    async with running_gateway(max_prompts=4) as stack:
        status, body = await complete(stack, prompt, **fields)
        assert status == 400
        assert body["error"]["param"].startswith(param)
        assert words in body["error"]["message"]
        assert not stack.worker.submitted


async def test_the_sdk_reads_it() -> None:
    async with (
        running_gateway(says(TEXT)) as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x") as client,
    ):
        answer = await client.completions.create(model=MODEL, prompt="hi", logprobs=2, n=2, best_of=2)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.text_offset is not None
        stream = await client.completions.create(
            model=MODEL, prompt=["hi"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage is not None


async def test_tokens_of_texts_and_conversations() -> None:
    async with running_gateway() as stack:

        async def post(path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
            async with stack.session.post(path, json=fields) as response:
                return response.status, await response.json()

        status, body = await post("/tokenize", model=MODEL, prompt="wörld<|im_end|>", return_token_strs=True)
        assert status == 200
        ids = [*VOCABULARY.encode_plain("wörld"), VOCABULARY.special_ids["<|im_end|>"]]
        assert body["tokens"] == ids
        assert (body["count"], body["max_model_len"]) == (len(ids), CONTEXT_TOKENS)
        assert body["token_strs"][-1] == "<|im_end|>"
        assert (await post("/detokenize", tokens=ids))[1] == {"prompt": "wörld<|im_end|>"}
        messages = [{"role": "user", "content": "hi <|im_end|>"}]
        _, body = await post("/tokenize", messages=messages)
        await stack.post({"model": MODEL, "messages": messages})
        assert tuple(body["tokens"]) == stack.worker.submitted[-1].token_ids
        assert body["token_strs"] is None
        picture = [{"type": "image_url", "image_url": {"url": "https://media.test/a.png"}}]
        for fields, param in [
            ({"messages": [{"role": "user", "content": picture}]}, "messages[0].content[0].image_url"),
            ({"prompt": "a", "messages": messages}, "prompt"),
            ({}, "prompt"),
            ({"prompt": "a", "tools": []}, "tools"),
            ({"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
        ]:
            status, body = await post("/tokenize", **fields)
            assert (status, body["error"]["param"]) == (400, param)
        assert (await post("/tokenize", model="other", prompt="a"))[0] == 404
        status, body = await post("/detokenize", tokens=[1, 10**6])
        assert (status, body["error"]["param"]) == (400, "tokens[1]")
        assert (await post("/detokenize", tokens=[]))[1] == {"prompt": ""}


def test_a_tokenizer_that_frames_texts() -> None:
    spec = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    special = {
        token: {"id": token, "ids": [VOCABULARY.special_ids[token]], "tokens": [token]}
        for token in ("<|im_start|>", "<|im_end|>")
    }
    single = [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
    ]
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *single],
        "special_tokens": special,
    }
    framing = Vocabulary(spec)
    start, end = VOCABULARY.special_ids["<|im_start|>"], VOCABULARY.special_ids["<|im_end|>"]
    assert framing.framed([7]) == [start, 7, end]
    assert VOCABULARY.framed([7]) == [7]
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert Vocabulary(spec).framed([7]) == [7]


async def test_framing_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = tiny_renderer()
    monkeypatch.setattr(renderer.vocabulary, "_before", [VOCABULARY.special_ids["<|im_start|>"]])
    async with running_gateway(renderer=renderer) as stack:
        for given, num_more in [({}, 1), ({"add_special_tokens": True}, 1), ({"add_special_tokens": False}, 0)]:
            await complete(stack, "hello", **given)
            assert len(stack.worker.submitted[-1].token_ids) == len(VOCABULARY.encode("hello")) + num_more
