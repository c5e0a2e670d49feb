"""The API against a real deployment of separate prefill and decode: what only real stages can show."""

import json
import time
import urllib.request
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.service import KNOWN_ANSWERS, Service, file_url

pytestmark = pytest.mark.e2e

PICTURE = next(name for name, known in KNOWN_ANSWERS.items() if known.modality == "image")
CLIP = next(name for name, known in KNOWN_ANSWERS.items() if known.modality == "video")


def about(name: str) -> list[dict[str, Any]]:
    kind = {"image": "image_url", "video": "video_url", "audio": "audio_url"}[KNOWN_ANSWERS[name].modality]
    return [{"type": kind, kind: {"url": file_url(name)}}, {"type": "text", "text": KNOWN_ANSWERS[name].question}]


def metric(service: Service, name: str, **labels: str) -> float:
    """Sum over the samples with these labels; the stages report twice a second."""
    total = 0.0
    for line in service.get("/metrics").body["text"].splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{label}="{word}"' in head for label, word in labels.items()):
            total += float(value)
    return total


def settled(service: Service, name: str, value: float, timeout_s: float = 10.0, **labels: str) -> None:
    deadline = time.monotonic() + timeout_s
    while (found := metric(service, name, **labels)) != value:
        assert time.monotonic() < deadline, f"{name} is {found} and not {value}"
        time.sleep(0.1)


def test_choices_share_media_and_prompt(epd: Service) -> None:
    text = "Recall nothing of this. " + " ".join(f"w{i}" for i in range(120))
    time.sleep(1.0)
    cached = metric(epd, "mimo_prefill_cached_tokens_total")
    content = [*about(PICTURE), {"type": "text", "text": text}]
    answer = epd.ask(content, n=4, seed=3, temperature=1.0, max_tokens=4, return_timings=True)
    assert answer.status == 200, answer.body
    num_prompt = answer.body["usage"]["prompt_tokens"]
    assert answer.body["usage"]["completion_tokens"] <= 16
    assert (answer.body["timings"]["num_media"], len(answer.body["choices"])) == (1, 4)
    time.sleep(1.2)
    # Beyond what the first choice found, the three others find all but the last page.
    found = metric(epd, "mimo_prefill_cached_tokens_total") - cached
    assert found >= 3 * (num_prompt - 20), f"{found} tokens of four prompts of {num_prompt} were cached"


@pytest.mark.parametrize("name", [PICTURE, CLIP])
def test_the_steps_of_a_receipt_are_the_time_that_passed(epd: Service, name: str) -> None:
    started_s = time.monotonic()
    answer = epd.ask(about(name), return_timings=True, max_tokens=12)
    wall_s = time.monotonic() - started_s
    timings = answer.body["timings"]
    assert timings["duration_s"] <= wall_s
    steps = timings["steps"]
    assert {step["stage"] for step in steps} == {"gateway", "encode", "prefill", "transfer", "decode"}
    stop_s = covered_s = 0.0
    for step in steps:
        end_s = step["start_s"] + step["duration_s"]
        assert 0 <= step["start_s"] < end_s <= timings["duration_s"] + 1e-6
        covered_s += max(0.0, end_s - max(stop_s, step["start_s"]))
        stop_s = max(stop_s, end_s)
    assert covered_s >= 0.9 * timings["duration_s"]
    # Of one prompt everything follows; only inside the encoder may steps of a video overlap.
    for earlier, later in pairwise([step for step in steps if step["stage"] != "encode"]):
        assert later["start_s"] >= earlier["start_s"] + earlier["duration_s"] - 2e-6, (earlier, later)
    compute = next(step for step in steps if (step["stage"], step["name"]) == ("prefill", "compute"))
    assert compute["start_s"] + compute["duration_s"] == pytest.approx(timings["first_token_s"], abs=0.05)


def test_usage_is_whole_when_a_stop_string_ends_the_answer(epd: Service) -> None:
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = epd.ask(about(PICTURE), **asked).body
    text = whole["choices"][0]["message"]["content"]
    stopped = epd.ask(about(PICTURE), **asked, stop=[text[10:14]], return_timings=True).body
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(text[10:14])]
    assert stopped["choices"][0]["stop_reason"] == text[10:14]
    usage = stopped["usage"]
    assert usage["completion_tokens"] < whole["usage"]["completion_tokens"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["image_tokens"] > 0
    assert "compute" in {step["name"] for step in stopped["timings"]["steps"]}


def test_a_seed_says_the_same_again_with_its_log_probabilities(epd: Service) -> None:
    asked = {
        "model": "mimo-nano",
        "prompt": "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n",
        "seed": 11,
        "n": 3,
        "temperature": 1.5,
        "max_tokens": 12,
        "logprobs": 3,
    }
    first, second = epd.post("/v1/completions", asked).body, epd.post("/v1/completions", asked).body
    alone = [epd.post("/v1/completions", {**asked, "n": 1, "seed": 11 + i}).body for i in range(3)]
    for i in range(3):
        choices = [body["choices"][at] for body, at in ((first, i), (second, i), (alone[i], 0))]
        assert len({choice["text"] for choice in choices}) == 1
        logprobs = [choice["logprobs"] for choice in choices]
        assert logprobs[0]["tokens"] == logprobs[1]["tokens"] == logprobs[2]["tokens"]
        assert "".join(logprobs[0]["tokens"][: len(choices[0]["text"])]).startswith(choices[0]["text"][:5])
        for others in logprobs[1:]:
            assert others["token_logprobs"] == pytest.approx(logprobs[0]["token_logprobs"], abs=1e-3)
        for drawn, top in zip(logprobs[0]["token_logprobs"], logprobs[0]["top_logprobs"], strict=True):
            assert drawn in top.values()
            assert len(top) in (3, 4)


def test_no_end_before_as_many_tokens_as_asked_for(epd: Service) -> None:
    body = epd.ask("hi", min_tokens=30, max_tokens=60, temperature=0).body
    assert body["usage"]["completion_tokens"] >= 30
    assert epd.ask("hi", max_tokens=60, temperature=0).body["usage"]["completion_tokens"] < 30


def test_a_client_that_leaves_gives_everything_back(epd: Service) -> None:
    """In the middle of four streams of one request with a picture."""
    body = {
        "model": "mimo-nano",
        "messages": [{"role": "user", "content": about(PICTURE)}],
        "stream": True,
        "n": 4,
        "ignore_eos": True,
        "max_tokens": 800,
    }
    request = urllib.request.Request(
        epd.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        seen: set[int] = set()
        while len(seen) < 4:
            line = response.readline()
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                seen |= {choice["index"]} if choice["delta"].get("content") else set()
    settled(epd, "mimo_gateway_inflight_requests", 0)
    for stage in ("prefill", "decode"):
        settled(epd, f"mimo_{stage}_pool_pages", 0, state="leased")
        settled(epd, f"mimo_{stage}_queue_requests", 0)
    settled(epd, "mimo_encoder_leased_bytes", 0)
    requests = epd.get("/v1/pipeline").body["requests"]
    assert (requests[-1]["status"], requests[-1]["finish_reason"]) == (499, "cancelled")
