"""A real Redis server of its own, on a free port, for as long as a test needs it."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class RedisServer:
    """`url` is its database 0. `pause` stops it in the middle of whatever it does; `kill` is the end."""

    def __init__(self, program: str, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [program, *options, "--dir", str(directory)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._until_open()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _until_open(self) -> None:
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.02)
        raise TimeoutError("redis-server does not listen")


@contextlib.contextmanager
def running_redis(directory: Path) -> Iterator[RedisServer]:
    """Skips the test where the program is not installed, and says so."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    server = RedisServer(program, directory)
    try:
        yield server
    finally:
        server.kill()
