"""Which processes use an arena, and whether they still live.

A process id alone is no proof: the kernel gives it to somebody else after its owner has died. The time the process
started, in clock ticks since boot, goes with it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_STATE, _START_TIME = 0, 19  # of the words after the command's name in /proc/PID/stat


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this host, for ever: no later one equals it."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process that has this number now; None if nobody has."""
        words = _stat(pid)
        return None if words is None else cls(pid, int(words[_START_TIME]))

    @classmethod
    def current(cls) -> "Process":
        me = cls.of(os.getpid())
        assert me is not None, "this process lives"
        return me

    @property
    def is_alive(self) -> bool:
        """False also for one that has ended and was not waited for yet."""
        words = _stat(self.pid)
        return words is not None and words[_STATE] not in "ZX" and int(words[_START_TIME]) == self.started_ticks


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    return text.rpartition(")")[2].split()
