"""What the bridge between host memory and the store needs of the store; `epd.cache.l3.client` gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol

from epd.cache.l3.base import Buffer, StoreStats
from epd.cache.tiers.host import HostPool

__all__ = [
    "KINDS",
    "Cancel",
    "HostPools",
    "OnKey",
    "OnKeys",
    "PageKind",
    "PageStore",
    "PageView",
    "both_keys",
    "store_key",
]

PageKind = Literal["full", "window"]
KINDS: Final[tuple[PageKind, ...]] = ("full", "window")
PageView = Callable[[PageKind, int], memoryview]
"""The bytes of one host page, writable and contiguous."""
HostPools = Mapping[PageKind, HostPool]
OnKey = Callable[[int, bool], None]
OnKeys = Callable[[tuple[bool, ...]], None]
Cancel = Callable[[], None]


class PageStore(Protocol):
    """The store. No call waits for it; callbacks come from its threads, at any time, also before the call returns.

    Pages of one `group` are in one place.
    """

    def get(
        self,
        group: str,
        items: Sequence[tuple[bytes, Sequence[memoryview]]],
        *,
        deadline_s: float,
        on_key: OnKey | None,
        on_done: OnKeys,
    ) -> Cancel:
        """Fill each key's buffers. True: they hold exactly what was put, and are touched no more.

        `deadline_s` on the bridge's clock. `on_done` is called exactly once, after a cancel too; from then on no buffer
        of the call is touched.
        """
        ...

    def put(self, group: str, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, on_done: OnKeys) -> object:
        """Keep each key's buffers as one value. They are read until `on_done`, which tells what is kept."""
        ...

    def exists(self, group: str, keys: Sequence[bytes], *, deadline_s: float, on_done: OnKeys) -> object:
        """Whether each is there: no promise. All False when there is no answer in time."""
        ...

    def touch(self, group: str, keys: Sequence[bytes]) -> None: ...

    def discard(self, group: str, keys: Sequence[bytes]) -> None: ...

    def place(self, group: str) -> str:
        """Where the group's pages go now: the name of a node. Cheap."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self, flush_s: float) -> None:
        """Give what was put so much time, and stop. Every `on_done` has been called when this returns."""
        ...


def store_key(kind: PageKind, key: bytes) -> bytes:
    """A page's name in the store: the pools' pages of one key lie side by side."""
    return (b"f" if kind == "full" else b"w") + key


def both_keys(keys: Iterable[bytes]) -> list[bytes]:
    """What the store may hold of these pages."""
    return [store_key(kind, key) for key in keys for kind in KINDS]
