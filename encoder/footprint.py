"""What this process takes of its machine, read from the kernel when somebody asks."""

import os
import time
from typing import Final

_STARTED_UNIX_S: Final = time.time()
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def footprint() -> dict[str, float]:
    """Resident memory (shared memory included), open files, processor time and the start, by their counters' names."""
    with open("/proc/self/statm", "rb") as file:
        resident_pages = int(file.read().split()[1])
    return {
        "process_resident_bytes": float(resident_pages * _PAGE_BYTES),
        "process_open_files": float(len(os.listdir("/proc/self/fd"))),
        "process_cpu_seconds": time.process_time(),
        "process_start_unix_seconds": _STARTED_UNIX_S,
    }
