"""A pipeline whose stages are served one by one, as on many machines: `mimo serve --role ...`, a command each."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.service import ROOT, Service, free_port

START_TIMEOUT_S = 120.0


@dataclass
class Role:
    """One command. `url` answers its probes; `listen` is where it takes messages, empty for a gateway."""

    name: str
    process: "subprocess.Popen[bytes]"
    url: str
    listen: str
    log_path: Path

    @property
    def service(self) -> Service:
        return Service(self.url, self.process.pid, self.log_path)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, words: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while words not in self.log:
            is_waiting = time.monotonic() < deadline_s and self.process.poll() is None
            assert is_waiting, f"never said {words!r}:\n{self.log}"
            time.sleep(0.05)

    def terminate(self) -> None:
        """SIGTERM, once: a second would end it at once."""
        if "stopping:" not in self.log:
            self.process.send_signal(signal.SIGTERM)

    def end(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@dataclass
class Cluster:
    """Commands that share a secret. `command` runs before each of them, such as one that enters a namespace."""

    directory: Path
    roles: dict[str, Role] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def key_file(self) -> Path:
        path = self.directory / "cluster.key"
        if not path.exists():
            path.write_text(self.key)
            path.chmod(0o600)
        return path

    def worker(
        self,
        role: str,
        *arguments: str,
        host: str = "127.0.0.1",
        port: int | None = None,
        name: str | None = None,
        command: Sequence[str] = (),
    ) -> Role:
        """A prefill, decode or encoder-worker process; its probes are answered beside it."""
        port = free_port() if port is None else port
        health_port = free_port()
        listen = f"tcp://{host}:{port}"
        flags = ["--listen", listen, "--health-host", host, "--health-port", str(health_port)]
        name = name or role
        return self._start(name, role, [*flags, *arguments], f"http://{host}:{health_port}", listen, command)

    def gateway(
        self, *arguments: str, host: str = "127.0.0.1", name: str = "gateway", command: Sequence[str] = ()
    ) -> Role:
        port = free_port()
        flags = ["--host", host, "--port", str(port), *arguments]
        return self._start(name, "gateway", flags, f"http://{host}:{port}", "", command)

    def _start(self, name: str, role: str, flags: Sequence[str], url: str, listen: str, command: Sequence[str]) -> Role:
        log_path = self.directory / f"{name}.log"
        serve = [sys.executable, "-m", "cli", "serve", "--role", role]
        if "--cluster-key-file" not in flags and "--insecure-cluster" not in flags:
            serve += ["--cluster-key-file", str(self.key_file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if role in ("prefill", "decode"):
            # What one test computed another would find.
            environment["MIMO_ENGINE__KV_STORE"] = ""
        with log_path.open("wb") as log:
            process = subprocess.Popen([*command, *serve, *flags], cwd=ROOT, stdout=log, stderr=log, env=environment)
        self.roles[name] = Role(name, process, url, listen, log_path)
        return self.roles[name]

    def end(self, name: str) -> int:
        return self.roles.pop(name).end()

    def close(self) -> None:
        """End everything, the gateways first; each must end well."""
        names = sorted(self.roles, key=lambda name: not name.startswith("gateway"))
        for name in names:
            self.roles[name].terminate()
        codes = {name: self.roles[name].end() for name in names}
        assert not any(codes.values()), {name: self.roles[name].log for name, code in codes.items() if code}


@dataclass
class Load:
    """Streams that are asked one after another, by several clients at once, until `stop`."""

    url: str
    bodies: Sequence[dict[str, Any]]
    num_clients: int = 4
    answers: list[tuple[str, str]] = field(default_factory=list)
    """What was asked and what came, an error as its text."""

    def __post_init__(self) -> None:
        self._stopping = False
        self._threads = ThreadPoolExecutor(self.num_clients)
        self._clients = [self._threads.submit(self._run, i) for i in range(self.num_clients)]

    def stop(self) -> None:
        self._stopping = True
        for client in self._clients:
            client.result(120)
        self._threads.shutdown()

    def _run(self, client: int) -> None:
        number = client
        while not self._stopping:
            body = self.bodies[number % len(self.bodies)]
            self.answers.append((json.dumps(body["messages"]), stream_text(self.url, body)))
            number += self.num_clients


def stream_text(url: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer; what went wrong instead, in words that no answer has."""
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    text, is_over = "", False
    try:
        with urllib.request.urlopen(request, timeout=90) as response:
            for line in response:
                event = line.decode().strip().removeprefix("data: ")
                if event == "[DONE]":
                    is_over = True
                elif event:
                    parsed = json.loads(event)
                    if "error" in parsed:
                        return f"ERROR {parsed['error']}"
                    text += "".join(choice["delta"].get("content") or "" for choice in parsed["choices"])
    except urllib.error.HTTPError as error:
        with error:
            return f"ERROR {error.code} {error.read().decode()}"
    except (OSError, ValueError) as error:
        return f"ERROR {error!r}"
    return text if is_over else f"ERROR cut off after {text!r}"
