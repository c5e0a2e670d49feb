"""The directory of one run: sockets and settings of its stages, and the shared memory that carries its name.

A run that ends cleanly leaves nothing. One that was killed leaves its directory and its shared memory, which the next
run sweeps: a lock that only a living supervisor holds tells them apart.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "mimo-"
_LOCK = "supervisor.lock"
_SHM = Path("/dev/shm")


@contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """A private directory for this run, under `parent` or the system's directory for temporary files."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    unlocked = directory / f"{_LOCK}.new"
    with unlocked.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its real name only once it is locked: another run's sweep never sees it free.
        unlocked.rename(directory / _LOCK)
        try:
            yield directory
        finally:
            remove_run(directory)


def sweep(parent: Path) -> list[Path]:
    """Remove what killed runs left behind; what was removed."""
    removed = []
    for lock_path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock_path.open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_run(lock_path.parent)
                removed.append(lock_path.parent)
        except OSError:
            # Held by a living run, or somebody else's: not ours to touch.
            continue
    return removed


def remove_run(directory: Path) -> None:
    """Its files, and the shared memory that carries its name. Harmless twice."""
    shutil.rmtree(directory, ignore_errors=True)
    for segment in _SHM.glob(f"{directory.name}-*"):
        segment.unlink(missing_ok=True)
