"""Moving parts of pages on a CUDA device: a stream for loads and one for saves, beside the computing one.

Every copy begins when what was computed until then is done: those who had its pages before, or wrote them, are among
that. Events tell the computing stream when a layer has arrived, so the processor waits for nothing but the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Protocol

import torch

from epd.kv.copies import runs_of
from epd.kv.lanes import Moves, Part, Progress, ThreadProgress

__all__ = ["CudaLanes", "Strided", "strided_copies"]

_MEMCPY_DEFAULT = 4
"""`cudaMemcpyDefault`: the addresses say which way."""

Strided = tuple[int, int, int, int, int, int]
"""Target address and bytes from row to row there, the same of the source, bytes of a row, and rows."""


class CudaLanes:
    """Two streams, each fed by a thread of its own, since even asking for many copies takes time."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._copy = _memcpy_2d()
        self._load = _stream(device), ThreadPoolExecutor(1, thread_name_prefix="KV loads")
        self._save = _stream(device), ThreadPoolExecutor(1, thread_name_prefix="KV saves")

    def start(self, moves: Moves) -> Progress:
        stream, thread = self._load if moves.is_load else self._save
        computed = torch.cuda.current_stream(self._device).record_event()
        progress = _CudaProgress(len(self._parts), self._device)
        progress.follow(thread.submit(partial(self._move, moves, stream, computed, progress)))
        return progress

    def close(self) -> None:
        for _, thread in (self._load, self._save):
            thread.shutdown()

    def _move(
        self, moves: Moves, stream: torch.cuda.Stream, computed: torch.cuda.Event, progress: _CudaProgress
    ) -> None:
        with torch.cuda.device(self._device):
            stream.wait_event(computed)
            try:
                for part in self._parts:
                    for copy in strided_copies(part, moves):
                        self._copy(*copy, stream.cuda_stream)
                    progress.arrive(stream.record_event())
            finally:
                # Also of what had begun when something failed.
                stream.synchronize()


class _CudaProgress(ThreadProgress):
    """Counts parts that were asked for; their events say when they are there."""

    def __init__(self, num_parts: int, device: torch.device) -> None:
        super().__init__(num_parts)
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def arrive(self, event: torch.cuda.Event) -> None:
        self._events.append(event)
        self.advance()

    def reach(self, num_parts: int) -> None:
        super().reach(num_parts)
        torch.cuda.current_stream(self._device).wait_event(self._events[num_parts - 1])


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def strided_copies(part: Part, moves: Moves) -> Iterator[Strided]:
    """What moves one part: a copy of rows for every run of pages that lie together on both sides."""
    pairs = moves.full if part.kind == "full" else moves.window
    source, target = (part.host, part.device) if moves.is_load else (part.device, part.host)
    yield from _strided(target, source, runs_of(pairs.tolist()))
    if part.kind == "window":
        yield from _strided(part.device, part.device, runs_of(moves.local.tolist()))


def _strided(target: torch.Tensor, source: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> Iterator[Strided]:
    for source_page, target_page, num_pages in runs:
        yield (
            target.data_ptr() + target_page * target.stride(0),
            target.stride(0),
            source.data_ptr() + source_page * source.stride(0),
            source.stride(0),
            source.shape[1],
            num_pages,
        )


class _Memcpy2d(Protocol):
    def __call__(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int, /
    ) -> None: ...


@cache
def _memcpy_2d() -> _Memcpy2d:
    """`cudaMemcpy2DAsync` of the CUDA runtime that torch has loaded: torch itself copies rows with gaps by way of
    memory without gaps, and waits for it. Raises OSError where there is no such library."""
    major = (torch.version.cuda or "").partition(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    call = runtime.cudaMemcpy2DAsync
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    call.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    call.restype = ctypes.c_int

    def copy(
        target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        code = call(target, target_pitch, source, source_pitch, width, height, _MEMCPY_DEFAULT, stream)
        if code != 0:
            raise RuntimeError(f"cudaMemcpy2DAsync ended with {code}")

    return copy
