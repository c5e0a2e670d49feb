"""Where decoded sound belongs in time: silence for what is missing, nothing for what comes before the first picture.

    container's clock      start_s          first frame        gap
    sound                     |~~ silence ~~|#############|~~~~~~|######

Differences up to a tenth of a second stay as they are: rounded times, encoders' run-in, tables that are a little off.
"""

from __future__ import annotations

from typing import Any, Final

_MAX_OFF_S: Final = 0.1


class Timeline:
    """Compares the times of decoded frames with the samples so far.

    `start_s` is when the sound has to begin by the container's clock; None: with its first frame. `max_duration_s`
    bounds the silence: times that lie further off are damaged, and not followed. Where times jump back, as in files
    that were joined, the sound goes on without a gap.
    """

    def __init__(self, start_s: float | None, max_duration_s: float) -> None:
        self._start_s = start_s
        self._max_duration_s = max_duration_s
        self._placed_s = 0.0
        self._expected_s: float | None = None
        self._late_s = 0.0
        self._num_gaps = 0
        self._gaps_s = 0.0
        self._cut_s = 0.0
        self._absurd_s = 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        found = []
        if self._late_s:
            found.append(f"the sound begins {self._late_s:.2f} s after the first picture; silence fills the time")
        if self._cut_s:
            found.append(f"{self._cut_s:.2f} s of sound come before the first picture; cut off")
        if self._num_gaps:
            gaps = "a gap of" if self._num_gaps == 1 else f"{self._num_gaps} gaps of together"
            found.append(f"{gaps} {self._gaps_s:.2f} s in the sound; filled with silence")
        if self._absurd_s:
            found.append(f"its times jump by {self._absurd_s:.0f} s, more than a sound may last; not followed")
        return tuple(found)

    def offset_s(self, frame: Any) -> float:
        """Seconds of silence before this frame; below 0: seconds of sound to leave out from here on.

        Call it once for every frame, in order, before the frame's time is taken away.
        """
        length_s = frame.samples / frame.sample_rate if frame.sample_rate > 0 else 0.0
        offset_s = 0.0
        if frame.pts is not None and frame.time_base:
            at_s = frame.pts * float(frame.time_base)
            if self._expected_s is None:
                offset_s = self._checked_start(at_s)
                self._expected_s = at_s
            elif abs(at_s - self._expected_s) > _MAX_OFF_S:
                offset_s = self._checked_gap(at_s - self._expected_s)
                self._expected_s = at_s
        if self._expected_s is not None:
            self._expected_s += length_s
        self._placed_s += offset_s + length_s
        return offset_s

    def _checked_start(self, at_s: float) -> float:
        # Frames without a time before this one have taken the place of what may be missing.
        if self._start_s is None or self._placed_s or abs(at_s - self._start_s) <= _MAX_OFF_S:
            return 0.0
        off_s = at_s - self._start_s
        if abs(off_s) > self._max_duration_s:
            self._absurd_s = off_s
            return 0.0
        self._late_s, self._cut_s = max(off_s, 0.0), max(-off_s, 0.0)
        return off_s

    def _checked_gap(self, off_s: float) -> float:
        if off_s < 0:
            return 0.0
        if self._placed_s + off_s > self._max_duration_s:
            self._absurd_s = off_s
            return 0.0
        self._num_gaps += 1
        self._gaps_s += off_s
        return off_s
