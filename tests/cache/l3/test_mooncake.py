"""A Mooncake store as a node: what goes with whom, and that its library's long waits are nobody else's."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

import pytest

from epd.cache.l3.base import NodeFailed, NodeTimedOut
from epd.cache.l3.mooncake_node import MooncakeAddress, MooncakeNode
from epd.cache.l3.open import open_store
from tests.fakes.mooncake_store import MooncakeStore, running_mooncake
from tests.fakes.store_calls import StoreCalls

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 5.0
IO_BYTES = 1 << 18


@pytest.fixture(scope="module")
def shared() -> Iterator[MooncakeStore]:
    with running_mooncake() as store:
        yield store


@contextlib.contextmanager
def opened(store: MooncakeStore, lend_bytes: int = 0) -> Iterator[MooncakeNode]:
    node = MooncakeNode(f"{store.url}?lend_bytes={lend_bytes}", io_bytes=IO_BYTES)
    try:
        yield node
    finally:
        node.close()


def got(node: MooncakeNode, keys: Sequence[bytes], timeout_s: float = TIMEOUT_S) -> list[bytes | None]:
    found: dict[int, bytes | None] = {}

    def sink(index: int, value: memoryview | None) -> None:
        assert index not in found
        found[index] = None if value is None else bytes(value)

    node.get(keys, sink, timeout_s=timeout_s)
    return [found[index] for index in range(len(keys))]


def put(node: MooncakeNode, items: dict[bytes, bytes]) -> list[bool]:
    return list(node.put([(key, [value]) for key, value in items.items()], timeout_s=TIMEOUT_S))


def until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(NodeFailed):
            if is_so():
                return
        assert time.monotonic() < end_s
        time.sleep(0.02)


def agents_of(pid: int) -> list[int]:
    """Processes of ours below that one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"mooncake_agent" in Path(f"/proc/{child}/cmdline").read_bytes()]


def has_ended(pid: int) -> bool:
    try:
        # Nothing is left of one that nobody has waited for yet.
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mooncake://127.0.0.1:50051", ("127.0.0.1:50051", "127.0.0.1", "tcp", "", 1, 0)),
        (
            "mooncake://m:1/?host=10.0.0.7&protocol=rdma&devices=mlx5_0,mlx5_1&replicas=2&lend_bytes=1024",
            ("m:1", "10.0.0.7", "rdma", "mlx5_0,mlx5_1", 2, 1024),
        ),
    ],
)
def test_addresses(url: str, address: tuple[str, str, str, str, int, int]) -> None:
    parsed = MooncakeAddress.parse(url)
    assert astuple(parsed) == address
    assert parsed.name == f"mooncake://{address[0]}"


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("mooncake://m", "no port, of 1 to 65535"),
        ("mooncake://m:1/path", "MASTER:PORT"),
        ("mooncake://m:1?size=3", "size; options it may have: host, protocol, devices, replicas, lend_bytes"),
        ("mooncake://m:1?protocol=udp", "tcp or rdma"),
        ("mooncake://m:1?replicas=0", "replicas.*from 1 on"),
        ("mooncake://m:1?lend_bytes=64MB", "lend_bytes.*'64MB'.*from 0 on"),
    ],
)
def test_addresses_that_are_none(url: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        MooncakeAddress.parse(url)


def test_what_is_missing_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NodeFailed, match=r"libibverbs.so.1.*pip install mooncake-transfer-engine-non-cuda.*apt-get"):
        MooncakeNode("mooncake://127.0.0.1:1", io_bytes=IO_BYTES)


def test_values_of_all_sizes(shared: MooncakeStore) -> None:
    with opened(shared) as node:
        values = {b"size %d" % size: os.urandom(size) for size in (0, 1, 4095, 4096, 70_000, IO_BYTES, IO_BYTES + 60)}
        many = {b"many %d" % number: os.urandom(100) for number in range(80)}
        assert put(node, values | many) == [True] * (len(values) + 80)
        assert got(node, [*values, b"missing", *many]) == [*values.values(), None, *many.values()]
        assert put(node, {b"before": b"1", b"too large": bytes(2 * IO_BYTES), b"after": b"2"}) == [True, False, True]
        assert got(node, [b"before", b"too large", b"after"]) == [b"1", None, b"2"]
        assert put(node, {b"before": b"a longer one"}) == [True]
        assert got(node, [b"before"]) == [b"a longer one"]


def test_what_was_just_read_can_be_discarded(shared: MooncakeStore) -> None:
    with opened(shared) as node, opened(shared) as other:
        put(node, {b"read": b"1"})
        assert got(other, [b"read"]) == [b"1"]
        node.touch([b"read", b"absent"], timeout_s=TIMEOUT_S)
        node.discard([b"read", b"absent"], timeout_s=TIMEOUT_S)
        assert list(other.exists([b"read"], timeout_s=TIMEOUT_S)) == [False]
        assert got(other, [b"read"]) == [None]


def test_what_is_lent_goes_with_its_owner_and_nothing_else() -> None:
    values = {b"%d" % number: os.urandom(1000) for number in range(60)}
    with running_mooncake() as store, opened(store) as node:
        second = store.lend(64 << 20)
        until(lambda: all(put(node, values)))
        second.kill()
        second.wait()
        # The library tries a while to reach the owner; it is let.
        found = got(node, [*values])
        assert all(value in (None, values[key]) for key, value in zip(values, found, strict=True))
        assert 0 < found.count(None) < len(values)
        left = [key for key, value in zip(values, found, strict=True) if value is not None]
        assert got(node, left) == [values[key] for key in left]


