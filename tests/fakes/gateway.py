"""A gateway in this process over fake stages, on a real socket, and the small model description it needs."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from epd.config import GatewayConfig
from epd.gateway.app import create_app, start_gateway
from epd.gateway.grammar_process import Grammars
from epd.gateway.render import Renderer
from epd.gateway.template import ChatTemplate
from epd.gateway.tls import Tls
from epd.gateway.vocabulary import Vocabulary
from epd.transport.memory import MemoryNetwork
from epd.types import GenerateRequest, Role
from tests.fakes.document import AnswerJudge
from tests.fakes.stages import CONTEXT_TOKENS, FakeEncoder, FakeFetcher, FakeWorker

MODEL_DIR = Path(__file__).parent.parent.parent / "epd" / "builtin" / "mimo-nano"
MODEL = "tiny"
IMAGE_URL, VIDEO_URL, AUDIO_URL = "https://media.test/a.png", "https://media.test/a.mp4", "https://media.test/a.wav"


def processor_config(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = vocabulary.special_ids
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "video_start_token_id": ids["<|mimo_video_start|>"],
        "video_end_token_id": ids["<|mimo_video_end|>"],
        "audio_start_token_id": ids["<|mimo_audio_start|>"],
        "audio_end_token_id": ids["<|mimo_audio_end|>"],
    }


def tiny_renderer(**generation: Any) -> Renderer:
    """The built-in model's tokenizer and template with a small context."""
    vocabulary = Vocabulary.load(MODEL_DIR / "tokenizer.json")
    config = {
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": vocabulary.special_ids["<|im_end|>"],
        "processor_config": processor_config(vocabulary),
    }
    template = ChatTemplate.load(MODEL_DIR)
    return Renderer(
        vocabulary=vocabulary, template=template, config=config, generation=generation or {"do_sample": False}
    )


RENDERER = tiny_renderer()
# Of all gateways of this process: a test does not wait for processes that others have started.
GRAMMARS = Grammars(MODEL_DIR / "tokenizer.json", RENDERER.grammars)


def says(text: str) -> Callable[[GenerateRequest], Sequence[int]]:
    """An answer in tokens; special tokens are written as such."""
    token_ids = RENDERER.vocabulary.encode(text)
    return lambda _: token_ids


@dataclass
class Stack:
    """A running gateway and what it stands on."""

    url: str
    session: aiohttp.ClientSession
    network: MemoryNetwork
    workers: list[FakeWorker]
    encoder: FakeEncoder
    fetcher: FakeFetcher
    app: Any
    stop: Callable[[], Awaitable[None]]
    """What SIGTERM does; may be called before the block ends."""
    judge: AnswerJudge
    """Has seen every answer of `session` that is no stream."""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    async def post(self, body: Any, **options: Any) -> tuple[int, dict[str, Any], Any]:
        """Status, JSON and headers of one completion request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        async with self.session.post("/v1/chat/completions", data=data, headers=headers, **options) as response:
            return response.status, await response.json(), response.headers

    async def ask(self, content: Any = "hello", **fields: Any) -> tuple[int, dict[str, Any], Any]:
        return await self.post(chat_body(content, **fields))

    async def events(self, content: Any = "hello", **fields: Any) -> list[Any]:
        """The events of one stream, parsed; `[DONE]` as the string."""
        async with self.session.post(
            "/v1/chat/completions", json=chat_body(content, stream=True, **fields)
        ) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
            self.judge.check("POST", "/v1/chat/completions", response.status, response.headers, text)
            blocks = text.split("\n\n")
        payloads = [block.removeprefix("data: ") for block in blocks if block]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]

    async def metric(self, name: str) -> float:
        """Sum over the samples of one metric; 0 when it has none."""
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def chat_body(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def text_of(body: dict[str, Any]) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


def text_of_events(events: Sequence[Any]) -> str:
    deltas = [event["choices"][0]["delta"] for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


@asynccontextmanager
async def running_gateway(
    *answers: Callable[[GenerateRequest], Sequence[int]],
    roles: Sequence[Role] = (Role.BOTH,),
    renderer: Renderer = RENDERER,
    tls: Tls | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A gateway over one fake worker per role. One answer serves all workers, or there is one for each."""
    network = MemoryNetwork()
    given = answers or (says("a red circle"),)
    by_worker = given if len(given) == len(roles) else given * len(roles)
    workers = [
        FakeWorker(network, f"memory://{role}-{i}", answer, role=role)
        for i, (role, answer) in enumerate(zip(roles, by_worker, strict=True))
    ]
    encoder = FakeEncoder()
    fetcher = FakeFetcher({IMAGE_URL: b"image", VIDEO_URL: b"video", AUDIO_URL: b"audio"})
    config = GatewayConfig(
        model_dir=MODEL_DIR,
        model_name=MODEL,
        **{"heartbeat_s": 0.02, "restart_wait_s": 1.0, "drain_s": 1.0, **settings},
    )
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        app = create_app(
            config,
            renderer=renderer,
            fetcher=fetcher,
            encoder=encoder,
            prefill=[network.channel(worker.address) for worker in workers if worker.role is not Role.DECODE],
            decode=[network.channel(worker.address) for worker in workers if worker.role is Role.DECODE],
            grammars=GRAMMARS if renderer.eos_token_ids == RENDERER.eos_token_ids else None,
        )
        runner, port = await start_gateway(app, host="127.0.0.1", port=0, tls=tls)
        stack.push_async_callback(runner.cleanup)
        url = f"http://127.0.0.1:{port}"
        judge = AnswerJudge.of(app, config)
        session = await stack.enter_async_context(aiohttp.ClientSession(url, middlewares=(_judged_by(judge),)))
        yield Stack(url, session, network, workers, encoder, fetcher, app, runner.cleanup, judge)


def _judged_by(judge: AnswerJudge) -> aiohttp.ClientMiddlewareType:
    """Every answer but streams is held to the document before the test sees it."""

    async def judged(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        response = await handler(request)
        if response.content_type != "text/event-stream" and request.method != "HEAD":
            judge.check(request.method, str(request.url), response.status, response.headers, await response.read())
        return response

    return judged
