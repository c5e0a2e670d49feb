"""A peer of an encoder server without sockets: sends requests, collects the replies."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from encoder.config import EncoderConfig
from encoder.fingerprint import checkpoint_fingerprint
from encoder.process import open_server
from encoder.server import EncoderServer
from encoder.types import EncodeFailure, EncodeReply, EncodeRequest, FromEncoder, ReleaseLeases
from encoder.wire import TensorFrame
from preprocess.config import ProcessorConfig
from preprocess.keys import media_key
from preprocess.types import MediaOptions, Modality

Opener = Callable[..., Any]
CONFIG = EncoderConfig(arena_bytes=256 * 1024, max_pending=8)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the thing observed lives in another task or process
            await asyncio.sleep(0.01)


class Peer:
    """Sends requests to a server and collects the replies."""

    def __init__(self, server: EncoderServer, model_dir: Path, name: str = "peer") -> None:
        self.server = server
        self.name = name
        self.processor = ProcessorConfig.from_hf(json.loads((model_dir / "config.json").read_text()))
        self.fingerprint = checkpoint_fingerprint(model_dir)
        self.replies: dict[str, list[tuple[FromEncoder, Sequence[TensorFrame]]]] = {}

    def request(self, content: bytes, modality: Modality = Modality.IMAGE, **changes: Any) -> EncodeRequest:
        options = changes.pop("options", MediaOptions())
        key = media_key(
            content,
            modality=modality,
            options=options,
            processor=self.processor,
            tower_fingerprint=self.fingerprint,
        )
        values: dict[str, Any] = {
            "request_id": uuid.uuid4().hex,
            "key": key,
            "modality": modality,
            "options": options,
            "deadline_unix_s": time.time() + 30,
        }
        return EncodeRequest(**(values | changes))

    def send(self, request: EncodeRequest, content: bytes | None) -> str:
        tensors = [] if content is None else [TensorFrame.of_bytes(content)]
        self.replies.setdefault(request.request_id, [])

        def reply(message: FromEncoder, frames: Sequence[TensorFrame]) -> None:
            self.replies[request.request_id].append((message, frames))

        self.server.handle(request, tensors, reply, peer=self.name)
        return request.request_id

    async def answer(self, request_id: str) -> EncodeReply | EncodeFailure:
        await until(lambda: bool(self.replies[request_id]))
        message = self.replies[request_id][0][0]
        assert isinstance(message, EncodeReply | EncodeFailure)
        return message

    async def encode(self, content: bytes, **changes: Any) -> EncodeReply | EncodeFailure:
        return await self.answer(self.send(self.request(content, **changes), content))

    def release(self, reply: EncodeReply) -> None:
        self.server.handle(ReleaseLeases(lease_ids=(reply.ref.lease_id,)), (), lambda *_: None, peer=self.name)


@asynccontextmanager
async def opened_peer(model_dir: Path, config: EncoderConfig = CONFIG, drain_s: float = 5.0) -> AsyncIterator[Peer]:
    """A running server and its peer; at the end the books balance and every request has had one reply."""
    with open_server(config, model_dir=model_dir, name="e0", arena=f"t-{uuid.uuid4().hex}") as server:
        server.start()
        peer = Peer(server, model_dir)
        yield peer
        await server.stop(drain_s)  # balances the books
        assert all(len(replies) == 1 for replies in peer.replies.values()), "exactly one reply per request"
