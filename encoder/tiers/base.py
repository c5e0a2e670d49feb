"""What a second tier must be able to do, and how a setting names one. Tiers do not look into records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from preprocess.types import MediaKey

Buffer = bytes | memoryview
REDIS_SCHEMES = ("redis", "rediss", "unix")


class TierFailed(Exception):
    """The tier could not do it, for a reason of its own: a full disk, a server that is gone. Says what."""


class EmbeddingTier(Protocol):
    """Records by key, of all models: a key tells them apart. Any method may take as long as it likes; callers do not.

    What `put` has finished is there until it is evicted or discarded, whoever else uses the tier and whoever dies.
    """

    @property
    def name(self) -> str:
        """For people; without passwords."""
        ...

    async def get(self, key: MediaKey) -> Buffer | None:
        """The record, or None. Raises TierFailed, RecordDamaged for a thing in its place that is no record."""
        ...

    async def put(self, key: MediaKey, record: Sequence[Buffer]) -> None:
        """Keep the pieces as one record. Raises TierFailed."""
        ...

    async def discard(self, key: MediaKey) -> None:
        """Forget a record, if it is there. Raises TierFailed."""
        ...

    async def close(self) -> None: ...


def check_store_url(url: str) -> None:
    """Raises ValueError saying what an embedding store may be."""
    scheme = urlsplit(url).scheme
    if not url or scheme in REDIS_SCHEMES or (not scheme and Path(url).expanduser().is_absolute()):
        return
    shown = url if "@" not in url else f"{scheme}://..."
    raise ValueError(
        f"embedding_store is {shown!r}; allowed: an absolute path of a directory, or redis://HOST:PORT/DB "
        "(also rediss: and unix:)"
    )


def open_tier(url: str, *, max_bytes: int, ttl_s: float | None, timeout_s: float) -> EmbeddingTier:
    """The tier that `url` names. `max_bytes` bounds a directory, `ttl_s` the age of what Redis keeps unread.

    Raises ValueError for another kind of URL, TierFailed for a directory that cannot be used or a missing package.
    """
    check_store_url(url)
    if urlsplit(url).scheme in REDIS_SCHEMES:
        from encoder.tiers.redis_tier import RedisTier

        return RedisTier(url, ttl_s=ttl_s, timeout_s=timeout_s)
    from encoder.tiers.directory import DirectoryTier

    return DirectoryTier(Path(url).expanduser(), max_bytes=max_bytes)
