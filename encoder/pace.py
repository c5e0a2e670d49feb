"""How slowly a client may send: a silence that is too long, or an average that is too low, ends the reading."""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceLimits:
    """`timeout_s` is the longest silence, and the time after which the average must be `min_rate_bytes_s`.

    A client that sends steadily, however thin its line, is cut off by neither as long as it keeps that average.
    """

    timeout_s: float = 30.0
    min_rate_bytes_s: float = 4096.0


class Pace:
    """The limits of one body, from now on. They act through `timeout`, within which the body is to be read."""

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._started_s = asyncio.get_running_loop().time()
        self._is_average = False
        self.timeout = asyncio.timeout(limits.timeout_s)

    def note(self, size_bytes: int) -> None:
        """So many bytes of the body have come in all, the last of them just now."""
        silent_s = asyncio.get_running_loop().time() + self._limits.timeout_s
        slow_s = self._started_s + self._limits.timeout_s + size_bytes / self._limits.min_rate_bytes_s
        self._is_average = slow_s < silent_s
        self.timeout.reschedule(min(silent_s, slow_s))

    def complaint(self, size_bytes: int) -> str:
        """Why the time was up, with the settings that say so."""
        limits = self._limits
        if self._is_average:
            why = (
                f"the body came at less than {limits.min_rate_bytes_s:g} bytes/s on average after "
                f"{limits.timeout_s:g} s (front.min_body_rate_bytes_s)"
            )
        else:
            why = f"nothing of the body came for {limits.timeout_s:g} s (front.body_timeout_s)"
        return f"{why}; {size_bytes} bytes had arrived"
