"""The life of an arena: made before the first encoder of a deployment starts, unlinked after the last one has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

from encoder.cache.arena import SHM_DIR, remove_arena
from encoder.cache.index import create_arena
from encoder.config import EncoderConfig


@contextmanager
def embedding_arena(config: EncoderConfig, name: str) -> Iterator[str]:
    """The arena `name` while the block runs, for all encoders of this host. Raises ArenaUnavailable."""
    create_arena(name, size_bytes=config.arena_bytes, page_bytes=config.page_bytes)
    try:
        yield name
    finally:
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
