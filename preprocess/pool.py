"""A bounded pool of decoder threads for an asyncio server.

Threads, not processes: Pillow, simplejpeg, FFmpeg, libsndfile and torch release the interpreter while they work, two
threads decode nearly twice as many pictures as one, and results need no copy. Returning decoded pixels from worker
processes by pickle costs more than decoding them.

A thread cannot be killed. A call that runs past its deadline is answered at once with MediaDecodeTimeout; its thread
gives up at the next check (every decoded frame of video or sound), and until then counts as busy, so that a stuck
decoder lowers the pool's capacity instead of piling up threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from preprocess.config import ProcessorConfig
from preprocess.errors import MediaDecodeTimeout
from preprocess.pipeline import prepare
from preprocess.types import MediaKey, MediaOptions, Modality, PreparedMedia


class DecodePool:
    """`num_threads` media are decoded at a time; more wait in arrival order. Close it with `close`."""

    def __init__(self, num_threads: int, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, allowed is 1 or more")
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._clock_s = clock_s
        self.num_pending = 0
        """Calls waiting or running, for admission and metrics."""

    async def prepare(
        self,
        content: bytes,
        *,
        modality: Modality,
        options: MediaOptions,
        config: ProcessorConfig,
        key: MediaKey,
        timeout_s: float | None = None,
    ) -> PreparedMedia:
        """`preprocess.pipeline.prepare` on a thread. The time limit includes waiting for a thread.

        Raises MediaDecodeTimeout, and what `prepare` raises.
        """
        check = _never if timeout_s is None else _Deadline(self._clock_s, timeout_s)

        def call() -> PreparedMedia:
            return prepare(content, modality=modality, options=options, config=config, key=key, check_deadline=check)

        self.num_pending += 1
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, call)
            return await asyncio.wait_for(running, timeout_s)
        except TimeoutError as error:
            raise MediaDecodeTimeout(f"decoding the {modality} took over {timeout_s:g} s") from error
        finally:
            self.num_pending -= 1

    def close(self) -> None:
        """Drops waiting calls and waits for running ones."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _never() -> None:
    pass


class _Deadline:
    """Raises once the clock has passed the moment given at birth."""

    def __init__(self, clock_s: Callable[[], float], timeout_s: float) -> None:
        self._clock_s = clock_s
        self._stop_s = clock_s() + timeout_s
        self._timeout_s = timeout_s

    def __call__(self) -> None:
        if self._clock_s() > self._stop_s:
            raise MediaDecodeTimeout(f"decoding took over {self._timeout_s:g} s")
