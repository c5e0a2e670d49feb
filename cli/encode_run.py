"""Many inputs through the encoder: several at a time, each content once, results in the order of the inputs.

Workers read or fetch, encode and write; the next inputs are read and decoded while the tower works on one. The thread
that calls `run` takes the results in order and hands them to the output. Only so many inputs may be ahead of the first
that is not done, so memory does not grow with the number of inputs.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from cli.encode_inputs import Input
from cli.encode_outputs import ContentId, Output, about_for, is_fault_of_name
from cli.encode_records import Failure, OutputFailed
from cli.encode_sources import Sources, modality_of_content
from cli.encode_volumes import About, RowsDamaged, Stored
from encoder.errors import TowerFailed
from preprocess.errors import MediaError
from preprocess.types import MediaKey, MediaOptions, Modality

if TYPE_CHECKING:
    from encoder import LocalEncoder

_AHEAD: Final = 1024
_SAME_S: Final = 0.5
"""Some send a signal to the process and to its group: within this time it is one."""
How = Literal["encoded", "kept", "duplicate", "failed"]
Note = Callable[[Input, How, int, int], None]
"""Told of each input as it is done, from any thread: how, its rows, the bytes read for it."""
Outcome = Stored | Failure | None
End = Literal["whole", "interrupted", "failures", "output"]
"""All got to, Ctrl-C or SIGTERM, more failures than allowed, or an output that cannot be written."""


class Run:
    """One use of an encoder."""

    def __init__(
        self,
        encoder: "LocalEncoder",
        sources: Sources,
        output: Output,
        note: Note,
        *,
        model: str,
        max_failures: int | None = None,
    ) -> None:
        self._encoder = encoder
        self._sources = sources
        self._output = output
        self._note = note
        self._model = model
        self._max_failures = max_failures
        self._stopping = threading.Event()
        self._ordering = threading.Lock()
        self._flights: dict[ContentId, Future[Stored]] = {}
        self._made: set[ContentId] = set()
        self._settings: dict[tuple[Modality, MediaOptions], str] = {}
        self._num_failed = 0
        self._failed_too_often = False
        self.exit_code = 0
        """After an interruption: 130 for Ctrl-C, 143 for SIGTERM."""

    def run(self, inputs: Sequence[Input], concurrency: int) -> End:
        """Until all inputs have been got to, or something ends it before.

        Closes encoder and sources, and finishes the output with what is done. Raises OutputFailed, after which what is
        done waits for the next run.
        """
        coming = iter(inputs)
        pending: deque[tuple[Input, Future[Outcome]]] = deque()
        workers = ThreadPoolExecutor(concurrency, thread_name_prefix="file")
        with _Interrupts(self._stopping) as interrupts:
            is_through = False
            try:
                self._work(coming, pending, workers, interrupts)
                is_through = not self._stopping.is_set()
            finally:
                # First of all what is under way ends: whoever interrupts does not wait for it.
                if not is_through:
                    self._stopping.set()
                workers.shutdown(wait=False, cancel_futures=not is_through)
                self._encoder.close()
                self._sources.close()
                workers.shutdown()
            whole = not self._stopping.is_set()
            for item, future in pending:
                self._output.add(item, None if future.cancelled() else future.result())
            for item in coming:
                self._output.add(item, None)
            self._output.finish(whole=whole)
            self.exit_code = interrupts.exit_code
        return "whole" if whole else "failures" if self._failed_too_often else "interrupted"

    def _work(
        self,
        coming: Iterator[Input],
        pending: deque[tuple[Input, Future[Outcome]]],
        workers: ThreadPoolExecutor,
        interrupts: "_Interrupts",
    ) -> None:
        """Until all is done, or stopping."""
        more = True
        while (more or pending) and not self._stopping.is_set():
            while more and len(pending) < _AHEAD:
                item = next(coming, None)
                more = item is not None
                if item is not None:
                    pending.append((item, workers.submit(self._one, item)))
            if pending and interrupts.wait(pending[0][1]):
                item, first = pending.popleft()
                self._output.add(item, first.result())

    def _one(self, item: Input) -> Outcome:
        """What became of an input; None when it has not been got to. Raises OutputFailed."""
        if self._stopping.is_set():
            return None
        try:
            stored, how, num_bytes = self._stored(item)
        except CancelledError:
            return None
        except MediaError as error:
            failure = Failure(str(error), error.code)
        except TowerFailed as error:
            failure = Failure(str(error), "tower_failed")
        except OSError as error:
            failure = Failure(error.strerror or str(error), "unreadable")
        except RuntimeError:
            # The encoder was closed a moment before it was asked.
            if self._stopping.is_set():
                return None
            raise
        else:
            self._note(item, how, stored.about.rows, num_bytes)
            return stored
        # Of what fails while everything ends, nothing is known.
        if self._stopping.is_set():
            return None
        self._note(item, "failed", 0, 0)
        with self._ordering:
            self._num_failed += 1
            if self._max_failures is not None and self._num_failed > self._max_failures:
                self._failed_too_often = True
                self._stopping.set()
        return failure

    def _stored(self, item: Input) -> tuple[Stored, How, int]:
        """The rows of an input on disk, how they came there, and the bytes read. Raises what `_one` knows."""
        if item.fault is not None:
            raise OSError(item.fault)
        own = self._output.recall(item)
        if own is not None and item.is_url and self._is_as_asked(item, own):
            return self._share(item, own), "kept", 0
        with self._sources.content(item) as content:
            num_bytes = len(content)
            modality = item.modality or modality_of_content(content)
            options = item.options.applying_to(modality)
            key = self._encoder.key(content, modality, options)
            identity = (key, self._settings_of(modality, options))
            stored, flight, is_mine = self._begin(identity, own)
            if is_mine:
                try:
                    stored = self._encode(item, key, content, modality, options)
                    flight.set_result(stored)
                except BaseException as error:
                    flight.set_exception(error)
                    raise
                finally:
                    with self._ordering:
                        del self._flights[identity]
                return stored, "encoded", num_bytes
        # The content is let go of by now: whoever waits for the same holds nothing.
        shared = self._share(item, flight.result() if stored is None else stored)
        return shared, "duplicate" if identity in self._made else "kept", num_bytes

    def _begin(self, identity: ContentId, own: Stored | None) -> tuple[Stored | None, "Future[Stored]", bool]:
        """Rows that are there; else who makes them, which the third says is the caller."""
        with self._ordering:
            if own is not None and (own.about.key, own.about.settings) == identity:
                return own, Future(), False
            stored = self._output.find(identity)
            flight = self._flights.get(identity)
            if stored is not None or flight is not None:
                return stored, flight or Future(), False
            self._made.add(identity)
            return None, self._flights.setdefault(identity, Future()), True

    def _encode(self, item: Input, key: MediaKey, content: bytes, modality: Modality, options: MediaOptions) -> Stored:
        made = self._encoder.encode_key(key, content, modality, options)
        layout = made.layout
        about = About(
            model=self._model,
            key=key,
            settings=self._settings_of(modality, options),
            modality=modality.value,
            rows=layout.num_rows,
            width=self._encoder.width,
            dtype=self._encoder.dtype,
            grid_thw=layout.grid_thw,
            timestamps_s=layout.timestamps_s,
            num_audio_rows=layout.num_audio_rows,
            warnings=made.warnings,
            checksum=f"{made.checksum:016x}",
        )
        with _Writing():
            return self._output.keep(item, about_for(item, about), made.content)

    def _share(self, item: Input, stored: Stored) -> Stored:
        with _Writing():
            return self._output.share(item, stored)

    def _is_as_asked(self, item: Input, own: Stored) -> bool:
        """Whether a URL was encoded as it is asked for now; what it leads to by now is not looked at."""
        modality = item.modality or Modality(own.about.modality)
        settings = self._settings_of(modality, item.options.applying_to(modality))
        return own.source == item.label and own.about.settings == settings

    def _settings_of(self, modality: Modality, options: MediaOptions) -> str:
        settings = self._settings.get((modality, options))
        if settings is None:
            settings = self._settings[modality, options] = self._encoder.settings(modality, options)
        return settings


class _Writing:
    """An output that cannot be written ends the run: the next input would fare no better."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RowsDamaged):
            raise OutputFailed(f"{error}; run again with --overwrite") from error
        if isinstance(error, OSError) and not is_fault_of_name(error):
            raise OutputFailed(f"cannot write: {error}") from error
        if isinstance(error, OSError):
            # Without the names of the files: one of them differs from run to run.
            raise OSError(f"its output cannot be written: {error.strerror}") from error


class _Interrupts:
    """Ctrl-C or SIGTERM, heard at once by whoever waits, and by whoever writes when it has written; a second one ends
    all."""

    def __init__(self, stopping: threading.Event) -> None:
        self.exit_code = 0
        """After one was heard, what shells know it by."""
        self._stopping = stopping
        self._is_waiting = False
        self._is_heard = False
        self._heard_s = 0.0

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def wait(self, future: Future[Outcome]) -> bool:
        """Until it is done: True. False when interrupted."""
        try:
            self._is_waiting = True
            if self._is_heard:
                # A moment ago, when nobody waited.
                raise KeyboardInterrupt
            future.exception()
            self._is_waiting = False
        except KeyboardInterrupt:
            self._is_waiting = False
            return False
        return True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        again = self._is_heard and now_s - self._heard_s > _SAME_S
        if not self._is_heard:
            self._is_heard, self._heard_s = True, now_s
        self.exit_code = 128 + number
        self._stopping.set()
        was_waiting, self._is_waiting = self._is_waiting, False
        if was_waiting or again:
            raise KeyboardInterrupt
