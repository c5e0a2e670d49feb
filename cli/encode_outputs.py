"""Where rows go: one packed file, one file per input, or shards. All three go on where an earlier run ended.

What is done is read from the outputs themselves and from the workspace, by the identity of content and settings, so
whatever has changed since is encoded again, and so is what was damaged: rows count as done when they have been read and
are what their checksum says. Files come into being whole, in the order of the inputs, and the same
inputs give the same bytes, however often the work was broken off.
"""

import errno
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from cli.encode_inputs import Input
from cli.encode_records import Failure, OutputFailed, Records
from cli.encode_volumes import (
    About,
    HeaderTooLarge,
    NotAVolume,
    RowsDamaged,
    Stored,
    Volume,
    header_of,
    read_volume,
    sound_tensors,
    write_volume,
)
from cli.encode_workspace import Workspace
from cli.load import ConfigError
from cli.media_files import path_text

SUFFIX: Final = ".safetensors"
ContentId = tuple[str, str]
"""Key and settings."""
# A name that the file system does not take is the fault of one input.
_FAULTS_OF_NAMES: Final = frozenset({errno.ENAMETOOLONG, errno.EILSEQ, errno.EISDIR, errno.ENOTDIR})
_SHARD: Final = re.compile(r"shard-(\d{5,})\.safetensors")


class Output(Protocol):
    """Where the rows of all inputs go. `add` and `finish` are for one thread, the rest for any."""

    def recall(self, item: Input) -> Stored | None:
        """What an earlier run left under the name of this input."""

    def find(self, content: ContentId) -> Stored | None:
        """Rows of this content, of an earlier run or of this one."""

    def keep(self, item: Input, about: About, rows: memoryview) -> Stored:
        """Takes new rows to the disk. Raises OSError."""

    def share(self, item: Input, stored: Stored) -> Stored:
        """The same rows for another input. Raises OSError, RowsDamaged."""

    def add(self, item: Input, outcome: Stored | Failure | None) -> None:
        """The next input in order; None where it has not been got to. Raises OutputFailed."""

    def finish(self, *, whole: bool) -> None:
        """After the last input; `whole` when all have been got to. Raises OutputFailed."""


def is_shard(path: Path, directory: Path) -> bool:
    """Whether a run with `Shards` for this directory would write it or remove it."""
    return path.parent == directory and _SHARD.fullmatch(path.name) is not None


def is_fault_of_name(error: OSError) -> bool:
    """Whether another input may well be written."""
    return error.errno in _FAULTS_OF_NAMES


def about_for(item: Input, about: About) -> About:
    """What is known of the rows, as this input's."""
    source = None if item.id is None else item.label
    return about if about.input == source else msgspec.structs.replace(about, input=source)


class _Library:
    """Rows that are on the disk, by content and by name."""

    def __init__(self, found: Sequence[Stored]) -> None:
        self._adding = threading.Lock()
        self._by_content: dict[ContentId, Stored] = {}
        self._by_name: dict[str, Stored] = {}
        for stored in found:
            self.add(stored)

    def recall(self, item: Input) -> Stored | None:
        return self._by_name.get(item.name)

    def find(self, content: ContentId) -> Stored | None:
        return self._by_content.get(content)

    def add(self, stored: Stored) -> None:
        with self._adding:
            self._by_content[stored.about.key, stored.about.settings] = stored
            self._by_name[stored.name] = stored


class _Spooled:
    """Rows wait in the workspace, and are then copied together."""

    def __init__(
        self, workspace: Workspace, records: Records, found: Sequence[Stored], sound: Iterable[Path] = ()
    ) -> None:
        """`sound`: files that are whole, all their rows included."""
        self._workspace = workspace
        self._records = records
        self._library = _Library(found)
        self._sound = set(sound)

    def recall(self, item: Input) -> Stored | None:
        return self._library.recall(item)

    def find(self, content: ContentId) -> Stored | None:
        return self._library.find(content)

    def keep(self, item: Input, about: About, rows: memoryview) -> Stored:
        stored = self._workspace.keep(item.name, about, rows)
        self._library.add(stored)
        return stored

    def share(self, item: Input, stored: Stored) -> Stored:
        return stored

    def _put(self, target: Path, tensors: Sequence[tuple[Input, Stored]], existing: Volume | None = None) -> None:
        """Writes a file, unless it is there as it would be. Rows of `existing` outlive it. Raises OutputFailed."""
        try:
            named = [(item.name, about_for(item, stored.about)) for item, stored in tensors]
            header = header_of(named)
            if target not in self._sound or not _begins_with(target, header):
                partial = self._workspace.partial()
                write_volume(partial, header, [stored for _, stored in tensors], durable=True)
                if existing is not None:
                    self._workspace.retire(existing)
                partial.replace(target)
        except RowsDamaged as error:
            raise OutputFailed(f"{error}; run again with --overwrite") from error
        except HeaderTooLarge as error:
            raise OutputFailed(f"{path_text(target)}: {error}; use --out-dir, with --shard-rows if you like") from error
        except OSError as error:
            raise OutputFailed(f"cannot write {path_text(target)}: {error.strerror or error}") from error
        volume, offset = Volume(target), len(header)
        for name, about in named:
            self._library.add(Stored(about, name, volume, offset))
            offset += about.num_bytes


