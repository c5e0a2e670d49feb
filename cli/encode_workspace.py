"""A hidden directory beside the output, of one run at a time: rows that wait for their place, and files half written.

Whatever ends a run, the directory's whole files are good for the next one: each was written under another name first.
"""

import fcntl
import itertools
import os
from pathlib import Path
from typing import Final

from cli.encode_volumes import About, NotAVolume, Stored, Volume, read_volume, sound_tensors, write_rows
from cli.load import ConfigError
from cli.media_files import path_text

_PARTIAL: Final = ".partial"
_RETIRED: Final = "retired-"


class Workspace:
    """Locked for this process until it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when another run uses it, OSError when it cannot be made."""
        self.path = path
        self._names = itertools.count()
        while True:
            path.mkdir(exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock)
                raise ConfigError(f"another mimo encode is writing there at present: {path_text(path)}") from error
            if path.is_dir() and os.path.samestat(os.fstat(self._lock), path.stat()):
                break
            # Whoever had the lock has removed what we opened.
            os.close(self._lock)

    def partial(self) -> Path:
        """A new name for a file to be written and then moved into place."""
        return self.path / f"{next(self._names)}{_PARTIAL}"

    def keep(self, name: str, about: About, rows: memoryview) -> Stored:
        """Rows on disk, found by the next run as well. From any thread."""
        stored = self.write(name, about, rows)
        path = self.path / _name(about)
        stored.volume.path.replace(path)
        return Stored(about, name, Volume(path), stored.offset)

    def write(self, name: str, about: About, rows: memoryview) -> Stored:
        """Rows in a file yet to be moved into place."""
        partial = self.partial()
        try:
            return write_rows(partial, name, about, rows)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def retire(self, volume: Volume) -> None:
        """Takes in an output that will be replaced, since rows in it may be needed yet."""
        path = self.path / f"{_RETIRED}{os.getpid()}-{next(self._names)}.safetensors"
        volume.path.replace(path)
        volume.path = path

    def drop(self, stored: Stored) -> None:
        """Removes rows kept here, now that they are elsewhere; others' files and retired ones stay."""
        path = stored.volume.path
        if path.parent == self.path and path.name == _name(stored.about):
            path.unlink(missing_ok=True)

    def scan(self) -> list[Stored]:
        """What earlier runs kept here; what they left half done is removed."""
        found: list[Stored] = []
        for path in sorted(self.path.iterdir()):
            try:
                if path.suffix == _PARTIAL:
                    raise NotAVolume
                # Nothing of this was forced to the disk: a machine that went down may have left zeros.
                kept = read_volume(path)
                if len(sound_tensors(kept)) < len(kept):
                    raise NotAVolume
                found += kept
            except NotAVolume:
                path.unlink()
        return found

    @property
    def num_kept(self) -> int:
        """Contents whose rows wait here for the next run."""
        return sum(path.suffix == ".safetensors" and not path.name.startswith(_RETIRED) for path in self.path.iterdir())

    def clear(self) -> None:
        """Nothing in it is needed any more."""
        for path in self.path.iterdir():
            path.unlink()

    def close(self) -> None:
        """Removes the directory if it is empty, and lets go of the lock."""
        try:
            self.path.rmdir()
        except OSError:
            pass
        finally:
            os.close(self._lock)


def _name(about: About) -> str:
    return f"{about.key}-{about.settings}.safetensors"
