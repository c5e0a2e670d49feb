"""Web servers in processes of their own, for the benches: one that takes its time, for those that fetch."""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import uvloop

from cli.bench_case import BenchFailed
from cli.signals import deaf_children
from cli.stage import die_with_parent

_START_S = 60.0

Announce = Callable[[int], None]
"""Told the port once the server listens."""
Serve = Callable[[Announce, asyncio.Event], Awaitable[None]]
"""Serves until the event is set. Goes to another process, so it is a function of a module, or a partial of one."""
Site = Callable[[str], bytes]
"""What is behind a path. Goes to another process as well."""


@dataclass(frozen=True, slots=True)
class SameEverywhere:
    """One content behind every path."""

    content: bytes

    def __call__(self, path: str) -> bytes:
        return self.content


@contextmanager
def slow_server(site: Site, delay_s: float) -> Iterator[str]:
    """Answers each request after the delay; gives its URL. Raises BenchFailed when it does not start."""
    with web_process("the local server", partial(_serve_site, site, delay_s)) as url:
        yield url


@contextmanager
def web_process(what: str, serve: Serve) -> Iterator[str]:
    """The URL of a process that serves until the end of the context. Raises BenchFailed when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, serve, multiprocessing.current_process().pid))
    with deaf_children():
        process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise BenchFailed(f"{what} did not start within {_START_S:.0f} s")
        try:
            port = ours.recv()
        except EOFError as error:
            raise BenchFailed(f"{what} ended as it started") from error
        yield f"http://127.0.0.1:{port}"
    finally:
        # The other end of the pipe closing is its word to stop.
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _run(pipe: Connection, serve: Serve, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    uvloop.run(_serve_until_closed(pipe, serve))


async def _serve_until_closed(pipe: Connection, serve: Serve) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
    await serve(pipe.send, stop)
    asyncio.get_running_loop().remove_reader(pipe.fileno())


async def _serve_site(site: Site, delay_s: float, announce: Announce, stop: asyncio.Event) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(delay_s)
                content = site(head.split(b" ", 2)[1].decode())
                kind = b"Content-Type: application/octet-stream\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n" % (kind, len(content)))
                writer.write(content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    announce(server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()