class PackedFile(_Spooled):
    """One file, made at the end."""

    def __init__(self, target: Path, workspace: Workspace, records: Records, *, overwrite: bool) -> None:
        """Raises ConfigError for a file there that is no output of this command."""
        if overwrite:
            workspace.clear()
        own = _Own([] if overwrite else [target])
        super().__init__(workspace, records, [] if overwrite else [*own.found, *workspace.scan()], own.sound)
        self._target = target
        self._tensors: list[tuple[Input, Stored]] = []
        self._outcomes: list[tuple[Input, Stored | Failure]] = []
        self.is_written = False

    def add(self, item: Input, outcome: Stored | Failure | None) -> None:
        if outcome is not None:
            self._outcomes.append((item, outcome))
        if isinstance(outcome, Stored):
            self._tensors.append((item, outcome))

    def finish(self, *, whole: bool) -> None:
        """Broken off, it makes a file of what there is, but does not replace one, which may hold more."""
        self.is_written = bool(self._tensors) and (whole or not self._target.exists())
        if self.is_written:
            self._put(self._target, self._tensors)
            self._workspace.clear()
        elif not whole:
            self._records.quiet()
        for item, outcome in self._outcomes:
            if isinstance(outcome, Failure):
                self._records.failed(item, outcome)
            else:
                self._records.done(item, about_for(item, outcome.about), self._target, item.name)
        if self.is_written or whole:
            self._records.publish()
        else:
            self._records.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """When a shard is full; one medium's rows are never divided."""

    max_rows: int | None
    max_bytes: int | None


class Shards(_Spooled):
    """Files of many inputs each, made as soon as enough inputs in a row are done. Content is stored once."""

    def __init__(
        self, directory: Path, limits: ShardLimits, workspace: Workspace, records: Records, *, overwrite: bool
    ) -> None:
        """Raises ConfigError for a shard there that is no output of this command."""
        paths = [path for path in sorted(directory.iterdir()) if _SHARD.fullmatch(path.name)]
        if overwrite:
            workspace.clear()
        own = _Own([] if overwrite else paths)
        super().__init__(workspace, records, [] if overwrite else [*own.found, *workspace.scan()], own.sound)
        self._directory = directory
        self._limits = limits
        self._volumes = {path: Volume(path) for path in paths} | {item.volume.path: item.volume for item in own.found}
        self._overwrite = overwrite
        self._num_shards = 0
        self._broken = False
        self._homes: dict[ContentId, tuple[Path, str]] = {}
        self._lines: list[tuple[Input, Stored | Failure]] = []
        self._tensors: list[tuple[Input, Stored]] = []
        self._rows = self._bytes = 0

    def add(self, item: Input, outcome: Stored | Failure | None) -> None:
        """What comes after a gap waits in the workspace for a run that closes it."""
        self._broken = self._broken or outcome is None
        if outcome is None or (self._broken and isinstance(outcome, Stored)):
            return
        if isinstance(outcome, Stored):
            self._add_rows(item, outcome)
        self._lines.append((item, outcome))

    def finish(self, *, whole: bool) -> None:
        if whole:
            self._write_shard()
            for path, volume in self._volumes.items():
                number = _SHARD.fullmatch(path.name)
                if volume.path == path and number is not None and int(number[1]) >= self._num_shards:
                    path.unlink(missing_ok=True)
        for item, outcome in self._lines:
            if isinstance(outcome, Failure):
                self._records.failed(item, outcome)
        self._records.publish()
        if whole:
            self._workspace.clear()

    def _add_rows(self, item: Input, stored: Stored) -> None:
        about, limits = stored.about, self._limits
        content = (about.key, about.settings)
        if content in self._homes:
            return
        full = limits.max_rows is not None and self._rows + about.rows > limits.max_rows
        full = full or (limits.max_bytes is not None and self._bytes + about.num_bytes > limits.max_bytes)
        if full and self._tensors:
            self._write_shard()
        self._homes[content] = (self._shard_path(), item.name)
        self._tensors.append((item, stored))
        self._rows += about.rows
        self._bytes += about.num_bytes

    def _shard_path(self) -> Path:
        return self._directory / f"shard-{self._num_shards:05}{SUFFIX}"

    def _write_shard(self) -> None:
        if self._tensors:
            target = self._shard_path()
            existing = self._volumes.get(target)
            self._put(target, self._tensors, existing if target.exists() else None)
            for _, stored in self._tensors:
                self._workspace.drop(stored)
            self._num_shards += 1
        for item, outcome in self._lines:
            if isinstance(outcome, Failure):
                self._records.failed(item, outcome)
            else:
                output, tensor = self._homes[outcome.about.key, outcome.about.settings]
                self._records.done(item, about_for(item, outcome.about), output, tensor)
        self._lines, self._tensors, self._rows, self._bytes = [], [], 0, 0


