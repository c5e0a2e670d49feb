"""A web server that takes its time, in a process of its own, for the benches that fetch."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from cli.bench_case import BenchFailed
from cli.stage import die_with_parent

_START_S = 60.0


@contextmanager
def slow_server(content: bytes, delay_s: float) -> Iterator[str]:
    """Answers every path with the content after the delay; gives its URL. Raises BenchFailed when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, content, delay_s, multiprocessing.current_process().pid))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise BenchFailed(f"the local server did not start within {_START_S:.0f} s")
        try:
            port = ours.recv()
        except EOFError as error:
            raise BenchFailed("the local server ended as it started") from error
        yield f"http://127.0.0.1:{port}"
    finally:
        # The other end of the pipe closing is its word to stop.
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, content: bytes, delay_s: float, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    asyncio.run(_serve_until_closed(pipe, content, delay_s))


async def _serve_until_closed(pipe: Connection, content: bytes, delay_s: float) -> None:
    answer = f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(delay_s)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
    pipe.send(server.sockets[0].getsockname()[1])
    await stop.wait()
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    server.close()
