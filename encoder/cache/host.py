"""The life of an arena: made before the first encoder of a deployment starts, unlinked after the last one has ended.

Who made it unlinks it. Should that process be killed, the last encoder to leave does.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from encoder.cache.arena import SHM_DIR, remove_arena
from encoder.cache.holder import Process
from encoder.cache.index import Index, create_arena
from encoder.config import EncoderConfig
from encoder.errors import ArenaLocked, ArenaUnavailable

logger = logging.getLogger(__name__)


@contextmanager
def embedding_arena(config: EncoderConfig, name: str) -> Iterator[str]:
    """The arena `name` while the block runs, for all encoders of this host. Raises ArenaUnavailable."""
    create_arena(name, size_bytes=config.arena_bytes, page_bytes=config.page_bytes)
    try:
        yield name
    finally:
        remove_arena(name)


def remove_orphaned(name: str) -> None:
    """Unlink an arena whose maker has died, unless another process that uses it lives. For who has closed its store.

    Where the maker itself calls, as with all stages in one process, it unlinks the arena in its own time.
    """
    with contextlib.suppress(ArenaUnavailable, ArenaLocked, sqlite3.OperationalError):
        with contextlib.closing(Index(name)) as index, index.reading():
            makers = index.rows("SELECT pid, started_ticks FROM arena")
            holders = index.rows("SELECT pid, started_ticks FROM holders")
        users = {Process(pid, started_ticks) for pid, started_ticks in (*makers, *holders)}
        me = Process.current()
        if me not in {Process(*maker) for maker in makers} and not any(user.is_alive for user in users - {me}):
            logger.info("the arena %s goes: who made it was killed, and nobody else uses it", name)
            remove_arena(name)


@contextmanager
def private_arena(config: EncoderConfig, prefix: str, incarnation: str) -> Iterator[str]:
    """An arena of one encoder alone, `prefix.incarnation`; those that dead processes left under `prefix` are removed.

    Its name is new with every start, so that a reader never takes it for that of an earlier process. Raises
    ArenaUnavailable.
    """
    for stale in SHM_DIR.glob(f"{prefix}.*"):
        stale.unlink(missing_ok=True)
    with embedding_arena(config, f"{prefix}.{incarnation}") as name:
        yield name
