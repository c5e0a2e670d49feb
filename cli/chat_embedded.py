"""A pipeline of its own for `mimo chat`: all stages in this process, on a thread that has the event loop."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from cli.load import ServeConfig

_STOP_TIMEOUT_S = 30.0


@contextmanager
def embedded_server(config: ServeConfig) -> Iterator[str]:
    """The base URL of a server for as long as the block runs. The main thread stays free for the terminal.

    Raises ConfigError for settings that cannot work.
    """
    ready: Future[int] = Future()
    stop = threading.Event()
    # A daemon: who presses Ctrl-C while weights load does not wait for them.
    thread = threading.Thread(target=_serve, args=(config, ready, stop), name="pipeline", daemon=True)
    thread.start()
    try:
        port = ready.result()
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        if ready.done():
            thread.join(_STOP_TIMEOUT_S)


def _serve(config: ServeConfig, ready: "Future[int]", stop: threading.Event) -> None:
    try:
        asyncio.run(_serve_until(config, ready, stop))
    except BaseException as error:
        # Whoever waits for the port is told; after that there is nobody, and it is a fault of ours.
        if ready.done():
            raise
        ready.set_exception(error)


async def _serve_until(config: ServeConfig, ready: "Future[int]", stop: threading.Event) -> None:
    # Only here: a chat with a server elsewhere loads no torch.
    from cli.unified import unified_server

    async with unified_server(config) as port:
        ready.set_result(port)
        await asyncio.to_thread(stop.wait)
