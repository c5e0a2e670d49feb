"""What moves between device pages and host pages, and what those who keep books know of it. Bytes only; no torch.

Whoever asks for a copy owns its source and target pages until `CopyTicket.is_done`, whatever became of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.kv.errors import KvError

__all__ = ["DONE", "CopyFailed", "CopyTicket", "InstantMover", "MoverStats", "PageCopies", "PageMover", "runs_of"]


class CopyFailed(KvError):
    """Some of a copy's bytes did not arrive: nothing of its target pages may be read. Its pages are at rest."""


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Pages of one pool to pages of the same pool elsewhere, as (source, target). No target is named twice.

    `full` and `window` go from host to device in a load and from device to host in a save. `local_window` stays on the
    device and belongs to loads alone: window pages of the tree that a sequence needs as its own.
    """

    full: tuple[tuple[int, int], ...] = ()
    window: tuple[tuple[int, int], ...] = ()
    local_window: tuple[tuple[int, int], ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.full) + len(self.window) + len(self.local_window)


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Bytes asked for so far, copies not at rest now, and how long computing has waited for layers of a load."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    in_flight: int = 0
    stalled_s: float = 0.0


class CopyTicket(Protocol):
    """A copy that was asked for. Every method may be called by any thread, any number of times."""

    def is_done(self) -> bool:
        """Whether nobody touches the pages any more, be it because all went well or because the copy failed."""
        ...

    def wait(self) -> None:
        """Return when `is_done`. Raises CopyFailed if not all of it arrived."""
        ...

    def wait_layer(self, layer_index: int) -> None:
        """Return when what is computed next may read this layer's pages: at once for a layer that nothing is moved of,
        and on a CUDA device before they are there, as the current stream waits. Raises CopyFailed."""
        ...


class PageMover(Protocol):
    """Copies pages between the device and the host. Copies are done in any order: loads go before saves."""

    def load(self, copies: PageCopies) -> CopyTicket:
        """Host to device, layer by layer in the order of the forward. Returns at once."""
        ...

    def save(self, copies: PageCopies) -> CopyTicket:
        """Device to host, after all that was computed until now. Returns at once. Raises ValueError for
        `local_window`."""
        ...

    def stats(self) -> MoverStats: ...


class _Done:
    """A copy that is over and went well."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def wait_layer(self, layer_index: int) -> None:
        return


DONE: CopyTicket = _Done()
"""The ticket of a copy that moves nothing."""


class InstantMover:
    """Keeps count and moves nothing: for books without bytes, as in a simulation."""

    def __init__(self) -> None:
        self.num_loaded_pages = 0
        self.num_saved_pages = 0

    def load(self, copies: PageCopies) -> CopyTicket:
        self.num_loaded_pages += copies.num_pages
        return DONE

    def save(self, copies: PageCopies) -> CopyTicket:
        if copies.local_window:
            raise ValueError("local_window is not empty; allowed: none, in a save")
        self.num_saved_pages += copies.num_pages
        return DONE

    def stats(self) -> MoverStats:
        return MoverStats()


def runs_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The pairs as (source, target, number of pages), where both sides go up by one from page to page.

    Sorted by target, since whoever asks lists pages in any order.
    """
    runs: list[tuple[int, int, int]] = []
    first_source = first_target = length = 0
    for source, target in sorted(pairs, key=lambda pair: pair[1]):
        if length and source == first_source + length and target == first_target + length:
            length += 1
            continue
        if length:
            runs.append((first_source, first_target, length))
        first_source, first_target, length = source, target, 1
    if length:
        runs.append((first_source, first_target, length))
    return runs
