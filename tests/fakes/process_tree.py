"""What runs below a process, as Linux tells it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    """Whether all of them end in time; a process that nobody has waited for has ended too."""
    stop_s = time.monotonic() + timeout_s
    while time.monotonic() < stop_s:
        states = [state(pid) for pid in pids]
        if all(found in ("", "Z") for found in states):
            return True
        time.sleep(0.02)
    return False


def state(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""
