"""OpenAI's SDK, synchronous: conversations with all media, streams, completions, files, models, errors."""

import io
import socket
import threading
import time
from typing import Any

import openai
import pytest

from tests.clients.asked import GREEDY, MEDIA, MODEL, PICTURE, PICTURE_ANSWER
from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, Service

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", MEDIA)
def test_every_medium_is_understood(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=MEDIA[name])
    assert answer.choices[0].message.content == KNOWN_ANSWERS[name].answer
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    counts = usage.prompt_tokens_details.model_dump()
    assert counts[f"{KNOWN_ANSWERS[name].modality}_tokens"] > 0


def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        **GREEDY, messages=PICTURE, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PICTURE_ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper_follows_along(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, messages=PICTURE) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == PICTURE_ANSWER
    assert final.choices[0].message.content == PICTURE_ANSWER


def test_choices_seeds_and_logprobs(client: openai.OpenAI) -> None:
    def ask() -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=PICTURE, temperature=1.5, seed=11, n=2, max_tokens=8, logprobs=True, top_logprobs=2
        )

    first, second = ask(), ask()
    assert [choice.message.content for choice in first.choices] == [c.message.content for c in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    scored = first.choices[0].logprobs.content
    assert len(scored) > 0
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in scored)
    assert first.usage.completion_tokens <= 16


def test_stop_strings_and_limits(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(**GREEDY, messages=PICTURE, stop=" of the")
    assert stopped.choices[0].message.content == PICTURE_ANSWER.partition(" of the")[0]
    assert stopped.choices[0].finish_reason == "stop"
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        cut = client.chat.completions.create(**GREEDY, messages=PICTURE, **limit)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 3


def test_plain_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt="I see the", max_tokens=6)
    assert whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 6
    pieces = client.completions.create(**GREEDY, prompt="I see the", max_tokens=6, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    both = client.completions.create(**GREEDY, prompt=["I see the", "The clip"], max_tokens=4)
    assert [choice.index for choice in both.choices] == [0, 1]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_files_from_their_upload_to_their_end(client: openai.OpenAI) -> None:
    content = (SAMPLES / "picture.png").read_bytes()
    file = client.files.create(file=("picture.png", io.BytesIO(content), "image/png"), purpose="user_data")
    try:
        assert file.bytes == len(content)
        assert client.files.retrieve(file.id).filename == "picture.png"
        assert file.id in [found.id for found in client.files.list()]
        assert client.files.content(file.id).read() == content
        messages: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"file_id": file.id}},
                    {"type": "text", "text": KNOWN_ANSWERS["picture.png"].question},
                ],
            }
        ]
        answer = client.chat.completions.create(**GREEDY, messages=messages)
        assert answer.choices[0].message.content == PICTURE_ANSWER
    finally:
        assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_errors_are_the_sdk_s_own_classes(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=messages)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=9)
    assert (wrong.value.code, wrong.value.param) == ("invalid_request", "temperature")
    assert wrong.value.request_id is not None
    broken: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    ]
    with pytest.raises(openai.UnprocessableEntityError) as undecodable:
        client.chat.completions.create(model=MODEL, messages=broken)
    assert undecodable.value.param == "messages[0].content[0].image_url"
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=MODEL, messages=long)
    assert too_long.value.code == "context_length_exceeded"


def test_raw_answers_have_their_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY, messages=PICTURE, max_tokens=2, extra_headers={"X-Request-Id": "mine-7"}
    )
    assert raw.headers["X-Request-Id"] == "mine-7"
    assert raw.request_id == "mine-7"
    assert raw.parse().choices[0].message.content
    answer = client.chat.completions.create(**GREEDY, messages=PICTURE, max_tokens=2)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req-")


def test_a_client_that_gives_up_is_let_go(client: openai.OpenAI, served: Service) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            **GREEDY, messages=PICTURE, max_tokens=2000, extra_body={"ignore_eos": True}
        )
    deadline = time.monotonic() + 20
    while inflight(served) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert inflight(served) == 0


def inflight(served: Service) -> float:
    lines = str(served.get("/metrics").body["text"]).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("mimo_gateway_inflight_requests"))


def test_a_closed_stream_ends_the_work(client: openai.OpenAI, served: Service) -> None:
    with client.chat.completions.create(
        **GREEDY, messages=PICTURE, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 20
    while inflight(served) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert inflight(served) == 0


def test_other_servers_fields_pass_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **GREEDY,
        messages=PICTURE,
        max_tokens=4,
        extra_body={"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}, "return_timings": True},
    )
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["steps"]


def test_connections_are_kept(client: openai.OpenAI, served: Service) -> None:
    """Many requests of one client go over one connection."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    with CountingProxy(host, int(port)) as proxy, openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none") as over:
        for _ in range(5):
            over.models.list()
            over.chat.completions.create(**GREEDY, messages=PICTURE, max_tokens=1)
    assert proxy.num_connections == 1


class CountingProxy:
    """Passes bytes on, and counts connections."""

    def __init__(self, host: str, port: int) -> None:
        self.num_connections = 0
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "CountingProxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()
