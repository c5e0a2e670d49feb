"""The engine's sense of time, passed in so that tests can own it."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`monotonic_s` measures durations; `unix_s` is what deadlines of other processes are stated in."""

    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time
