"""SIGKILL of the supervisor under load: what was asked before is answered, and nothing is left."""

import base64
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.service import ROOT, Answer, Service, free_port

pytestmark = pytest.mark.e2e

SHM = Path("/dev/shm")
NUM_REQUESTS = 16


def picture(seed: int) -> dict[str, Any]:
    """320 x 240 pixels that no other has, in few bytes."""
    file = io.BytesIO()
    Image.new("RGB", (320, 240), (seed, 255 - seed, 0)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def num_inflight(service: Service) -> int:
    found = re.search(r"^mimo_encoder_http_inflight_requests (\S+)$", service.get("/metrics").body["text"], re.M)
    assert found is not None
    return int(float(found[1]))


def is_over(pids: Sequence[int]) -> bool:
    """Whether all have ended, waited for by whoever has to or not."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                return False
        except (FileNotFoundError, ProcessLookupError):
            continue
    return True


def test_what_was_asked_before_is_answered_and_nothing_is_left(tmp_path: Path) -> None:
    port, log_path = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "cli", "serve", "--role", "encoder", "--encoders", "2", "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    bodies = [{"input": [picture(4 * number + part) for part in range(4)]} for number in range(NUM_REQUESTS)]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment) as supervisor,
        ThreadPoolExecutor(NUM_REQUESTS) as clients,
    ):
        service = Service(f"http://127.0.0.1:{port}", supervisor.pid, log_path)
        try:
            service.wait_ready()
            pids = list(service.stages().values())
            (run_directory,) = tmp_path.glob("mimo-*")
            assert list(SHM.glob(f"{run_directory.name}-*"))
            answers = [clients.submit(service.post, "/v1/encode", body) for body in bodies]
            deadline_s = time.monotonic() + 60
            # Who is not there yet is refused by a front that stops.
            while sum(answer.done() for answer in answers) + num_inflight(service) < NUM_REQUESTS:
                assert time.monotonic() < deadline_s
            assert not all(answer.done() for answer in answers)
        finally:
            supervisor.kill()
        outcomes = [outcome(answer.result) for answer in answers]
        assert outcomes == [200] * NUM_REQUESTS, log_path.read_text()[-4000:]
        while not is_over(pids):
            assert time.monotonic() < deadline_s, "a stage outlives its supervisor"
            time.sleep(0.05)
    assert len(pids) == 3
    assert list(SHM.glob(f"{run_directory.name}-*")) == []


def outcome(result: Any) -> int | str:
    try:
        answer: Answer = result()
    except OSError as error:
        return repr(error)
    return answer.status
