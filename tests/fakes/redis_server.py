"""A real Redis server of its own, on a free port, for as long as a test needs it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class RedisServer:
    """`url` is its database 0. `pause` stops it in the middle of whatever it does; `kill` is the end, or the moment
    before `restart`, which forgets everything."""

    def __init__(self, program: str, directory: Path, options: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._command = [program, *fixed, "--dir", str(directory), *options]
        self._process = self._start()

    def restart(self) -> None:
        self._process = self._start()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        # Not before it stands still.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._until_open()
        return process

    def _until_open(self) -> None:
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.02)
        raise TimeoutError("redis-server does not listen")


@contextlib.contextmanager
def running_redis(directory: Path, *options: str) -> Iterator[RedisServer]:
    """Skips the test where the program is not installed, and says so."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    server = RedisServer(program, directory, options)
    try:
        yield server
    finally:
        server.kill()
