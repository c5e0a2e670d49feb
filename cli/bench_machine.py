"""The machine a bench ran on, and how much of it others took meanwhile."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_STAT = Path("/proc/stat")
_CPUINFO = Path("/proc/cpuinfo")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
# Of /proc/PID/stat, counted from the state: user and system time, then those of children.
_UTIME = 11


def num_cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Busyness:
    """CPU time of the machine from now on, split into ours and the others'."""

    def __init__(self) -> None:
        self._machine = _machine_ticks()
        self._own_s = own_cpu_s()

    def others_share(self) -> float | None:
        """0 to 1, steal by the host included; None where the system does not tell."""
        now = _machine_ticks()
        if self._machine is None or now is None:
            return None
        passed = [after - before for before, after in zip(self._machine, now, strict=True)]
        total = sum(passed)
        if total <= 0:
            return None
        own = (own_cpu_s() - self._own_s) * os.sysconf("SC_CLK_TCK")
        busy = total - passed[_IDLE] - passed[_IOWAIT]
        return min(max((busy - own) / total, 0.0), 1.0)


def describe_machine(packages: Sequence[str], *, num_threads: int, quick: bool) -> dict[str, Any]:
    """Plain values for the report; `packages` are those whose versions matter for the figures."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "threads": num_threads,
        "memory_mb": _memory_mb(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages} | {"ffmpeg": ffmpeg_version()},
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
    }


def ffmpeg_version() -> str | None:
    """Of the command, where there is one."""
    path = shutil.which("ffmpeg")
    if path is None:
        return None
    done = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return words[2] if len(words) > 2 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000


def _machine_ticks() -> list[int] | None:
    """user, nice, system, idle, iowait, irq, softirq, steal; guest time is within user time."""
    if not _STAT.exists():
        return None
    with _STAT.open() as file:
        return [int(word) for word in file.readline().split()[1 : _STEAL + 2]]


def own_cpu_s() -> float:
    """Of this process, those it has started, those they have started, and those of them that have ended."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return own_s + sum(cpu_by_descendant().values())


def cpu_by_descendant() -> dict[int, float]:
    """CPU seconds of every process below this one that is alive, by pid; with what its own children used that ended.

    Empty where the system does not tell.
    """
    stats = {}
    for path in _STAT.parent.glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        # The name, in brackets, may hold anything; after it come the state and the parent.
        fields = text.rpartition(")")[2].split()
        stats[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[_UTIME : _UTIME + 4])))
    below: dict[int, float] = {}
    grown = {os.getpid()}
    while grown:
        grown = {pid for pid, (parent, _) in stats.items() if parent in grown}
        below |= {pid: stats[pid][1] / os.sysconf("SC_CLK_TCK") for pid in grown}
    return below
