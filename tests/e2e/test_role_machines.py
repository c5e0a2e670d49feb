"""Roles on two machines: separate networks, separate shared memory, and names whose addresses change."""

import json
import time
from pathlib import Path

import pytest

from tests.e2e.namespaces import Machine, two_machines, why_impossible
from tests.e2e.roles import Cluster, Load, stream_text
from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, file_url

pytestmark = pytest.mark.e2e

PORTS = {"prefill": 7001, "decode": 7002, "encoder-worker": 7003}
FILES = ("picture.png", "tones.wav")


def body_of(file: str) -> dict[str, object]:
    known = KNOWN_ANSWERS[file]
    kind = f"{known.modality}_url"
    parts = [{"type": kind, kind: {"url": file_url(file)}}, {"type": "text", "text": known.question}]
    return {"model": "mimo-nano", "messages": [{"role": "user", "content": parts}]}


def test_stages_on_two_machines_and_one_that_moves(tmp_path: Path) -> None:
    """Gateway and prefill here, encoder and decode there; rows and KV cross the cable, encrypted. Nobody is found when
    the gateway starts; decode moves to another address under load; the cable is pulled for a while. None fails."""
    if (why := why_impossible()) is not None:
        pytest.skip(why)
    with two_machines() as (here, there):
        cluster = Cluster(tmp_path)
        try:
            here.run_inside(lambda: _run(cluster, here, there))
        finally:
            cluster.close()


def _run(cluster: Cluster, here: Machine, there: Machine) -> None:
    old, new = there.addresses
    for role, machine in (("prefill", here), ("encoder-worker", there)):
        listen = {"host": machine.addresses[0], "port": PORTS[role], "command": machine.command}
        cluster.worker(role, **listen)  # type: ignore[arg-type]
    cluster.worker("decode", host=old, port=PORTS["decode"], command=there.command)
    gateway = cluster.gateway(
        *(flag for role in ("prefill", "decode") for flag in (f"--{role}", f"tcp://{role}.test:{PORTS[role]}")),
        *("--encoders", f"tcp://encoder.test:{PORTS['encoder-worker']}", "--media-root", str(SAMPLES)),
        *("--set", "gateway.resolve_period_s=0.3"),
        host=here.addresses[0],
        command=here.command,
    )
    gateway.wait_for_log("tcp://decode.test:7002 cannot be resolved")
    gateway.wait_for_log("gateway serves")
    assert gateway.service.get("/ready").status == 503
    names = {"prefill.test": here.addresses, "encoder.test": [old], "decode.test": [old]}
    here.set_hosts(names)
    gateway.service.wait_ready()
    for file in FILES:
        assert stream_text(gateway.url, body_of(file)) == KNOWN_ANSWERS[file].answer

    load = Load(gateway.url, [body_of(file) for file in FILES])
    try:
        cluster.worker("decode", host=new, port=PORTS["decode"], name="new-decode", command=there.command)
        cluster.roles["new-decode"].wait_for_log("ready after")
        here.set_hosts(names | {"decode.test": [new]})
        gateway.wait_for_log(f"decode: found tcp://{new}:7002")
        assert cluster.end("decode") == 0
        # For a while nothing can be resolved at all: what is known goes on.
        here.set_hosts({})
        time.sleep(1.0)
        _wait_until_more(load, len(load.answers) + 4)
        # The other machine is gone without a word, for longer than it takes to notice.
        there.plug(in_=False)
        time.sleep(6.0)
        there.plug(in_=True)
        _wait_until_more(load, len(load.answers) + load.num_clients + 4)
    finally:
        load.stop()
    right = {json.dumps(body_of(file)["messages"]): KNOWN_ANSWERS[file].answer for file in FILES}
    assert [text for asked, text in load.answers if text != right[asked]] == []
    assert f"tcp://{old}:7002 is no longer listed" in gateway.log
    assert f"{old}:7002" not in gateway.service.get("/metrics").body["text"]


def _wait_until_more(load: Load, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(load.answers) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
