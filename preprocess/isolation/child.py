"""The processes of an isolated decode pool. Runs as `python -m preprocess.isolation.child SOCKET_FD SETTINGS`.

    pool --spawns--> nursery --forks--> worker, worker, ...

The nursery loads and warms up everything once, and never sees media. It has one thread, so that forking it is safe.
A worker forked from it is ready within milliseconds, and they share the memory of torch and the decoders; a worker
that crashed is replaced at next to no cost.

Nobody is left behind: the nursery ends when its socket does, which is when the pool's process ends, however that
happens; workers end with the nursery.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import queue
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import simplejpeg
import torch
from PIL import Image

from preprocess.config import DecodeSettings
from preprocess.crew import Crew
from preprocess.errors import MediaError, MediaInvalid, unavailable
from preprocess.isolation.shared_arrays import Handover, Writer, read_bytes
from preprocess.isolation.wire import (
    Born,
    Broke,
    Changed,
    Channel,
    Decode,
    Decoded,
    Discard,
    Fork,
    FromWorker,
    GiveBack,
    Gone,
    Hangup,
    Open,
    Opened,
    Part,
    Ready,
    Refused,
    Taken,
    ToNursery,
    ToWorker,
    Warm,
)
from preprocess.patchify import patchify
from preprocess.pipeline import LayoutChanged, OpenMedia, open_media
from preprocess.types import Frames, MediaPart, Patches
from preprocess.watch import Watch

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_EXIT_BROKE: Final = 70
_ROOM_BYTES: Final = 64 * 1024**2
_STACK_BYTES: Final = 16 * 1024**2


def main() -> None:
    """The nursery, until its socket closes."""
    # Ctrl-C reaches the whole process group; when to stop is the pool's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.json.decode(sys.argv[2], type=DecodeSettings)
    warm_up()
    gc.collect()
    # What exists now is never freed in a worker: keep its collector from touching, and so copying, those pages.
    gc.freeze()
    try:
        _Nursery(Channel(connection, ToNursery), settings).run()
    except Hangup:
        # Nothing here needs an interpreter's farewell, which takes a quarter of a second.
        os._exit(0)


def warm_up() -> None:
    """Loads what decoders load on first use. Must leave one thread only."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    picture = np.zeros((48, 48, 3), dtype=np.uint8)
    simplejpeg.decode_jpeg(simplejpeg.encode_jpeg(picture))
    for kind in ("PNG", "WEBP", "GIF"):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, kind)
        Image.open(file).convert("RGB")
    patchify(Frames(pixels=picture[None], timestamps_s=np.zeros(1, dtype=np.float32)), height=64, width=64)


class _Nursery:
    """Forks workers on order and says when one has ended."""

    def __init__(self, control: Channel[ToNursery], settings: DecodeSettings) -> None:
        self._control = control
        self._settings = settings
        self._workers: dict[int, tuple[int, int]] = {}
        """pidfd: (worker, pid)"""
        self._poller = select.poll()
        self._poller.register(control.fileno(), select.POLLIN)

    def run(self) -> NoReturn:
        self._control.send(Warm())
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._workers:
                    self._reap(fd)
                    continue
                order = self._control.receive()
                while order is not None:
                    self._fork(order)
                    order = self._control.buffered()

    def _fork(self, order: Fork) -> None:
        connection = socket.socket(fileno=self._control.take_fd())
        nursery_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            connection.close()
            self._control.send(Born(worker=order.worker, pid=None))
            return
        if pid == 0:
            self._be_worker(connection, nursery_pid)
        connection.close()
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = (order.worker, pid)
        self._poller.register(pidfd, select.POLLIN)
        self._control.send(Born(worker=order.worker, pid=pid), pidfd)

    def _be_worker(self, connection: socket.socket, nursery_pid: int) -> NoReturn:
        """In the child, which must never return into the nursery's loop."""
        try:
            self._control.close()
            for pidfd in self._workers:
                os.close(pidfd)
            confine(self._settings, nursery_pid)
            _Worker(connection, self._settings).run()
        except BaseException:  # noqa: BLE001 - the outermost frame of a process
            traceback.print_exc()
        finally:
            os._exit(_EXIT_BROKE)

    def _reap(self, pidfd: int) -> None:
        worker, pid = self._workers.pop(pidfd)
        self._poller.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._control.send(Gone(worker=worker, status=os.waitstatus_to_exitcode(status)))


