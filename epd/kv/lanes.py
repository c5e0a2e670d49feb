"""How parts of pages are moved in the background: what `StreamMover` asks of it, and the two ways on the CPU.

A part is one layer's keys, or its values, in all pages of a pool. A copy moves the parts in the order of the forward,
so what is needed first comes first: with one thing moved at a time no other order ends a forward earlier that waits for
each of them in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.kernels.page_copies import CopyLibrary, NativeCopies, NativeCopy, PartAddress
from epd.kv.copies import CopyFailed, runs_of
from epd.kv.host_storage import HostStorage, PageKind
from epd.kv.storage import KvStorage

__all__ = ["Lanes", "Moves", "NativeLanes", "Part", "Progress", "ThreadLanes", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A layer's keys or values as bytes: uint8 [M, B] on the device, contiguous, and [N, B] in host memory, with gaps
    between its pages. M and N are the pages of pool `kind` on either side."""

    layer_index: int
    kind: PageKind
    device: Tensor
    host: Tensor


def parts_of(device: KvStorage, host: HostStorage) -> tuple[Part, ...]:
    """The parts of every layer, in the order of the forward: the trunk's layers, then the draft heads'."""
    parts: list[Part] = []
    for layer in sorted((*device.full_layer_indices, *device.window_layer_indices)):
        kind = host.parts(layer)[0]
        tensors = device.keys(layer), device.values(layer)
        for tensor, view in zip(tensors, host.layer_views(layer), strict=True):
            parts.append(Part(layer, kind, tensor.view(torch.uint8).flatten(1), view))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Moves:
    """A copy in numbers: each int64 [pages, 2] of (source, target). `local` is of window pages on the device."""

    is_load: bool
    full: NDArray[np.int64]
    window: NDArray[np.int64]
    local: NDArray[np.int64]


class Progress(Protocol):
    """How far a copy is. Any thread may ask."""

    def num_done(self) -> int:
        """Parts that have arrived."""
        ...

    def is_at_rest(self) -> bool:
        """Whether nothing is moved any more, be it that all has arrived or that something failed."""
        ...

    def wait(self) -> None:
        """Return at rest. Raises CopyFailed if not all has arrived."""
        ...

    def reach(self, num_parts: int) -> None:
        """Return when what is computed next may read so many. Raises CopyFailed if it never may."""
        ...


class Lanes(Protocol):
    """What moves the parts of one device and one host memory."""

    def start(self, moves: Moves) -> Progress:
        """Begin in the background. The caller keeps the result until it is at rest."""
        ...

    def close(self) -> None:
        """End, when all that was started is at rest."""
        ...


class NativeLanes:
    """The compiled copier: one thread, for which loads go before saves. It cannot fail."""

    def __init__(self, parts: Sequence[Part], library: CopyLibrary) -> None:
        self._num_parts = len(parts)
        self._copies = NativeCopies(library, [_address(part) for part in parts])

    def start(self, moves: Moves) -> Progress:
        lists = moves.full, moves.window, moves.local
        copy = self._copies.start(
            is_load=moves.is_load, pairs=np.concatenate(lists), counts=[len(pairs) for pairs in lists]
        )
        return _NativeProgress(copy, self._num_parts)

    def close(self) -> None:
        self._copies.close()


class _NativeProgress:
    def __init__(self, copy: NativeCopy, num_parts: int) -> None:
        self._copy = copy
        self._num_parts = num_parts

    def num_done(self) -> int:
        return self._copy.num_done()

    def is_at_rest(self) -> bool:
        return self._copy.num_done() >= self._num_parts

    def wait(self) -> None:
        self.reach(self._num_parts)

    def reach(self, num_parts: int) -> None:
        if self._copy.num_done() < num_parts:
            self._copy.wait(num_parts)


def _address(part: Part) -> PartAddress:
    return PartAddress(
        device=part.device.data_ptr(),
        host=part.host.data_ptr(),
        device_stride=part.device.stride(0),
        host_stride=part.host.stride(0),
        size_bytes=part.device.shape[1],
        pool=int(part.kind == "window"),
    )


class ThreadLanes:
    """Without a compiler: one thread for loads and one for saves, which copy runs of pages that lie together."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(part.kind, part.device.numpy(), part.host.numpy()) for part in parts]
        self._load = ThreadPoolExecutor(1, thread_name_prefix="KV loads")
        self._save = ThreadPoolExecutor(1, thread_name_prefix="KV saves")

    def start(self, moves: Moves) -> Progress:
        progress = ThreadProgress(len(self._parts))
        lane = self._load if moves.is_load else self._save
        progress.follow(lane.submit(partial(self._move, moves, progress)))
        return progress

    def close(self) -> None:
        self._load.shutdown()
        self._save.shutdown()

    def _move(self, moves: Moves, progress: ThreadProgress) -> None:
        runs = {"full": runs_of(moves.full.tolist()), "window": runs_of(moves.window.tolist())}
        local = runs_of(moves.local.tolist())
        for kind, device, host in self._parts:
            source_pages, target_pages = (host, device) if moves.is_load else (device, host)
            for source, target, count in runs[kind]:
                target_pages[target : target + count] = source_pages[source : source + count]
            for source, target, count in local if kind == "window" else ():
                device[target : target + count] = device[source : source + count]
            progress.advance()


class ThreadProgress:
    """A count that one thread moves on and others wait for; its end is that of the thread's work, good or bad."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._moved = threading.Condition()
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_over = False

    def follow(self, work: Future[None]) -> None:
        """`work` calls `advance` once per part."""
        work.add_done_callback(self._end)

    def advance(self) -> None:
        with self._moved:
            self._num_done += 1
            self._moved.notify_all()

    def num_done(self) -> int:
        return self._num_done

    def is_at_rest(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._is_over)
            self._require(self._num_parts)

    def reach(self, num_parts: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or self._num_done >= num_parts)
            self._require(num_parts)

    def _require(self, num_parts: int) -> None:
        # All may have been moved, and the end of it failed all the same.
        if self._error is not None or self._num_done < num_parts:
            raise CopyFailed(f"pages could not be copied: {self._error}") from self._error

    def _end(self, work: Future[None]) -> None:
        with self._moved:
            self._error = work.exception()
            self._is_over = True
            self._moved.notify_all()
