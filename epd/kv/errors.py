"""Refusals of the KV pools."""

from __future__ import annotations

__all__ = ["KvError", "NoPages", "PageStateError", "PoolTooSmall"]


class KvError(Exception):
    """Base of every error raised by the KV pools."""


class NoPages(KvError):
    """An allocation that cannot be met even after evicting everything evictable.

    Attributes: `pool` is "full" or "window"; `needed`, `free` and `evictable` count pages of that pool.
    Nothing was changed when this is raised.
    """

    def __init__(self, *, pool: str, needed: int, free: int, evictable: int = 0) -> None:
        super().__init__(f"{pool} pool: {needed} pages needed, {free} free, {evictable} evictable")
        self.pool = pool
        self.needed = needed
        self.free = free
        self.evictable = evictable


class PageStateError(KvError):
    """A page was freed or handed over by somebody who does not own it, or the books of a pool do not balance."""


class PoolTooSmall(KvError):
    """The memory budget is below what the requested concurrency needs; the message names both numbers."""
