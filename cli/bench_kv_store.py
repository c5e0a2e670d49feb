"""How fast pages of KV come out of a store: from a Redis server and from the local store, in batches and with checksums
verified, against the same values asked of the Redis server one by one and taken as they come."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from cli.bench_case import Bars, BenchFailed, Case, Contest, Findings, Setting
from epd import open_store, remove_local_store

if TYPE_CHECKING:
    from redis import Redis

__all__ = ["store_cases"]

_VALUE_BYTES: Final = 256 << 10
_NUM_VALUES: Final = 64
_STORE_BYTES: Final = 64 << 20
_IO_BYTES: Final = 1 << 20
# A busy machine makes it slow, not a miss.
_TIMEOUT_S: Final = 5.0
_START_TIMEOUT_S: Final = 10.0
_GROUP: Final = "bench"
_ONE_BY_ONE: Final = "one GET after the other, by the client of the same library, nothing verified"


def store_cases() -> tuple[Case, ...]:
    """`tiers.redis_get_256k` and `tiers.local_get_256k`."""
    words = {"redis": "a Redis server on this host", "local": "the local store"}
    return tuple(
        Case(
            name=f"tiers.{kind}_get_256k",
            unit="s",
            ours=f"pages read from {where} into host memory, in batches, checksums verified",
            baseline=_ONE_BY_ONE,
            limit="as many bytes copied from memory to memory",
            open=partial(_opened, kind=kind),
            needs="redis",
        )
        for kind, where in words.items()
    )


@contextmanager
def _opened(setting: Setting, bars: Bars, *, kind: str) -> Iterator[Contest]:
    num_values = _NUM_VALUES // 8 if setting.quick else _NUM_VALUES
    with TemporaryDirectory(prefix="mimo-bench-store-") as folder, ExitStack() as stack:
        bars.begin("starting redis-server", 1)
        plain = stack.enter_context(_running_redis(Path(folder)))
        url = plain[0] if kind == "redis" else f"local:{folder}/store"
        # Its memory is elsewhere, and would stay.
        stack.callback(remove_local_store, Path(folder) / "store")
        store = stack.enter_context(_Store.opened(url))
        keys = [b"%d" % index for index in range(num_values)]
        values = [secrets.token_bytes(_VALUE_BYTES) for _ in keys]
        store.put(keys, values)
        client = plain[1]
        for key, value in zip(keys, values, strict=True):
            client.set(key, value)
        source, target = memoryview(b"".join(values)), memoryview(bytearray(num_values * _VALUE_BYTES))
        times_s: dict[str, list[float]] = {"ours": [], "one_by_one": []}

        def ours() -> float:
            times_s["ours"].append(_timed(lambda: store.get(keys, target)))
            return times_s["ours"][-1]

        def one_by_one() -> None:
            for index, key in enumerate(keys):
                value = client.get(key)
                if not isinstance(value, bytes):
                    raise BenchFailed("redis-server has lost a value")
                target[index * _VALUE_BYTES : (index + 1) * _VALUE_BYTES] = value

        def baseline() -> float:
            times_s["one_by_one"].append(_timed(one_by_one))
            return times_s["one_by_one"][-1]

        def copied() -> float:
            return _timed(lambda: target.__setitem__(slice(None), source))

        ours()
        if target != source:
            raise BenchFailed(f"{url} gives other bytes than were put")
        baseline()
        num_bytes = num_values * _VALUE_BYTES
        yield Contest(
            detail=f"{num_values} values of {_VALUE_BYTES >> 10} KiB, {_IO_BYTES >> 20} MiB per call",
            ours=ours,
            baseline=baseline,
            limit=copied,
            findings=lambda: _speeds(times_s, num_bytes),
        )


def _speeds(times_s: dict[str, list[float]], num_bytes: int) -> Findings:
    mb_per_s = {who: round(num_bytes / min(times) / 1e6) for who, times in times_s.items()}
    return Findings(
        lines=(f"at best {mb_per_s['ours']:,} MB/s, one by one {mb_per_s['one_by_one']:,} MB/s",),
        figures={"best_mb_per_s": mb_per_s},
    )


def _timed(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


class _Store:
    """A store as the engine opens it, waited for."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = open_store(
            url,
            memory_bytes=_STORE_BYTES,
            disk_bytes=2 * _STORE_BYTES,
            io_bytes=_IO_BYTES,
            timeout_s=_TIMEOUT_S,
            ttl_s=None,
        )

    @classmethod
    @contextmanager
    def opened(cls, url: str) -> Iterator[_Store]:
        store = cls(url)
        try:
            yield store
        finally:
            store._client.close()

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        waiting = _Waiting(f"{self._url} did not keep what was put")
        items = [(key, [value]) for key, value in zip(keys, values, strict=True)]
        self._client.put(_GROUP, items, waiting.on_done)
        waiting.wait()

    def get(self, keys: list[bytes], target: memoryview) -> None:
        waiting = _Waiting(f"{self._url} has lost a value")
        starts = range(0, len(target), _VALUE_BYTES)
        items = [(key, [target[start : start + _VALUE_BYTES]]) for key, start in zip(keys, starts, strict=True)]
        self._client.get(_GROUP, items, deadline_s=time.monotonic() + 60, on_done=waiting.on_done)
        waiting.wait()


class _Waiting:
    """For the answers to one call."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._is_done = threading.Event()
        self._answers: tuple[bool, ...] = ()

    def on_done(self, answers: tuple[bool, ...]) -> None:
        self._answers = answers
        self._is_done.set()

    def wait(self) -> None:
        """Raises BenchFailed when not all are yes."""
        self._is_done.wait(60)
        if not self._answers or not all(self._answers):
            raise BenchFailed(self._fault)


@contextmanager
def _running_redis(directory: Path) -> Iterator[tuple[str, Redis]]:
    """A server of its own, its URL and a client with the library's defaults. Raises BenchFailed without the program."""
    import redis

    program = shutil.which("redis-server")
    if program is None:
        raise BenchFailed("redis-server is not installed; on Debian: apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + _START_TIMEOUT_S
        while not _listens(port):
            if server.poll() is not None or time.monotonic() > until_s:
                raise BenchFailed("redis-server does not start")
            time.sleep(0.02)
        with redis.Redis(host="127.0.0.1", port=port) as client:
            yield f"redis://127.0.0.1:{port}/0", client
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
