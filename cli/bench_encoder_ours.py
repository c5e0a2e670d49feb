"""The encoder deployment as users start it, for the benches: `mimo serve --role encoder` in a process of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cli.bench_case import BenchFailed
from cli.bench_machine import cpu_by_descendant
from cli.processes import free_port
from cli.stage import die_with_parent

_START_S = 120.0
_STOP_S = 30.0
_POLL_S = 0.1
# What of its log is told when it does not start.
_TOLD_CHARS = 2000


@contextmanager
def encoder_deployment(model: str, *, num_replicas: int, decode_threads: int, tower_threads: int) -> Iterator[str]:
    """Its URL, once it is ready. Raises BenchFailed when it does not start."""
    port = free_port("127.0.0.1")
    command = [
        *(sys.executable, "-m", "cli", "serve", "--role", "encoder", "--model", model, "--port", str(port)),
        *("--encoders", str(num_replicas), "--allow-private-addresses"),
        *("--set", f"encoder.tower_threads={tower_threads}", "--set", f"encoder.decode_threads={decode_threads}"),
    ]
    # Only what stands above decides what is measured.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MIMO_")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal is for this process, which then ends its servers in their order.
            process_group=0,
            # However this process ends, kill -9 included, the servers do not outlive it.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _becomes_ready(process, url):
                log.seek(0)
                words = log.read().decode(errors="replace")[-_TOLD_CHARS:]
                raise BenchFailed(f"mimo serve --role encoder did not become ready:\n{words}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _becomes_ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
                if response.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass  # not yet
        time.sleep(_POLL_S)
    return False


class CpuMeter:
    """CPU seconds from now on of the processes below this one, by what they are."""

    def __init__(self) -> None:
        self._before = cpu_by_descendant()

    def used_s(self) -> dict[str, float]:
        """By the stage's name; whatever else there is stands under `other`."""
        used: dict[str, float] = {}
        for pid, cpu_s in cpu_by_descendant().items():
            name = _stage_name(pid)
            used[name] = used.get(name, 0.0) + cpu_s - self._before.get(pid, 0.0)
        return used


def _stage_name(pid: int) -> str:
    """What stands after `--name` on its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "other"
    return words[words.index(b"--name") + 1].decode() if b"--name" in words[:-1] else "other"
