"""A bucket of tokens: as many as it holds may be taken in one burst, and it fills at a steady rate.

Source: token bucket, Turner 1986, as in ATM's generic cell rate algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """`level` may be taken now, as of `seen_s` (monotonic seconds). Its owner takes: a level below 0 is a debt."""

    capacity: float
    per_minute: float
    level: float
    seen_s: float

    @classmethod
    def full(cls, capacity: float, per_minute: float, now_s: float) -> Bucket:
        return cls(capacity, per_minute, capacity, now_s)

    def fill(self, now_s: float) -> None:
        """What came since it was last filled."""
        self.level = min(self.capacity, self.level + (now_s - self.seen_s) * self.per_minute / 60)
        self.seen_s = now_s

    def seconds_until(self, level: float) -> float:
        """From when it was last filled, should nothing be taken. For a rate above 0."""
        return max(0.0, level - self.level) * 60 / self.per_minute
