"""An HTTP server made of bytes: each path is a script that says what goes over the wire, and when.

async def script(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\n")
    await call.server.gate.wait()
    await call.send(b"hello")
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CONTENT = b"\x89PNG" + bytes(range(256)) * 4


@dataclass
class Call:
    """One request on one connection."""

    server: "MediaServer"
    path: str
    head: str
    connection: int
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = CONTENT, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} Whatever"]
        lines += [f"{name}: {value}" for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def hang_up(self) -> None:
        self.writer.close()


Script = Callable[[Call], Awaitable[None]]


@dataclass(eq=False)
class MediaServer:
    """Counts what it sees. `gate` is for scripts that wait until the test says so."""

    scripts: dict[str, Script] = field(default_factory=dict)
    port: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    num_connections: int = 0
    num_open: int = 0
    """Requests being answered right now."""
    most_open: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)

    def url(self, path: str, *, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def script(self, path: str) -> Callable[[Script], Script]:
        def add(script: Script) -> Script:
            self.scripts[path] = script
            return script

        return add

    async def plain(self, call: Call) -> None:
        await call.answer()

    async def gated(self, call: Call) -> None:
        await self.gate.wait()
        await call.answer()

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        connection = self.num_connections
        self.writers.add(writer)
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ")[1].partition("?")[0]
                await self._serve_one(Call(self, path, head, connection, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _serve_one(self, call: Call) -> None:
        self.hits[call.path] += 1
        self.calls.append(call)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.arrived.set()
        try:
            default = self.gated if call.path.startswith("/gated") else self.plain
            await self.scripts.get(call.path, default)(call)
        finally:
            self.num_open -= 1

    def close_idle(self) -> None:
        """What servers do to connections that were kept for too long."""
        for writer in list(self.writers):
            writer.close()


@asynccontextmanager
async def media_server() -> AsyncIterator[MediaServer]:
    served = MediaServer()
    tasks: set[asyncio.Task[None]] = set()

    def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(served.serve_connection(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(connect, "127.0.0.1", 0)
    served.port = listening.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
