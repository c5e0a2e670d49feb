"""A receiver of SGLang's dialect, written from its description: a PULL socket and a safe reader. No wheel needed."""

import asyncio
from dataclasses import dataclass

import zmq
import zmq.asyncio

from encoder.sglang.header import Header, check_rows, read_header
from encoder.sglang.pickles import Global, Names

NAMES = Names(
    Global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"),
    Global("sglang.srt.multimodal.modality", "Modality"),
)


@dataclass
class Message:
    """What came: the header, and the rows if any."""

    header: Header
    rows: bytes | None


class Receiver:
    """One bound socket."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.rcvhwm = 0
        self.host = host
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
            self.port = self.socket.bind_to_random_port(f"tcp://[{host}]")
            self.url = f"[{host}]:{self.port}"
        else:
            self.port = self.socket.bind_to_random_port(f"tcp://{host}")
            self.url = f"{host}:{self.port}"

    async def receive(self, timeout_s: float = 10.0) -> Message:
        """The next message. Raises TimeoutError."""
        frames = await asyncio.wait_for(self.socket.recv_multipart(), timeout_s)
        header = read_header(frames[0], NAMES, max_bytes=1 << 26)
        if len(frames) == 1:
            return Message(header, None)
        assert len(frames) == 2
        check_rows(header, len(frames[1]))
        return Message(header, frames[1])

    async def is_silent(self, for_s: float = 0.1) -> bool:
        return not await self.socket.poll(int(for_s * 1000))

    def close(self) -> None:
        self.context.destroy(linger=0)
