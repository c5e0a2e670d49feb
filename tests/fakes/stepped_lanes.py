"""Copies that happen when the test says so: one layer after the other, or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from epd.kv.copies import runs_of
from epd.kv.host_storage import HostStorage
from epd.kv.lanes import Moves, Part, Progress, ThreadProgress, parts_of
from epd.kv.storage import KvStorage

_PATIENCE_S = 20.0


class CopyBroken(Exception):
    """What a test had happen."""


class SteppedLanes:
    """Real copies between `device` and `host`, by one thread that waits for `release` before every layer."""

    def __init__(self, device: KvStorage, host: HostStorage) -> None:
        self._parts = parts_of(device, host)
        self._permits = threading.Semaphore(0)
        self._thread = ThreadPoolExecutor(1)
        self._fails = False
        self.is_open = True

    def release(self, num_layers: int = 1) -> None:
        """Let so many layers be copied, of the job at hand or of later ones."""
        self._permits.release(num_layers)

    def release_all(self) -> None:
        """From now on nothing waits."""
        self._permits.release(10_000)

    def fail(self) -> None:
        """The next layer of a load that is released fails, and with it the load."""
        self._fails = True
        self.release()

    def start(self, moves: Moves) -> Progress:
        progress = ThreadProgress(len(self._parts))
        progress.follow(self._thread.submit(self._move, moves, progress))
        return progress

    def close(self) -> None:
        self.is_open = False
        self.release_all()
        self._thread.shutdown()

    def _move(self, moves: Moves, progress: ThreadProgress) -> None:
        for number, part in enumerate(self._parts):
            # Keys and values of a layer are two parts.
            if number % 2 == 0 and not self._permits.acquire(timeout=_PATIENCE_S):
                raise CopyBroken("nobody released a layer")
            if self._fails and moves.is_load:
                self._fails = False
                raise CopyBroken("the copy broke")
            _copy(part, moves)
            progress.advance()


def _copy(part: Part, moves: Moves) -> None:
    source_pages, target_pages = (part.host, part.device) if moves.is_load else (part.device, part.host)
    for source, target, count in runs_of((moves.full if part.kind == "full" else moves.window).tolist()):
        target_pages[target : target + count] = source_pages[source : source + count]
    for source, target, count in runs_of(moves.local.tolist()) if part.kind == "window" else ():
        part.device[target : target + count] = part.device[source : source + count]
