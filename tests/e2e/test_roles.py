"""Roles served by separate commands that only know each other's addresses and one secret."""

import json
import os
import pickle
import re
import secrets
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.roles import Cluster, Load, Role, stream_text
from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, file_url, text_of

pytestmark = pytest.mark.e2e


def question(file: str) -> list[dict[str, Any]]:
    known = KNOWN_ANSWERS[file]
    kind = f"{known.modality}_url"
    return [{"type": kind, kind: {"url": file_url(file)}}, {"type": "text", "text": known.question}]


def body_of(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "mimo-nano", "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of each; the gateway also knows where a second prefill and decode worker will be."""
    cluster = Cluster(tmp_path_factory.mktemp("roles"))
    try:
        encoder = cluster.worker("encoder-worker")
        stages = {role: cluster.worker(role) for role in ("prefill", "decode")}
        others = {role: f"tcp://127.0.0.2:{worker.listen.rpartition(':')[2]}" for role, worker in stages.items()}
        cluster.gateway(
            *("--encoders", encoder.listen.replace("127.0.0.1", "localhost"), "--media-root", str(SAMPLES)),
            *(flag for role, worker in stages.items() for flag in (f"--{role}", worker.listen)),
            *(flag for role, address in others.items() for flag in (f"--{role}", address)),
        )
        for role in cluster.roles.values():
            role.service.wait_ready()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def gateway(cluster: Cluster) -> Role:
    return cluster.roles["gateway"]


@pytest.mark.parametrize("file", [file for file, known in KNOWN_ANSWERS.items() if known.modality != "text"])
def test_media_are_answered_as_on_one_machine(gateway: Role, file: str) -> None:
    answer = gateway.service.ask(question(file))
    assert text_of(answer) == KNOWN_ANSWERS[file].answer


def test_many_streams_at_once(gateway: Role) -> None:
    files = [file for file, known in KNOWN_ANSWERS.items() if known.modality != "text"]
    asked = [files[i % len(files)] for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        texts = list(threads.map(lambda file: stream_text(gateway.url, body_of(question(file))), asked))
    assert texts == [KNOWN_ANSWERS[file].answer for file in asked]


def test_every_role_answers_probes(cluster: Cluster) -> None:
    for name in ("prefill", "decode", "encoder-worker"):
        service = cluster.roles[name].service
        assert [service.get(path).status for path in ("/health", "/ready")] == [200, 200]
        metrics = service.get("/metrics").body["text"]
        stage = name.removesuffix("-worker")
        assert re.search(rf"^mimo_{stage}_ready{{.*}} 1.0$", metrics, re.MULTILINE)
        others = {"prefill", "decode", "encoder", "gateway"} - {stage}
        assert not re.search(rf"^mimo_({'|'.join(others)})_", metrics, re.MULTILINE)


def test_another_secret_gets_nowhere(cluster: Cluster, gateway: Role) -> None:
    other = cluster.directory / "other.key"
    other.write_text(secrets.token_hex(32))
    flags = ("--cluster-key-file", str(other))
    encoder, prefill, decode = (cluster.roles[name].listen for name in ("encoder-worker", "prefill", "decode"))
    addresses = ("--encoders", encoder, "--prefill", prefill, "--decode", decode)
    stranger = cluster.gateway(*addresses, *flags, name="gateway-stranger")
    stranger.wait_for_log("lets nobody in: its cluster key is not the one of this process")
    stranger.wait_for_log("gateway serves")
    deadline_s = time.monotonic() + 20
    # One handshake that fails says nothing yet; each channel has tried more than once before it is sure.
    while (waiting := stranger.service.get("/ready")).body["waiting_for"]["prefill"] != [
        f"{prefill}: refuses this process: another cluster key?"
    ]:
        assert time.monotonic() < deadline_s, waiting
        time.sleep(0.1)
    assert waiting.status == 503
    told = "refused a connection to"
    while told not in cluster.roles["prefill"].log:
        assert time.monotonic() < deadline_s
    assert cluster.end("gateway-stranger") == 0
    assert cluster.roles["prefill"].log.count(told) == 1
    everything = "".join(path.read_text() for path in cluster.directory.glob("*.log"))
    assert cluster.key not in everything
    assert other.read_text() not in everything
    assert text_of(gateway.service.ask(question("picture.png"))) == KNOWN_ANSWERS["picture.png"].answer


def test_garbage_at_every_port_leaves_everybody_healthy(cluster: Cluster, gateway: Role) -> None:
    garbage = [pickle.dumps({"a": list(range(50_000))}), b"GET / HTTP/1.1\r\n\r\n" * 1000, bytes(1 << 20)]
    # ZMTP's greeting, and then a frame that announces a terabyte.
    huge = b"\x02" + struct.pack(">Q", 1 << 40) + bytes(1 << 16)
    garbage += [
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + name.ljust(20, b"\0") + bytes(32) + huge for name in (b"CURVE", b"NULL")
    ]
    workers = [cluster.roles[name] for name in ("prefill", "decode", "encoder-worker")]
    before = {role.name: (role.service.stages(), _memory_kib(role)) for role in workers}
    ports = [int(url.rpartition(":")[2]) for role in workers for url in (role.listen, role.url)]
    for port in ports:
        for data in garbage:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, suppress(OSError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
    assert text_of(gateway.service.ask(question("picture.png"))) == KNOWN_ANSWERS["picture.png"].answer
    for role in workers:
        stages, kib = before[role.name]
        assert role.service.stages() == stages
        assert role.service.get("/ready").status == 200
        assert _memory_kib(role) < kib + (64 << 10)


def _memory_kib(role: Role) -> int:
    """Of the stage's process."""
    (pid,) = role.service.stages().values()
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_worker_that_is_killed_costs_no_request(cluster: Cluster, gateway: Role, name: str) -> None:
    load = Load(gateway.url, [body_of(question(file)) for file in ("picture.png", "tones.wav")])
    try:
        _wait_for(lambda: len(load.answers) >= 2)
        (pid,) = cluster.roles[name].service.stages().values()
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        cluster.roles[name].service.wait_ready()
    finally:
        load.stop()
    _check(load)


def test_workers_are_replaced_under_load_and_nobody_notices(cluster: Cluster, gateway: Role) -> None:
    """What a rolling update of each deployment does: the new one first, then SIGTERM to the old one."""
    load = Load(gateway.url, [body_of(question(file)) for file in ("picture.png", "tones.wav", "clip.mp4")])
    try:
        for role in ("decode", "prefill"):
            port = int(cluster.roles[role].listen.rpartition(":")[2])
            cluster.worker(role, host="127.0.0.2", port=port, name=f"new-{role}")
        for role in ("decode", "prefill"):
            cluster.roles[f"new-{role}"].service.wait_ready()
            _wait_for(lambda role=role: _num_ready(gateway, role) == 2)
            before = len(load.answers)
            assert cluster.end(role) == 0
            _wait_for(lambda before=before: len(load.answers) >= before + 4)
    finally:
        load.stop()
    _check(load)


def _num_ready(gateway: Role, stage: str) -> int:
    metrics = gateway.service.get("/metrics").body["text"]
    return sum(line.startswith(f"mimo_{stage}_ready{{") and line.endswith(" 1.0") for line in metrics.splitlines())


def _check(load: Load) -> None:
    """Every stream ended well, and the same question always had the same answer: the right one."""
    right = {
        json.dumps(body_of(question(file))["messages"]): known.answer
        for file, known in KNOWN_ANSWERS.items()
        if known.modality != "text"
    }
    wrong = Counter(text for asked, text in load.answers if text != right[asked])
    assert not wrong
    assert len(load.answers) >= 6


def _wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
