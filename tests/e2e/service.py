"""A whole service in one `with`: `mimo serve` as a user would start it, its processes, and a way to ask it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "samples"


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A row of the table in samples/README.md: a question about a file, and the one right answer."""

    file: str
    question: str
    answer: str

    @property
    def modality(self) -> str:
        return {".png": "image", ".mp4": "video", ".wav": "audio", ".txt": "text"}[Path(self.file).suffix]


KNOWN_ANSWERS = {
    row[0]: KnownAnswer(*row)
    for row in re.findall(
        r"^\| `(\S+)` \| (.+?) \| (.+?) \|$", (SAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One HTTP answer: status, headers and the parsed JSON body."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Service:
    url: str
    pid: int
    log_path: Path

    def stages(self) -> dict[str, int]:
        """Live stage processes by name, from the process table."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.pid and "--name" in words:
                found[words[words.index("--name") + 1]] = int(entry.name)
        return found

    def kill(self, name: str) -> int:
        """SIGKILL one stage; its pid."""
        pid = self.stages()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def get(self, path: str) -> Answer:
        return self._open(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any, *, timeout_s: float = 60.0) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        return self._open(request, timeout_s)

    def ask(self, content: Any, *, timeout_s: float = 60.0, **fields: Any) -> Answer:
        """One chat completion; `content` is text or a list of parts."""
        body = {"model": "mimo-nano", "messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body, timeout_s=timeout_s)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            stat = Path(f"/proc/{self.pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                raise AssertionError(f"ended before it was ready:\n{self.log_path.read_text()[-6000:]}")
            try:
                if self.get("/ready").status == 200:
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log_path.read_text()[-6000:]}")

    def _open(self, request: urllib.request.Request, timeout_s: float = 60.0) -> Answer:
        started = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                raw, status, headers = response.read(), response.status, dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                raw, status, headers = error.read(), error.code, dict(error.headers)
        is_json = "json" in headers.get("Content-Type", "")
        body = json.loads(raw) if is_json else {"text": raw.decode()}
        return Answer(status, body, headers, time.monotonic() - started)


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer
    content = answer.body["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def file_url(name: str) -> str:
    return (SAMPLES / name).resolve().as_uri()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_service(log_dir: Path, *arguments: str) -> Iterator[Service]:
    """`mimo serve ARGUMENTS` until the block ends, then SIGTERM; a supervisor that does not stop is an error."""
    port = free_port()
    log_path = log_dir / f"serve-{port}.log"
    command = [sys.executable, "-m", "cli", "serve", "--port", str(port), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if "--role" not in arguments:
        # A host tier like everybody's, and no store: what one test computed another would find.
        environment["MIMO_ENGINE__KV_STORE"] = ""
        environment.setdefault("MIMO_GATEWAY__FILES_DIR", str(log_dir / "files"))
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment) as process,
    ):
        service = Service(f"http://127.0.0.1:{port}", process.pid, log_path)
        try:
            service.wait_ready()
            yield service
        finally:
            # A second signal would end it at once; a test may have sent the first.
            if "stopping:" not in log_path.read_text():
                process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 0, log_path.read_text()[-4000:]
    assert not service.stages(), "stages outlived their supervisor"
