"""`mimo serve --role encoder`: real processes, asked over HTTP as its users ask."""

import base64
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file

from tests.e2e.service import ROOT, SAMPLES, Service, file_url, running_service
from tests.security.hostile import send_pickles_everywhere

pytestmark = pytest.mark.e2e

FILES = {"picture.png": "image", "clip.mp4": "video", "tones.wav": "audio"}


def run_dir(service: Service) -> str:
    """The name of the run's directory, with which everything in shared memory begins."""
    words = Path(f"/proc/{service.stages()['front']}/cmdline").read_text().split("\0")
    return Path(words[words.index("--settings") + 1]).parent.name


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two replicas behind a front."""
    log_dir = tmp_path_factory.mktemp("encoder")
    with running_service(log_dir, "--role", "encoder", "--encoders", "2", "--media-root", str(SAMPLES)) as service:
        assert sorted(service.stages()) == ["encoder-0", "encoder-1", "front"]
        name = run_dir(service)
        assert list(Path("/dev/shm").glob(f"{name}-*"))
        yield service
    assert not list(Path("/dev/shm").glob(f"{name}-*"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.float32]]:
    """What `mimo encode` makes of the same files."""
    out = tmp_path_factory.mktemp("out") / "media.safetensors"
    files = [str(SAMPLES / name) for name in FILES]
    command = [sys.executable, "-m", "cli", "encode", *files, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    tensors = load_file(out)
    return {Path(name).name: rows for name, rows in tensors.items()}


def url_part(name: str) -> dict[str, Any]:
    kind = f"{FILES[name]}_url"
    return {"type": kind, kind: {"url": file_url(name)}}


def rows_of(item: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(item["embedding"]), np.float32).reshape(item["rows"], item["width"])


def form_body(fields: list[tuple[str, str, bytes]]) -> tuple[bytes, str]:
    """multipart/form-data of files: field, file name, content."""
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for field, name, content in fields
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def post(service: Service, body: bytes, content_type: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/v1/encode", body, {"Content-Type": content_type} | headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def picture(seed: int, height: int = 240, width: int = 320) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def test_pickles_are_not_read_anywhere(service: Service) -> None:
    """SGLang's own messages are pickles; what is not on the short list of those is none."""
    pids = service.stages()
    send_pickles_everywhere(service)
    assert service.stages() == pids
    assert service.get("/health").status == 200


def test_rows_by_url_and_by_upload_are_those_of_the_command_line(
    service: Service, expected: dict[str, NDArray[np.float32]]
) -> None:
    by_url = service.post("/v1/encode", {"input": [url_part(name) for name in FILES]})
    assert by_url.status == 200
    body, kind = form_body([(modality, name, (SAMPLES / name).read_bytes()) for name, modality in FILES.items()])
    status, by_upload = post(service, body, kind)
    assert status == 200
    for name, one, other in zip(FILES, by_url.body["data"], by_upload["data"], strict=True):
        assert rows_of(one).tobytes() == expected[name].tobytes(), name
        assert rows_of(other).tobytes() == expected[name].tobytes(), name
        assert one["key"] == other["key"]


def test_a_bad_item_fails_alone_and_by_name(service: Service) -> None:
    bad = {"type": "image_url", "image_url": {"url": file_url("none.png")}}
    answer = service.post("/v1/encode", {"input": [bad, url_part("picture.png")]})
    assert answer.status == 200
    assert [item["object"] for item in answer.body["data"]] == ["error", "embedding"]
    assert answer.body["data"][0]["error"]["param"] == "input[0].image_url"
    answer = service.post("/v1/encode", {"input": [url_part("picture.png") | {"max_pixels": 10}]})
    assert (answer.status, answer.body["error"]["param"]) == (400, "input[0].max_pixels")
    assert answer.headers["X-Request-Id"]


def test_probes_are_quick_while_the_replicas_are_at_their_limit(service: Service) -> None:
    """The bound is loose: the machine of a test may have two cores, and everything here wants them."""
    took_s: list[float] = []
    over = threading.Event()

    def probe() -> None:
        while not over.is_set():
            started_s = time.perf_counter()
            for path in ("/health", "/ready"):
                assert service.get(path).status == 200
            took_s.append((time.perf_counter() - started_s) / 2)
            over.wait(0.02)

    with ThreadPoolExecutor(17) as threads:
        probing = threads.submit(probe)
        try:
            uploads = [form_body([("image", "a.jpg", picture(seed, 3000, 4000))]) for seed in range(16)]
            statuses = list(threads.map(lambda upload: post(service, *upload)[0], uploads))
        finally:
            over.set()
        probing.result()
    assert set(statuses) == {200}
    assert sorted(took_s)[len(took_s) * 9 // 10] < 0.5
    assert float(np.median(took_s)) < 0.1


def test_a_stop_under_load_fails_nobody(tmp_path: Path) -> None:
    with running_service(tmp_path, "--role", "encoder", "--encoders", "1") as service:
        name = run_dir(service)
        uploads = [form_body([("image", "a.jpg", picture(seed, 480, 640))]) for seed in range(40)]
        with ThreadPoolExecutor(40) as threads:
            asking = [threads.submit(post, service, *upload) for upload in uploads]
            deadline_s = time.monotonic() + 30
            while "mimo_encoder_http_inflight_requests 40.0" not in service.get("/metrics").body["text"]:
                assert time.monotonic() < deadline_s
                if any(future.done() for future in asking):
                    break
            os.kill(service.pid, signal.SIGTERM)
            statuses = [future.result()[0] for future in asking]
        # Whoever was taken gets an answer; a request that came too late hears so, and nobody is cut off.
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 30
    assert not list(Path("/dev/shm").glob(f"{name}-*"))


def test_a_replica_that_is_killed_costs_no_request(tmp_path: Path) -> None:
    with running_service(tmp_path, "--role", "encoder", "--encoders", "2") as service:
        uploads = [form_body([("image", "a.jpg", picture(seed, 480, 640))]) for seed in range(40)]
        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(post, service, *upload) for upload in uploads]
            time.sleep(0.2)
            service.kill("encoder-0")
            assert {future.result()[0] for future in asking} == {200}
            assert service.get("/health").status == 200
        service.wait_ready()


def test_a_role_that_is_none_is_told_which_there_are(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli", "serve", "--role", "cook"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "role is 'cook'; allowed: encoder, gateway, prefill, decode, encoder-worker" in " ".join(done.stderr.split())
