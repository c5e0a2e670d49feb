"""Load on an encoder's HTTP server: so many requests at a time, each timed until the last byte of its answer."""

import asyncio
import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from cli.bench_case import BenchFailed

# Behind 63 others that are encoded one by one.
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of requests took."""

    elapsed_s: float
    latencies_s: NDArray[np.float64]
    num_cached: int
    """Answers that a cache gave."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.latencies_s) / self.elapsed_s

    def latency_s(self, quantile: float) -> float:
        return float(np.quantile(self.latencies_s, quantile))


def put_load(server: str, urls: Sequence[str], *, concurrency: int) -> Load:
    """One request per URL, in this order, so many at a time. Raises BenchFailed for an answer that is none."""
    return uvloop.run(_put_load(server, urls, concurrency))


def encoded(server: str, urls: Sequence[str]) -> list[NDArray[Any]]:
    """The rows of each URL, `[num_rows, width]`, asked for one after another. Raises BenchFailed."""

    async def ask_all() -> list[NDArray[Any]]:
        async with _session() as session:
            return [_rows(await _ask(session, server, url)) for url in urls]

    return uvloop.run(ask_all())


async def _put_load(server: str, urls: Sequence[str], concurrency: int) -> Load:
    """Whoever has its answer sends the next request at once."""
    latencies_s: list[float] = []
    num_cached = 0
    left = iter(urls)

    async def client(session: aiohttp.ClientSession, left: Iterator[str]) -> None:
        nonlocal num_cached
        for url in left:
            started_s = time.perf_counter()
            answer = await _ask(session, server, url)
            latencies_s.append(time.perf_counter() - started_s)
            num_cached += answer.data[0].cached

    async with _session() as session:
        started_s = time.perf_counter()
        await asyncio.gather(*(client(session, left) for _ in range(concurrency)))
        elapsed_s = time.perf_counter() - started_s
    return Load(elapsed_s, np.array(latencies_s), num_cached)


class _Datum(msgspec.Struct):
    """Of the reply of `POST /v1/encode`, what the benches look at."""

    embedding: str
    """base64 of the rows."""
    dtype: str
    rows: int
    width: int
    cached: bool


class _Answer(msgspec.Struct):
    data: tuple[_Datum]


_ANSWERS = msgspec.json.Decoder(_Answer)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), trust_env=False
    )


async def _ask(session: aiohttp.ClientSession, server: str, url: str) -> _Answer:
    body = {"input": [{"type": "image_url", "image_url": {"url": url}}]}
    try:
        async with session.post(f"{server}/v1/encode", json=body) as response:
            content = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchFailed(f"no answer from {server}: {error or type(error).__name__}") from error
    if response.status != 200:
        raise BenchFailed(f"{server} answered {response.status}: {content[:300].decode(errors='replace')}")
    try:
        return _ANSWERS.decode(content)
    except msgspec.DecodeError as error:
        raise BenchFailed(f"{server}: this is not what a server of embeddings answers: {error}") from error


def _rows(answer: _Answer) -> NDArray[Any]:
    datum = answer.data[0]
    return np.frombuffer(base64.b64decode(datum.embedding), dtype=datum.dtype).reshape(datum.rows, datum.width)