class FileTree:
    """One file per input, below a directory as the inputs lie."""

    def __init__(self, directory: Path, workspace: Workspace, records: Records, *, overwrite: bool) -> None:
        workspace.clear()
        self._directory = directory
        self._workspace = workspace
        self._records = records
        self._overwrite = overwrite
        self._made: set[Path] = set()
        self._homes: dict[ContentId, Path] = {}
        """Of each content, one file; of many, so little is known without reading them."""

    def recall(self, item: Input) -> Stored | None:
        return None if self._overwrite else _only_tensor(self._place(item))

    def find(self, content: ContentId) -> Stored | None:
        path = self._homes.get(content)
        return None if path is None else _only_tensor(path)

    def keep(self, item: Input, about: About, rows: memoryview) -> Stored:
        return self._move(item, self._workspace.write(item.name, about, rows))

    def share(self, item: Input, stored: Stored) -> Stored:
        about, path = about_for(item, stored.about), self._place(item)
        if stored.volume.path == path and stored.name == item.name and stored.about == about:
            self._homes.setdefault((about.key, about.settings), path)
            return stored
        partial, header = self._workspace.partial(), header_of([(item.name, about)])
        write_volume(partial, header, [stored], durable=False)
        return self._move(item, Stored(about, item.name, Volume(partial), len(header)))

    def add(self, item: Input, outcome: Stored | Failure | None) -> None:
        if outcome is None:
            # The index is of all outputs, whichever run they are of.
            outcome = self.recall(item)
        if isinstance(outcome, Failure):
            self._records.failed(item, outcome)
        elif outcome is not None:
            self._records.done(item, outcome.about, self._place(item), outcome.name)

    def finish(self, *, whole: bool) -> None:
        self._records.publish()

    def _place(self, item: Input) -> Path:
        return self._directory / f"{item.place}{SUFFIX}"

    def _move(self, item: Input, stored: Stored) -> Stored:
        path = self._place(item)
        try:
            if path.parent not in self._made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._made.add(path.parent)
            stored.volume.path.replace(path)
        except OSError:
            stored.volume.path.unlink(missing_ok=True)
            raise
        stored.volume.path = path
        self._homes[stored.about.key, stored.about.settings] = path
        return stored


class _Own:
    """What outputs hold, if they are there."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads all rows. Raises ConfigError for a file of somebody else's."""
        self.found: list[Stored] = []
        """Without what is damaged."""
        self.sound: list[Path] = []
        """Those in which nothing is."""
        for path in paths:
            try:
                stored = read_volume(path) if path.exists() else []
                sound = sound_tensors(stored)
            except NotAVolume as error:
                raise ConfigError(
                    f"{path_text(path)} exists and is not an output of mimo encode; give another name, or --overwrite"
                ) from error
            except OSError as error:
                raise ConfigError(f"{path_text(path)}: {error.strerror}") from error
            self.found += sound
            if len(sound) == len(stored):
                self.sound.append(path)


def _only_tensor(path: Path) -> Stored | None:
    """None where there is no whole file of one tensor with its rows: one that is not whole is made anew."""
    try:
        found = sound_tensors(read_volume(path))
    except (NotAVolume, OSError):
        return None
    return found[0] if len(found) == 1 else None


def _begins_with(path: Path, header: bytes) -> bool:
    """Whether the file has just this header, which tells all of it, checksums included."""
    try:
        with path.open("rb") as file:
            return file.read(len(header)) == header
    except OSError:
        return False
