"""How long one call may go on: its deadline, and whether anyone still waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from preprocess.errors import DecoderUnavailable, MediaDecodeTimeout


class Watch:
    """`check` is what decoders call at every frame. Any thread may call anything."""

    def __init__(self, limit_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._abandoned = False
        self.renew(limit_s)

    def renew(self, limit_s: float) -> None:
        """Starts the time limit afresh."""
        self._limit_s = limit_s
        self._stop_s = self._clock_s() + limit_s

    def abandon(self) -> None:
        """Nobody waits any more: `check` raises from now on."""
        self._abandoned = True

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    @property
    def remaining_s(self) -> float:
        """Negative once the deadline has passed."""
        return self._stop_s - self._clock_s()

    def timeout(self) -> MediaDecodeTimeout:
        """The error to raise past the deadline."""
        return MediaDecodeTimeout(f"decoding took over {self._limit_s:.3g} s")

    def check(self) -> None:
        """Raises MediaDecodeTimeout past the deadline, DecoderUnavailable once abandoned."""
        if self._abandoned:
            raise DecoderUnavailable("decoding was given up: nobody waits for it")
        if self.remaining_s < 0:
            raise self.timeout()
