"""The mover of pages between a device and host memory: in the background, beside the forward.

On the CPU the device's pages are memory too, and a thread is the stream. On CUDA there are streams beside the computing
one; see cuda_lanes.py.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from epd.kernels.page_copies import copy_library
from epd.kv.copies import DONE, CopyTicket, MoverStats, PageCopies
from epd.kv.host_storage import HostStorage, PageKind
from epd.kv.lanes import Lanes, Moves, NativeLanes, Progress, ThreadLanes, parts_of
from epd.kv.storage import KvStorage

__all__ = ["StreamMover"]

logger = logging.getLogger(__name__)


class StreamMover:
    """Copies between `device` and `host`, which have the same layout; see `epd.kv.copies.PageMover`.

    Ends its threads when it is closed, or when nobody holds it any more.
    """

    def __init__(self, device: KvStorage, host: HostStorage, *, lanes: Lanes | None = None) -> None:
        """`lanes`: what moves the bytes, if not what suits the device best. Raises ValueError for unlike layouts."""
        if device.layout != host.layout:
            raise ValueError(f"layout is {host.layout.identity} in host memory, {device.layout.identity} on the device")
        self._device = device
        self._host = host
        self._lanes = _lanes(device, host) if lanes is None else lanes
        self._needed = _Needed(device, host)
        # Their pages, and counts that threads write to, stay until they are at rest.
        self._in_flight: list[_Ticket] = []
        self._num_pages = {True: [0, 0], False: [0, 0]}
        self._stalls = _Stalls()
        self._close = weakref.finalize(self, _close, self._lanes, device, host)

    def load(self, copies: PageCopies) -> CopyTicket:
        """See PageMover. Raises IndexError, starting nothing, for pages that are not there."""
        device, host = self._sides()
        local = _pairs("window", copies.local_window, device, device)
        return self._start(copies, is_load=True, source=host, target=device, local=local)

    def save(self, copies: PageCopies) -> CopyTicket:
        """See PageMover. Raises IndexError, starting nothing, for pages that are not there."""
        if copies.local_window:
            raise ValueError("local_window is not empty; allowed: none, in a save")
        device, host = self._sides()
        return self._start(copies, is_load=False, source=device, target=host, local=_NONE)

    def stats(self) -> MoverStats:
        layout = self._device.layout
        loaded, saved = (
            full * layout.full_page_bytes + window * layout.window_page_bytes
            for full, window in (self._num_pages[True], self._num_pages[False])
        )
        return MoverStats(
            loaded_bytes=loaded,
            saved_bytes=saved,
            in_flight=sum(not ticket.is_done() for ticket in self._in_flight),
            stalled_s=self._stalls.seconds,
        )

    def close(self) -> None:
        """End when all that was asked for is copied. Nothing may be asked for afterwards."""
        self._close()

    def _sides(self) -> tuple[dict[PageKind, int], dict[PageKind, int]]:
        """Pages by pool, of the device and of the host."""
        device, host = self._device, self._host
        return (
            {"full": device.num_full_pages, "window": device.num_window_pages},
            {"full": host.num_full_pages, "window": host.num_window_pages},
        )

    def _start(
        self,
        copies: PageCopies,
        *,
        is_load: bool,
        source: dict[PageKind, int],
        target: dict[PageKind, int],
        local: NDArray[np.int64],
    ) -> CopyTicket:
        full = _pairs("full", copies.full, source, target)
        window = _pairs("window", copies.window, source, target)
        if not copies.num_pages:
            return DONE
        if not self._close.alive:
            raise RuntimeError("the mover is closed")
        progress = self._lanes.start(Moves(is_load, full, window, local))
        needed = self._needed.by_layer(has_full=len(full) > 0, has_window=len(window) + len(local) > 0)
        ticket = _Ticket(progress, needed, self._stalls)
        self._in_flight = [one for one in self._in_flight if not one.is_done()]
        self._in_flight.append(ticket)
        counts = self._num_pages[is_load]
        counts[0] += len(full)
        counts[1] += len(window) + len(local)
        return ticket


class _Stalls:
    """How long computing has waited for layers."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _Needed:
    """How many parts must have arrived before a layer's pages may be read, by what a copy moves."""

    def __init__(self, device: KvStorage, host: HostStorage) -> None:
        layers = [part.layer_index for part in parts_of(device, host)]
        # The last part of a layer, counted from one.
        last = {layer: number + 1 for number, layer in enumerate(layers)}
        full = {layer: last[layer] for layer in device.full_layer_indices}
        window = {layer: last[layer] for layer in device.window_layer_indices}
        self._by_layer = {(False, False): {}, (True, False): full, (False, True): window, (True, True): full | window}

    def by_layer(self, *, has_full: bool, has_window: bool) -> dict[int, int]:
        return self._by_layer[has_full, has_window]


class _Ticket:
    def __init__(self, progress: Progress, needed: dict[int, int], stalls: _Stalls) -> None:
        self._progress = progress
        self._needed = needed
        self._stalls = stalls

    def is_done(self) -> bool:
        return self._progress.is_at_rest()

    def wait(self) -> None:
        self._progress.wait()

    def wait_layer(self, layer_index: int) -> None:
        num_parts = self._needed.get(layer_index, 0)
        if not num_parts:
            return
        start_s = time.perf_counter()
        self._progress.reach(num_parts)
        self._stalls.seconds += time.perf_counter() - start_s


_NONE = np.empty((0, 2), dtype=np.int64)


def _pairs(
    kind: PageKind, pairs: Sequence[tuple[int, int]], source: dict[PageKind, int], target: dict[PageKind, int]
) -> NDArray[np.int64]:
    """The pairs as a table. Raises IndexError unless every page is there: what copies them does not look."""
    if not pairs:
        return _NONE
    table = np.fromiter(chain.from_iterable(pairs), dtype=np.int64, count=2 * len(pairs)).reshape(-1, 2)
    limits = source[kind], target[kind]
    if table.min() < 0 or (table.max(axis=0) >= limits).any():
        outside = [
            pair for pair in pairs if not all(0 <= page < limit for page, limit in zip(pair, limits, strict=True))
        ]
        raise IndexError(f"{kind} pages {outside[:8]} are outside [0, {limits[0]}) and [0, {limits[1]})")
    return table


def _lanes(device: KvStorage, host: HostStorage) -> Lanes:
    parts = parts_of(device, host)
    if device.device.type == "cuda":
        from epd.kv.cuda_lanes import CudaLanes

        return CudaLanes(parts, device.device)
    library = copy_library()
    if isinstance(library, str):
        logger.info("KV pages are copied run by run: %s", library)
        return ThreadLanes(parts)
    return NativeLanes(parts, library)


def _close(lanes: Lanes, device: KvStorage, host: HostStorage) -> None:
    """The memory must be there until the lanes are at rest."""
    lanes.close()
