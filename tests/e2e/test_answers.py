"""The main job: a picture, a clip and a sound asked about over HTTP, answered by separate processes."""

import base64
import subprocess
import urllib.request
from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, Answer, KnownAnswer, Service, file_url, text_of

pytestmark = pytest.mark.e2e

PAGE_TOKENS = 16

MEDIA = [known for known in KNOWN_ANSWERS.values() if known.modality != "text"]


def part_of(sample: KnownAnswer, url: str) -> dict[str, Any]:
    kind = sample.modality
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@pytest.mark.parametrize("sample", MEDIA, ids=[known.file for known in MEDIA])
@pytest.mark.parametrize("transport", ["file", "data"])
def test_curl_style_request_is_answered_right(epd: Service, sample: KnownAnswer, transport: str) -> None:
    if transport == "file":
        url = file_url(sample.file)
    else:
        content = base64.b64encode((SAMPLES / sample.file).read_bytes()).decode()
        url = f"data:application/octet-stream;base64,{content}"
    answer = epd.ask([part_of(sample, url), {"type": "text", "text": sample.question}])
    assert text_of(answer) == sample.answer
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    assert answer.body["usage"]["prompt_tokens"] > 10


@pytest.mark.parametrize("sample", MEDIA, ids=[known.file for known in MEDIA])
def test_the_same_through_the_openai_sdk_streamed(epd: Service, sample: KnownAnswer) -> None:
    client = openai.OpenAI(base_url=f"{epd.url}/v1", api_key="unused", max_retries=0)
    with client:
        stream = client.chat.completions.create(
            model="mimo-nano",
            stream=True,
            stream_options={"include_usage": True},
            messages=[
                {
                    "role": "user",
                    "content": [
                        part_of(sample, file_url(sample.file)),  # type: ignore[list-item]
                        {"type": "text", "text": sample.question},
                    ],
                }
            ],
        )
        chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == sample.answer
    # One event per token, as they come: the role, the pieces, the end, the usage.
    assert len(chunks) >= 4
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= 2


def test_input_audio_part(epd: Service) -> None:
    sample = KNOWN_ANSWERS["tones.wav"]
    data = base64.b64encode((SAMPLES / sample.file).read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    assert text_of(epd.ask([part, {"type": "text", "text": sample.question}])) == sample.answer


def test_a_key_is_found_in_a_long_text(epd: Service) -> None:
    answer = epd.ask((SAMPLES / "recall.txt").read_text().rstrip("\n"))
    assert text_of(answer) == KNOWN_ANSWERS["recall.txt"].answer
    assert answer.body["usage"]["prompt_tokens"] > 1000


def test_three_media_in_one_conversation(epd: Service) -> None:
    """Turn by turn, each question about its own medium, earlier turns in the prompt and in the prefix cache.

    mimo-nano was trained with one medium per conversation, so what it answers to the later turns is its own affair;
    that it answers the same again is not.
    """
    first, again = conversation(epd), conversation(epd)
    assert text_of(first[0]) == MEDIA[0].answer
    assert [text_of(answer) for answer in first] == [text_of(answer) for answer in again]
    for answers in (first, again):
        for earlier, later in pairwise(answer.body["usage"] for answer in answers):
            assert later["prompt_tokens"] > earlier["prompt_tokens"] + earlier["completion_tokens"]
            assert later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] - 2 * PAGE_TOKENS


def conversation(epd: Service) -> list[Answer]:
    """The answer to every turn of one conversation over all samples."""
    messages: list[dict[str, Any]] = []
    answers = []
    for sample in MEDIA[:3]:
        content = [part_of(sample, file_url(sample.file)), {"type": "text", "text": sample.question}]
        messages.append({"role": "user", "content": content})
        answers.append(epd.post("/v1/chat/completions", {"model": "mimo-nano", "messages": messages}))
        messages.append({"role": "assistant", "content": text_of(answers[-1])})
    return answers


def test_stages_are_separate_processes(epd: Service) -> None:
    table = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    stages = epd.stages()
    assert set(stages) == {"encoder-0", "prefill-0", "decode-0", "gateway"}
    for name, pid in stages.items():
        assert any(line.split()[0] == str(pid) and name in line for line in table.splitlines())


def test_models_health_metrics(epd: Service) -> None:
    models = epd.get("/v1/models").body["data"]
    assert [entry["id"] for entry in models] == ["mimo-nano"]
    assert epd.get("/health").status == epd.get("/ready").status == 200
    with urllib.request.urlopen(f"{epd.url}/metrics") as response:
        metrics = response.read().decode()
    for stage in ("gateway", "encoder", "prefill", "decode"):
        assert f"mimo_{stage}_" in metrics


def test_a_repeated_prompt_hits_the_prefix_cache(epd: Service) -> None:
    content = "Once upon a time there was a red circle. " * 20 + "What was there?"
    first, second = epd.ask(content), epd.ask(content)
    assert text_of(first) == text_of(second)
    cached = second.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= second.body["usage"]["prompt_tokens"] - 32