def confine(settings: DecodeSettings, nursery_pid: int) -> None:
    """Ties this worker's life to the nursery's, bounds its memory, and gives up what a decoder does not need."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != nursery_pid:
        os._exit(0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Codecs print what hostile files make them say.
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of private memory: address space that is only reserved and shared memory do not count, stacks of threads do. The
    # pool watches the ceiling itself; this wall above it stops what grows faster than the pool looks.
    room_bytes = settings.max_worker_bytes + settings.max_worker_bytes // 4 + _ROOM_BYTES
    wall_bytes = _private_bytes("VmData:") + room_bytes + _STACK_BYTES * settings.num_helpers
    resource.setrlimit(resource.RLIMIT_DATA, (wall_bytes, wall_bytes))
    try:
        # Should the machine run out of memory, this process goes first.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        # Some containers forbid it. The ceiling above holds all the same.
        return


def _private_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


class _Worker:
    """Decodes one medium at a time. A thread listens to the pool, so that it also hears its end in mid-work."""

    def __init__(self, connection: socket.socket, settings: DecodeSettings) -> None:
        self._channel: Channel[ToWorker] = Channel(connection, ToWorker)
        self._settings = settings
        self._commands: queue.SimpleQueue[tuple[Open | Decode | Discard, int | None]] = queue.SimpleQueue()
        self._untaken: dict[int, threading.Event] = {}
        self._num_parts = 0
        self._counting = threading.Lock()
        self._medium: OpenMedia | None = None
        self._watch = Watch(settings.max_item_s)
        self._crew = Crew(settings.num_helpers)
        self._announced = False
        self._writer = Writer(max_bytes=settings.max_worker_bytes)
        self._first_rss_bytes = _private_bytes("RssAnon:")
        # Where Python writes its stack should a library crash; the pool holds it too.
        self._last_words = os.memfd_create("mimo-last-words", os.MFD_CLOEXEC)

    def run(self) -> NoReturn:
        faulthandler.enable(file=self._last_words, all_threads=False)
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        self._channel.send(Ready(rss_bytes=self._first_rss_bytes), self._last_words)
        while True:
            command, fd = self._commands.get()
            try:
                self._obey(command, fd)
            except MediaError as error:
                self._medium = None
                self._channel.send(_refusal(error))
            except Hangup:
                os._exit(0)
            except Exception as error:  # noqa: BLE001 - the outermost loop of a process: told to the pool, and the end
                self._break(error)

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.wait()
                match message:
                    case Taken():
                        self._untaken.pop(message.number).set()
                    case GiveBack():
                        self._writer.recycle(message.kept, message.dropped)
                    case Open():
                        self._commands.put((message, self._channel.take_fd()))
                    case _:
                        self._commands.put((message, None))
        except Hangup:
            os._exit(0)

    def _obey(self, command: Open | Decode | Discard, fd: int | None) -> None:
        match command:
            case Open():
                assert fd is not None
                try:
                    content = read_bytes(fd)
                finally:
                    os.close(fd)
                self._open(command, content)
            case Decode():
                self._decode(command)
            case Discard():
                self._rest()

    def _open(self, command: Open, content: bytes) -> None:
        self._watch = Watch(command.remaining_s)
        self._announced = command.announce
        self._medium = open_media(
            content,
            modality=command.modality,
            options=command.options,
            config=command.config,
            key=command.key,
            crew=self._crew,
            check_deadline=self._watch.check,
        )
        if self._announced:
            self._announce(Opened, self._medium)

    def _announce(self, kind: type[Opened], medium: OpenMedia) -> None:
        if medium.mel is None:
            self._channel.send(kind(layout=medium.layout, warnings=medium.warnings))
            return
        with_sound: Callable[..., Opened] = kind
        self._send_arrays(
            [medium.mel.log_mel],
            lambda handover: with_sound(
                layout=medium.layout,
                warnings=medium.warnings,
                mel=handover,
                duration_s=medium.mel.duration_s if medium.mel is not None else 0.0,
            ),
        )

    def _decode(self, command: Decode) -> None:
        if self._medium is None:
            # The pool did not wait to hear that it was refused.
            return
        self._watch.renew(command.remaining_s)
        try:
            self._medium.decode(self._put, patches_per_part=command.patches_per_part, raw=command.raw)
        except LayoutChanged as change:
            self._medium = change.opened
            self._announced = True
            self._announce(Changed, self._medium)
        else:
            if not self._announced:
                self._announce(Opened, self._medium)
            self._channel.send(Decoded(warnings=self._medium.warnings))

    def _put(self, part: MediaPart) -> None:
        """Hands a part over and waits until it is taken. Several threads at a time."""
        taken = threading.Event()
        with self._counting:
            number = self._num_parts
            self._num_parts += 1
            self._untaken[number] = taken
        pictures = part.pictures
        if isinstance(pictures, Patches):
            grid_thw = pictures.grid_thw
            self._send_arrays(
                [pictures.pixel_values],
                lambda handover: Part(number=number, first_pair=part.first_pair, pictures=handover, grid_thw=grid_thw),
            )
        else:
            unique = {id(frame): frame for frame in pictures.frames}
            order = {identity: index for index, identity in enumerate(unique)}
            frames = tuple(order[id(frame)] for frame in pictures.frames)
            size = (pictures.height, pictures.width)
            self._send_arrays(
                list(unique.values()),
                lambda handover: Part(
                    number=number, first_pair=part.first_pair, pictures=handover, size=size, frames=frames
                ),
            )
        while not taken.wait(timeout=1.0):
            self._watch.check()

    def _send_arrays(self, arrays: list[Any], message: Callable[[Handover], FromWorker]) -> None:
        try:
            handover, fd = self._writer.put(arrays)
        except OSError as error:
            shortage = unavailable(error)
            if shortage is None:
                raise
            raise shortage from error
        try:
            self._channel.send(message(handover), fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _rest(self) -> None:
        """Between two media: memory that is only kept for later goes back before it is measured."""
        self._medium = None
        # The crew may still decode the sound of a medium that failed.
        self._watch.abandon()
        rss_bytes = _private_bytes("RssAnon:")
        if rss_bytes - self._first_rss_bytes > self._settings.max_worker_growth_bytes // 2:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            rss_bytes = _private_bytes("RssAnon:")
        self._channel.send(Ready(rss_bytes=rss_bytes))

    def _break(self, error: Exception) -> NoReturn:
        out_of_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        reason = "".join(traceback.format_exception(error)).strip()
        try:
            self._channel.send(Broke(reason=reason[-8000:], out_of_memory=out_of_memory))
            # The pool hangs up when it has read this.
            time.sleep(5.0)
        finally:
            os._exit(_EXIT_BROKE)


def _refusal(error: MediaError) -> Refused:
    """The error under a name that the pool knows: of its class, or the nearest base in `preprocess.errors`."""
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == MediaError.__module__)
    field = error.field if isinstance(error, MediaInvalid) else None
    return Refused(
        error=known.__name__,
        message=error.message,
        field=field,
        hint=error.hint,
        out_of_memory=isinstance(error.__cause__, MemoryError),
    )


if __name__ == "__main__":
    main()
