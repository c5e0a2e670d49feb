"""A real Mooncake store of its own, a master and a client that lends memory, for as long as a test needs it."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
if store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]) != 0:
    sys.exit(1)
print("lent", flush=True)
sys.stdin.read()
"""
_ENVIRONMENT = {**os.environ, "GLOG_minloglevel": "2", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


def why_no_mooncake() -> str | None:
    """What is missing, or None. Asks another process: the library may fail to load."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed (pip install mooncake-transfer-engine-non-cuda)"
    probe = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"mooncake does not load: {probe.stderr.strip().splitlines()[-1]}"
    return None


class MooncakeStore:
    """`url` is its master. `pause` stops the master in the middle of whatever it does; `kill` is its end."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None or spec.submodule_search_locations is not None
        folder = Path(next(iter(spec.submodule_search_locations or [])))
        self._program = shutil.which("mooncake_master", path=folder) or str(folder / "mooncake_master")
        self._port, self._metrics_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"mooncake://{self.address}"
        self._owners: list[subprocess.Popen[str]] = []
        self._master = self._start_master()

    def lend(self, memory_bytes: int) -> subprocess.Popen[str]:
        """A process that lends the store memory; whatever lies there goes with it."""
        owner = subprocess.Popen(
            [sys.executable, "-c", _OWNER, self.address, str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_ENVIRONMENT,
        )
        self._owners.append(owner)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "lent\n"
        return owner

    def pause(self) -> None:
        self._master.send_signal(signal.SIGSTOP)
        # Not before it stands still.
        os.waitid(os.P_PID, self._master.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._master.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        _end(self._master)

    def restart(self) -> None:
        """Where it was, and of what it knew it knows nothing."""
        self._master = self._start_master()

    def close(self) -> None:
        for process in (*self._owners, self._master):
            _end(process)

    def _start_master(self) -> subprocess.Popen[str]:
        where = ["--rpc_address", "127.0.0.1", "--rpc_port", str(self._port)]
        metrics = ["--metrics_host", "127.0.0.1", "--metrics_port", str(self._metrics_port)]
        process = subprocess.Popen(
            [self._program, *where, *metrics],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_ENVIRONMENT,
        )
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return process
            time.sleep(0.02)
        _end(process)
        raise TimeoutError("mooncake_master does not listen")


@contextlib.contextmanager
def running_mooncake(memory_bytes: int = 64 << 20) -> Iterator[MooncakeStore]:
    """Skips the test where the package is not installed or does not load, and says so."""
    missing = why_no_mooncake()
    if missing is not None:
        pytest.skip(missing)
    store = MooncakeStore()
    try:
        store.lend(memory_bytes)
        yield store
    finally:
        store.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