def test_a_process_may_lend_memory_itself() -> None:
    with running_mooncake(memory_bytes=16 << 20) as store, opened(store) as reader:
        until(lambda: put(reader, {b"k": b"v"}) == [True])
        large = {b"%d" % number: os.urandom(IO_BYTES) for number in range(100)}
        with opened(store, lend_bytes=64 << 20) as lender:
            until(lambda: put(lender, {b"mine": b"v"}) == [True])
            put(lender, large)
            # More than the other owner has room for.
            assert len(got(reader, [*large])) - got(reader, [*large]).count(None) > 64


def test_a_dead_master_costs_the_time_limit_and_forgets_everything() -> None:
    with running_mooncake() as store, opened(store) as node:
        assert put(node, {b"k": b"v"}) == [True]
        store.kill()
        for _ in range(5):
            begun_s = time.monotonic()
            with pytest.raises(NodeFailed, match=store.address):
                node.exists([b"k"], timeout_s=0.05)
            assert time.monotonic() - begun_s < 0.5
        store.restart()
        until(lambda: list(node.exists([b"k"], timeout_s=0.5)) == [False])
        until(lambda: put(node, {b"k": b"w"}) == [True])
        assert got(node, [b"k"]) == [b"w"]


def test_late_answers_are_taken_for_no_others() -> None:
    with running_mooncake() as store, opened(store) as node:
        assert put(node, {b"a": b"1", b"b": b"2"}) == [True, True]
        store.pause()
        for _ in range(3):
            begun_s = time.monotonic()
            with pytest.raises(NodeTimedOut):
                got(node, [b"a"], timeout_s=0.05)
            assert time.monotonic() - begun_s < 0.5
        with pytest.raises(NodeTimedOut):
            node.put([(b"a", [b"3"])], timeout_s=0.05)
        store.resume()
        until(lambda: list(node.exists([b"b", b"c"], timeout_s=0.5)) == [True, False])
        assert got(node, [b"b", b"c", b"a"]) == [b"2", None, b"1"]


def test_a_put_waits_for_a_late_read_of_the_same_memory(shared: MooncakeStore) -> None:
    before = agents_of(os.getpid())
    with opened(shared) as node:
        assert put(node, {b"read late": b"1" * 1000}) == [True]
        (agent,) = {*agents_of(os.getpid())} - {*before}
        os.kill(agent, signal.SIGSTOP)
        with pytest.raises(NodeTimedOut):
            got(node, [b"read late"], timeout_s=0.02)
        resuming = threading.Timer(0.2, os.kill, (agent, signal.SIGCONT))
        resuming.start()
        assert put(node, {b"put meanwhile": b"2" * 1000}) == [True]
        resuming.join()
        assert got(node, [b"put meanwhile"]) == [b"2" * 1000]


def test_a_master_that_was_never_there(shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    del shared
    # What a start and an end would wait for it.
    monkeypatch.setattr("epd.cache.l3.mooncake_node._OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr("epd.cache.l3.mooncake_node._CLOSE_TIMEOUT_S", 0.1)
    node = MooncakeNode("mooncake://127.0.0.1:9", io_bytes=IO_BYTES)
    for _ in range(3):
        begun_s = time.monotonic()
        # As soon as the attempt of the start is over, each says so; before that, each lasts as long as it may.
        with pytest.raises(NodeFailed, match=r"127\.0\.0\.1:9"):
            node.exists([b"k"], timeout_s=0.05)
        assert time.monotonic() - begun_s < 0.5
    node.close()


def test_its_process_is_started_again_and_ends_with_the_node(shared: MooncakeStore) -> None:
    before = agents_of(os.getpid())
    with opened(shared) as node:
        assert put(node, {b"agent": b"v"}) == [True]
        (agent,) = {*agents_of(os.getpid())} - {*before}
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(NodeFailed, match="has ended"):
            node.exists([b"agent"], timeout_s=TIMEOUT_S)
        assert got(node, [b"agent"]) == [b"v"]
        assert node.usage().counters == {"agents": 2}
    assert agents_of(os.getpid()) == before


def test_its_process_ends_with_a_server_that_is_killed(shared: MooncakeStore) -> None:
    script = (
        "import sys, time; from epd.cache.l3.mooncake_node import MooncakeNode;"
        f"node = MooncakeNode({shared.url!r}, io_bytes=1000);"
        "node.exists([b'k'], timeout_s=5); print('open', flush=True); time.sleep(60)"
    )
    server = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "open\n"
        (agent,) = agents_of(server.pid)
        server.kill()
    until(lambda: has_ended(agent))


def test_the_first_call_need_not_wait_for_the_store_to_be_found(shared: MooncakeStore) -> None:
    with opened(shared, lend_bytes=64 << 20) as node:
        assert list(node.exists([b"first"], timeout_s=0.5)) == [False]


def test_opened_by_its_url(shared: MooncakeStore) -> None:
    client = open_store(
        shared.url, memory_bytes=0, disk_bytes=0, io_bytes=1000, timeout_s=2.0, ttl_s=None, value_bytes=lambda _: 2500
    )
    calls = StoreCalls(client)
    values = {b"by url": os.urandom(2500)}
    assert calls.put(values) == (True,)
    assert calls.get({b"by url": 2500}) == values
    assert calls.exists([b"by url", b"no"]) == [True, False]
    client.close()
    calls.check()
