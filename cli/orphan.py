"""How a stage ends when its supervisor was killed: in the same order, and as bounded, as when it is told to stop.

    supervisor   killed
    head         the gateway or front: SIGTERM from the kernel at once; it lets its answers end, and goes
    the others   serve on until the head has ended or `drain_s` is over, then SIGTERM
    whoever      is still there `drain_s` after its SIGTERM: SIGKILL

The head holds a lock that only its end frees, whichever process it is by then: the others find it by the lock's file,
in the directory of the run.
"""

import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.1
_LOCK: Final = "head.lock"


def follow_parent(parent_pid: int, *, is_head: bool, directory: Path, drain_s: float) -> None:
    """End this process after its parent has died: at the latest after `drain_s`, if it is the head; else after the
    head, which asks the kernel for its signal itself (`cli.stage.die_with_parent`)."""
    # Opened now: the next deployment to start removes what a killed one left.
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if is_head:
        # Of this process alone: children that are forked do not hold it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
    following = threading.Thread(
        target=_follow, args=(parent_pid, is_head, descriptor, drain_s), name="orphan", daemon=True
    )
    following.start()


def _follow(parent_pid: int, is_head: bool, descriptor: int, drain_s: float) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    if not is_head:
        give_up_s = time.monotonic() + drain_s
        while not _is_free(descriptor) and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
