"""Records as strings of a Redis server, which several hosts may share. Its `maxmemory` and policy bound the size.

The client library would try a dead server again and again, for seconds; here a failure is known within the time limit,
and nothing is tried twice: a miss costs one forward of the tower.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from encoder.tiers.base import Buffer, TierFailed
from preprocess.types import MediaKey

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PREFIX: Final = "mimo:embedding:"
_MAX_CONNECTIONS: Final = 8
# A Redis string ends at 512 MiB.
_MAX_RECORD_BYTES: Final = 500 << 20


class RedisTier:
    """One server. Used on one event loop."""

    def __init__(self, url: str, *, ttl_s: float | None, timeout_s: float) -> None:
        """Connects when it is first used. Raises TierFailed without the package `redis`, ValueError for a bad URL."""
        try:
            import redis.asyncio
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as error:
            raise TierFailed("the package redis is missing; install it with: pip install redis") from error
        where = urlsplit(url)
        self._name = f"{where.scheme}://{where.hostname or ''}:{where.port or 6379}{where.path}"
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._errors = (redis.exceptions.RedisError, OSError)
        # Who finds all connections in use waits for one, like for an answer.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )
        self._redis: Redis = redis.asyncio.Redis.from_pool(pool)

    @property
    def name(self) -> str:
        return self._name

    async def get(self, key: MediaKey) -> bytes | None:
        try:
            # With a time to live: what is read lives on.
            name, ttl_ms = _PREFIX + key, self._ttl_ms
            content = await (self._redis.get(name) if ttl_ms is None else self._redis.getex(name, px=ttl_ms))
        except self._errors as error:
            raise self._failed(error) from error
        return content if isinstance(content, bytes) else None

    async def put(self, key: MediaKey, record: Sequence[Buffer]) -> None:
        if sum(map(len, record)) > _MAX_RECORD_BYTES:
            return
        try:
            await self._redis.set(_PREFIX + key, b"".join(record), px=self._ttl_ms)
        except self._errors as error:
            raise self._failed(error) from error

    async def discard(self, key: MediaKey) -> None:
        try:
            await self._redis.delete(_PREFIX + key)
        except self._errors as error:
            raise self._failed(error) from error

    async def close(self) -> None:
        await self._redis.aclose()

    def _failed(self, error: Exception) -> TierFailed:
        # The library's own words may carry the URL's password.
        return TierFailed(f"{self._name}: {type(error).__name__}")
