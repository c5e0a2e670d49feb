"""How a deployment ends: in order, whatever the signal; nobody's answer is torn, nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import ROOT, Answer, Service, free_port
from tests.oracles.effort import scaled

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
MAX_TOKENS = 150
# Each signal and each mode; every pair of them with MIMO_TEST_EFFORT=3.
ENDINGS = [(signal.SIGTERM, "epd"), (signal.SIGINT, "unified"), (signal.SIGINT, "epd"), (signal.SIGTERM, "unified")]
ENDINGS = ENDINGS[: scaled(4, least=3)]


def ask_all(service: Service) -> tuple[list[threading.Thread], list[Answer]]:
    """Long answers under way; more than run at once, so that some still wait when the signal comes."""
    answers: list[Answer] = []

    def ask(number: int) -> None:
        answers.append(service.ask(f"Count from {number} to 90.", max_tokens=MAX_TOKENS, ignore_eos=True))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    return threads, answers


@pytest.mark.parametrize(("number", "mode"), ENDINGS)
def test_what_runs_is_finished_and_nothing_is_left(tmp_path: Path, number: signal.Signals, mode: str) -> None:
    """SIGINT goes to the whole process group, as a terminal's Ctrl-C does."""
    port = free_port()
    log_path = tmp_path / "serve.log"
    command = [
        sys.executable,
        "-m",
        "cli",
        "serve",
        "--mode",
        mode,
        "--port",
        str(port),
        "--set",
        "engine.max_running=2",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stderr=log, env=environment, start_new_session=True) as process,
    ):
        service = Service(f"http://127.0.0.1:{port}", process.pid, log_path)
        service.wait_ready()
        (runtime_dir,) = tmp_path.glob("mimo-*")
        threads, answers = ask_all(service)
        time.sleep(0.5)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        for thread in threads:
            thread.join(60)
        assert process.wait(60) == 0, log_path.read_text()[-3000:]
    assert [answer.status for answer in answers] == [200] * NUM_STREAMS, answers
    assert all(answer.body["usage"]["completion_tokens"] == MAX_TOKENS for answer in answers)
    assert service.stages() == {}
    assert not runtime_dir.exists()
    assert list(Path("/dev/shm").glob(f"{runtime_dir.name}*")) == []


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (signal.SIGINT, ["--mode", "epd"]),
        (signal.SIGTERM, ["--mode", "unified"]),
        *[(signal.SIGTERM, ["--role", "encoder"])] * (scaled(4, least=3) > 3),
    ],
)
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals, arguments: list[str]) -> None:
    """Whatever is in flight. What is told meanwhile is JSON where that was asked for, to the last line."""
    port, log_path = free_port(), tmp_path / "serve.log"
    command = [sys.executable, "-m", "cli", "serve", "--port", str(port), "--log-format", "json", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stderr=log, env=environment, start_new_session=True) as process,
    ):
        service = Service(f"http://127.0.0.1:{port}", process.pid, log_path)
        try:
            service.wait_ready()
            (runtime_dir,) = tmp_path.glob("mimo-*")
            while '"event": "ready"' not in log_path.read_text():
                time.sleep(0.02)
            if "encoder" not in arguments:
                body = {"model": "mimo-nano", "messages": [{"role": "user", "content": "go on"}], "stream": True}
                data = json.dumps(body | {"max_tokens": 2000, "ignore_eos": True}).encode()
                request = urllib.request.Request(f"{service.url}/v1/chat/completions", data)
                request.add_header("Content-Type", "application/json")
                answer = urllib.request.urlopen(request, timeout=60)
                answer.read(20)
                process.send_signal(number)
                # The same stop heard twice, as from `timeout`, is one.
                process.send_signal(number)
                time.sleep(0.8)
                assert process.poll() is None
            else:
                os.kill(service.stages()["encoder-0"], signal.SIGSTOP)
                process.send_signal(number)
                time.sleep(0.8)
            stages = service.stages()
            sent_s = time.monotonic()
            process.send_signal(number)
            assert process.wait(20) == 128 + number, log_path.read_text()[-3000:]
            assert time.monotonic() - sent_s < 5
        finally:
            process.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in stages.values())
    assert not runtime_dir.exists()
    assert list(Path("/dev/shm").glob(f"{runtime_dir.name}*")) == []
    told = [json.loads(line) for line in log_path.read_text().splitlines()]
    assert all({"time", "level", "process", "message"} <= line.keys() for line in told), told
    (ready,) = [line for line in told if line.get("event") == "ready"]
    assert ready["url"] == service.url
    (stopping,) = [line for line in told if line.get("event") == "stopping"]
    assert "a second Ctrl-C or SIGTERM ends it now" in stopping["message"]
    assert [line["exit_code"] for line in told if line.get("event") == "killed"] == [128 + number]


@pytest.mark.parametrize("mode", ["epd", "unified"])
@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("engine.kv_budget_bytes=100000", "100000"),
        ("engine.dtype=float7", "float7"),
        ("encoder.dtype=x", "encoder.dtype"),
    ],
)
def test_settings_that_cannot_work_end_with_code_2(mode: str, setting: str, word: str) -> None:
    command = [sys.executable, "-m", "cli", "serve", "--mode", mode, "--port", str(free_port()), "--set", setting]
    arguments: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False, "timeout": 120}
    done = subprocess.run(command, **arguments)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr.replace(",", "")
    assert "Traceback" not in done.stderr
