"""One medium that is open in a worker process: sends it work, receives its parts, watches over it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from preprocess import errors
from preprocess.config import ProcessorConfig
from preprocess.errors import DecoderCrashed, DecoderUnavailable, MediaError, MediaInvalid, MediaTooLarge, unavailable
from preprocess.isolation.nursery import Nursery
from preprocess.isolation.shared_arrays import Handover, put_bytes
from preprocess.isolation.wire import (
    Broke,
    Changed,
    Decode,
    Decoded,
    Discard,
    FromWorker,
    Hangup,
    NoDescriptors,
    Open,
    Opened,
    Part,
    Ready,
    Refused,
)
from preprocess.isolation.worker import Worker, describe_exit
from preprocess.pool_source import Submit
from preprocess.types import MediaKey, MediaLayout, MediaOptions, MediaPart, MelFrames, Modality, Patches, Pixels
from preprocess.watch import Watch

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S: Final = 0.02
_GRACE_S: Final = 0.5
"""A worker that checks its own deadline ends in order within this; then it is killed."""


_OUTSIDE: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, None})
"""Ends of a worker that others made: an operator, the kernel short of memory, the end of the nursery."""


class _Killed(Exception):
    """A worker was ended by others before it had handed anything over: its medium may be given to another one."""


@dataclass(frozen=True, slots=True)
class _Request:
    content: bytes
    modality: Modality
    options: MediaOptions
    config: ProcessorConfig
    announce: bool


class IsolatedMedia:
    """A medium that is open in a worker; `layout`, `mel` and `warnings` as in `preprocess.pipeline.OpenMedia`.

    Should its worker be killed by others, it is opened once more in another, unless some of it was handed over.
    """

    layout: MediaLayout
    mel: MelFrames | None
    warnings: tuple[str, ...]

    def __init__(self, nursery: Nursery, key: MediaKey, request: _Request) -> None:
        self._nursery = nursery
        self._worker: Worker | None = None
        self._next_check_s = 0.0
        self._request: _Request | None = request
        """None once something was handed over."""
        self._was_killed = False
        self.key = key

    @property
    def worker_pid(self) -> int | None:
        """The process that holds this medium; None once it is gone."""
        return None if self._worker is None else self._worker.pid

    @classmethod
    def open(
        cls,
        nursery: Nursery,
        content: bytes,
        *,
        modality: Modality,
        options: MediaOptions,
        config: ProcessorConfig,
        key: MediaKey,
        watch: Watch,
        announce: bool = True,
    ) -> IsolatedMedia:
        """Without `announce`, the attributes are there only after `decode`. Raises MediaError."""
        medium = cls(nursery, key, _Request(content, modality, options, config, announce))
        medium._begin(watch)
        return medium

    def _begin(self, watch: Watch) -> None:
        while True:
            try:
                return self._begin_once(watch)
            except _Killed:
                # Not raised a second time.
                continue

    def _begin_once(self, watch: Watch) -> None:
        request = self._request
        assert request is not None, "what was handed over is not opened again"
        worker = self._worker = self._nursery.take(watch)
        try:
            order = Open(
                request.modality,
                request.options,
                request.config,
                self.key,
                remaining_s=watch.remaining_s,
                announce=request.announce,
            )
            fd = put_bytes(request.content)
            try:
                worker.send(order, fd)
            finally:
                os.close(fd)
            if request.announce:
                message = self._next(worker, watch)
                if not isinstance(message, Opened):
                    self._nonsense(worker)
                self._set(worker, message)
        except Hangup as error:
            self._report_death(worker, error)
        except OSError as error:
            # The content did not even reach the worker.
            self.close()
            raise _shortage(error) from error
        except MediaError:
            self.close()
            raise

    def decode(self, submit: Submit, *, patches_per_part: int | None, raw: bool, watch: Watch) -> bool:
        """Sends every part to `submit`; the worker's threads go on as the futures finish. Returns when all have.

        False: the medium turned out to be another, described by the attributes now; decode again. Raises MediaError,
        and what a future ended with.
        """
        while True:
            try:
                return self._decode_once(submit, patches_per_part=patches_per_part, raw=raw, watch=watch)
            except _Killed:
                assert self._request is not None, "or it is not tried again"
                before = self.layout if self._request.announce else None
                self._begin(watch)
                if before is not None and self.layout != before:
                    # Damage that decoding had found must be found anew.
                    return False

    def _decode_once(self, submit: Submit, *, patches_per_part: int | None, raw: bool, watch: Watch) -> bool:
        worker = self._worker
        if worker is None:
            raise ValueError("the medium is closed")
        pending: list[Future[None]] = []
        try:
            worker.send(Decode(patches_per_part=patches_per_part, raw=raw, remaining_s=watch.remaining_s))
            while True:
                message = self._next(worker, watch, pending)
                match message:
                    case Part():
                        # The content is needed no more, either.
                        self._request = None
                        future = submit(self._part(worker, message))
                        pending.append(future)
                        future.add_done_callback(partial(_acknowledge, worker, message.number))
                    case Decoded():
                        self.warnings = message.warnings
                        return True
                    case Changed():
                        self._set(worker, message)
                        return False
                    case Opened():
                        self._set(worker, message)
                    case _:
                        self._nonsense(worker)
        except Hangup as error:
            self._report_death(worker, error)

    def close(self) -> None:
        """Lets the worker go. A medium that is being decoded takes its worker with it."""
        worker, self._worker = self._worker, None
        self._request = None
        if worker is None:
            return
        try:
            worker.send(Discard())
        except Hangup:
            self._nursery.retire(worker)
        else:
            self._nursery.give_back(worker)

    def _set(self, worker: Worker, opened: Opened) -> None:
        self.layout = opened.layout
        self.warnings = opened.warnings
        self.mel = None
        if opened.mel is not None:
            (log_mel,) = self._arrays(worker, opened.mel)
            self.mel = MelFrames(log_mel=log_mel, duration_s=opened.duration_s)

    def _part(self, worker: Worker, part: Part) -> MediaPart:
        arrays = self._arrays(worker, part.pictures)
        if part.grid_thw is not None and len(arrays) == 1 and arrays[0].dtype == np.float32:
            return MediaPart(part.first_pair, Patches(pixel_values=arrays[0], grid_thw=part.grid_thw))
        if part.size is None or not all(0 <= index < len(arrays) for index in part.frames):
            self._nonsense(worker)
        height, width = part.size
        frames = tuple(arrays[index] for index in part.frames)
        return MediaPart(part.first_pair, Pixels(frames=frames, height=height, width=width))

    def _arrays(self, worker: Worker, handover: Handover) -> tuple[NDArray[Any], ...]:
        try:
            return worker.take_arrays(handover)
        except ValueError:
            logger.exception("what decode worker %d handed over does not fit its memory", worker.number)
            self._nonsense(worker)
        except OSError as error:
            self._lose(worker, "abandoned")
            raise _shortage(error) from error

    def _next(self, worker: Worker, watch: Watch, pending: list[Future[None]] | None = None) -> FromWorker:
        """The worker's next message. Raises Hangup, MediaError, and what a pending future ended with."""
        while True:
            message = worker.receive(_WATCH_PERIOD_S)
            if time.monotonic() >= self._next_check_s:
                self._check(worker, watch)
            for future in [future for future in pending or () if future.done()]:
                assert pending is not None
                pending.remove(future)
                if future.cancelled() or future.exception() is not None:
                    self._lose(worker, "abandoned")
                    future.result()
            match message:
                case None:
                    continue
                case Refused(out_of_memory=True):
                    self._nursery.count("out_of_memory")
                    raise self._over_ceiling()
                case Refused():
                    raise _error_of(message)
                case Broke():
                    self._report_fault(worker, message)
                case Ready():
                    self._nonsense(worker)
                case _:
                    return message

    def _check(self, worker: Worker, watch: Watch) -> None:
        """Kills a worker that is over its time or its memory, or whose work nobody waits for, and raises."""
        self._next_check_s = time.monotonic() + _WATCH_PERIOD_S
        if watch.abandoned:
            self._lose(worker, "abandoned")
            watch.check()
        if watch.remaining_s < -_GRACE_S:
            self._lose(worker, "timed_out")
            raise watch.timeout()
        if worker.private_bytes() - worker.first_rss_bytes > self._nursery.settings.max_worker_bytes:
            self._lose(worker, "out_of_memory")
            raise self._over_ceiling()

    def _over_ceiling(self) -> MediaTooLarge:
        ceiling = self._nursery.settings.max_worker_bytes
        return MediaTooLarge(
            f"decoding needs more memory than one medium may take, {ceiling // 1024**2} MiB, a limit of this server; "
            "send a smaller or shorter one",
            hint=f"max_worker_bytes is {ceiling}",
        )

    def _lose(self, worker: Worker, counter: str) -> None:
        self._worker = None
        self._nursery.count(counter)
        worker.kill()
        self._nursery.retire(worker)

    def _report_fault(self, worker: Worker, broke: Broke) -> NoReturn:
        if broke.out_of_memory:
            self._lose(worker, "out_of_memory")
            raise self._over_ceiling()
        logger.error("decode worker %d failed on medium %s:\n%s", worker.number, self.key, broke.reason)
        self._lose(worker, "crashed")
        raise DecoderCrashed("the decoder failed on this file", reason=broke.reason)

    def _report_death(self, worker: Worker, hangup: Hangup) -> NoReturn:
        """Raises _Killed where another worker may try, else MediaError."""
        if isinstance(hangup, NoDescriptors):
            self._lose(worker, "abandoned")
            raise _shortage(OSError(errno.EMFILE, str(hangup))) from hangup
        status = self._nursery.exit_status(worker)
        reason = f"{describe_exit(status)}\n{worker.last_words()}".strip()
        again = status in _OUTSIDE and self._request is not None and not self._was_killed
        outlook = "; another worker tries" if again else ""
        logger.warning("decode worker %d died at work on medium %s%s: %s", worker.number, self.key, outlook, reason)
        if again:
            self._was_killed = True
            self._lose(worker, "killed")
            raise _Killed
        if status == -signal.SIGKILL:
            self._lose(worker, "out_of_memory")
            times = "twice " if self._was_killed else ""
            raise MediaTooLarge(f"the decoder was killed {times}while working on this file; most likely memory ran out")
        self._lose(worker, "crashed")
        raise DecoderCrashed("the decoder crashed on this file", reason=reason)

    def _nonsense(self, worker: Worker) -> NoReturn:
        self._lose(worker, "crashed")
        raise DecoderCrashed("the decoder crashed on this file", reason="its worker sent nonsense")


def _acknowledge(worker: Worker, number: int, done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is None:
        worker.acknowledge(number)


def _shortage(error: OSError) -> DecoderUnavailable:
    return unavailable(error) or DecoderUnavailable("the server has no shared memory at present", hint=str(error))


def _error_of(refused: Refused) -> MediaError:
    error = _kind_of(refused)
    error.hint = refused.hint
    return error


def _kind_of(refused: Refused) -> MediaError:
    kind = getattr(errors, refused.error, None)
    if kind is MediaInvalid:
        return MediaInvalid(refused.message, field=refused.field)
    if isinstance(kind, type) and issubclass(kind, MediaError):
        return kind(refused.message)
    return DecoderCrashed("the decoder crashed on this file", reason=f"{refused.error}: {refused.message}")
