"""Time that only moves when told to."""

from epd.engine.clock import Clock


class FakeClock:
    """`clock` is what the engine gets; `advance` moves both of its readings."""

    def __init__(self, *, unix_s: float = 1_000_000.0) -> None:
        self._now_s = 0.0
        self._unix_s = unix_s
        self.clock = Clock(monotonic_s=lambda: self._now_s, unix_s=lambda: self._unix_s + self._now_s)

    @property
    def unix_s(self) -> float:
        return self.clock.unix_s()

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
