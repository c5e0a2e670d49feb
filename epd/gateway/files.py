"""Files that clients upload, kept on disk until they are deleted or expire.

    <root>/lock                          held while a file is added, by whichever process adds it
    <root>/arriving/<process>/<upload>/  content, then about.json; the process keeps its directory locked
    <root>/kept/<owner>/<id>/            the same directory, renamed once it is whole and on disk

A file is there whole or not at all, whatever dies when: one rename brings it, another takes it away. So gateways may
share a root, and what a dead one left in `arriving` any other one removes. Nothing that a client says is ever part of a
path: an owner is a digest (see `epd.gateway.owner`), and an id is looked up only if it looks like those given out here.

Everything here blocks and may be called from any thread.
"""

import errno
import logging
import mmap
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from epd.errors import FilesFull, FileTooLarge, Overloaded, UnknownFile
from epd.gateway.files_space import Workspace, locked, names_in, sync, write_new
from epd.gateway.validation import shown
from preprocess.recognise import media_type, modality_of
from preprocess.types import Modality

logger = logging.getLogger(__name__)

Purpose = Literal["user_data", "vision", "assistants"]
"""What a file is for. The words are OpenAI's; here they mean the same: media for chat completions and embeddings."""

_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_OWNER: Final = re.compile(r"[0-9a-f]{32}")
# Where no API keys are in use.
_EVERYBODY: Final = "everybody"
_CONTENT, _ABOUT = "content", "about.json"
_ABOUT_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Of one file, and of all files of one API key."""

    file_max_bytes: int
    total_bytes: int
    max_count: int
    ttl_s: float


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a file; on disk as JSON beside its content. The name is the client's and only ever shown."""

    id: str
    filename: str
    purpose: Purpose
    size_bytes: int
    created_unix_s: int
    created_order: int
    """Unix nanoseconds, for the order of a list."""
    expires_unix_s: int
    media_type: str
    modality: Modality | None
    """What the content is, found from its bytes; None for what is no medium."""


class FilesUnusable(ValueError):
    """The directory for files cannot be used; the message says which it is, why, and what to do."""


class FileStore:
    """One gateway's access to a root. `open` it before use, `close` it at the end."""

    def __init__(self, root: Path, limits: FileLimits, *, unix_clock: Callable[[], float]) -> None:
        """`unix_clock` gives Unix seconds."""
        self.limits = limits
        self._root = root
        self._unix_clock = unix_clock
        self._known: dict[tuple[str, str], StoredFile] = {}
        self._workspace: Workspace | None = None
        self._arriving: dict[str, int] = {}
        self._guard = threading.Lock()

    def check(self) -> None:
        """Make the root. Raises FilesUnusable."""
        try:
            for directory in (self._root, self._kept, self._root / "arriving"):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise self._unusable(error) from error

    def open(self) -> None:
        """Make the root, and remove what is torn or expired. Raises FilesUnusable."""
        self.check()
        try:
            self._workspace = Workspace.make(self._root / "arriving")
            self.sweep(is_start=True)
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _unusable(self, error: OSError) -> FilesUnusable:
        return FilesUnusable(
            f"gateway.files_dir is {self._root}, which cannot be used: {error.strerror}; name another directory, or "
            "set gateway.files_bytes to 0 for no files"
        )

    def begin(self, owner: str) -> "Arriving":
        """Room for an upload, to be committed or abandoned once. Raises FilesFull where there is none at all."""
        kept_bytes = self._check_room(owner, 0)
        with _disk_full_named():
            return Arriving(self, owner, self._space.new_directory(), kept_bytes=kept_bytes)

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises UnknownFile."""
        file = self._read(owner, file_id) if _ID.fullmatch(file_id) else None
        if file is None:
            self._note(owner, file_id, None)
            raise unknown_file(file_id)
        return file

    def of(self, owner: str) -> list[StoredFile]:
        """All files of an owner, the oldest first."""
        files = [self._known.get((owner, file_id)) or self._read(owner, file_id) for file_id in self._ids(owner)]
        now_s = self._unix_clock()
        return sorted(
            (file for file in files if file is not None and file.expires_unix_s > now_s),
            key=lambda file: (file.created_order, file.id),
        )

    def open_content(self, owner: str, file_id: str) -> tuple[StoredFile, int]:
        """What is known of a file, and a descriptor of its content, which stays readable when the file is deleted.

        Raises UnknownFile.
        """
        file = self.get(owner, file_id)
        try:
            path = self._place(owner) / file_id / _CONTENT
            return file, os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise unknown_file(file_id) from error

    def read(self, owner: str, file_id: str, *, max_bytes: int) -> bytes:
        """The content. Raises UnknownFile, FileTooLarge."""
        file, descriptor = self.open_content(owner, file_id)
        with os.fdopen(descriptor, "rb") as content:
            if file.size_bytes > max_bytes:
                raise FileTooLarge(
                    f"the file has {file.size_bytes} bytes; allowed for a medium: {max_bytes} (fetch.max_bytes)"
                )
            return content.read(file.size_bytes)

    def delete(self, owner: str, file_id: str) -> None:
        """Raises UnknownFile. Who reads it now reads on."""
        self.get(owner, file_id)
        if not self._remove(owner, file_id):
            raise unknown_file(file_id)

    def sweep(self, *, is_start: bool = False) -> None:
        """Remove what has expired, and what processes that are gone were writing. At the start also what is damaged."""
        now_s = self._unix_clock()
        found: set[tuple[str, str]] = set()
        for owner in self._owners():
            for file_id in self._ids(owner):
                found.add((owner, file_id))
                known = None if is_start else self._known.get((owner, file_id))
                file = known or self._read(owner, file_id, is_expired_too=True)
                if file is None or file.expires_unix_s <= now_s:
                    why = "is damaged" if file is None else "has expired"
                    logger.info("file %s %s and is removed", file_id, why)
                    self._remove(owner, file_id)
        # What others have deleted.
        for owner, file_id in set(self._known) - found:
            if self._read(owner, file_id) is None:
                self._note(owner, file_id, None)
        self._space.remove_those_of_the_dead()

    def usage(self) -> tuple[int, int]:
        """Files and bytes of all owners that this process knows of."""
        with self._guard:
            known = list(self._known.values())
        return len(known), sum(file.size_bytes for file in known)

    @property
    def _kept(self) -> Path:
        return self._root / "kept"

    @property
    def _space(self) -> "Workspace":
        if self._workspace is None:
            raise RuntimeError("the file store is not open")
        return self._workspace

    def _owners(self) -> list[str]:
        names = names_in(self._kept)
        return [name for name in names if _OWNER.fullmatch(name)] + ([""] if _EVERYBODY in names else [])

    def _place(self, owner: str) -> Path:
        return self._kept / (owner or _EVERYBODY)

    def _ids(self, owner: str) -> list[str]:
        return [name for name in names_in(self._place(owner)) if _ID.fullmatch(name)]

    def _read(self, owner: str, file_id: str, *, is_expired_too: bool = False) -> StoredFile | None:
        """From disk: another gateway may have deleted it. None for what is not there, or not whole."""
        directory = self._place(owner) / file_id
        try:
            with (directory / _ABOUT).open("rb") as about:
                file = msgspec.json.decode(about.read(_ABOUT_BYTES), type=StoredFile)
            is_whole = (directory / _CONTENT).stat().st_size == file.size_bytes and file.id == file_id
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not is_whole or (file.expires_unix_s <= self._unix_clock() and not is_expired_too):
            return None
        self._note(owner, file_id, file)
        return file

    def _remove(self, owner: str, file_id: str) -> bool:
        """Whether it was this call that removed it."""
        self._note(owner, file_id, None)
        away = self._space.new_name()
        try:
            os.rename(self._place(owner) / file_id, away)
        except FileNotFoundError:
            return False
        shutil.rmtree(away, ignore_errors=True)
        return True

    def _note(self, owner: str, file_id: str, file: StoredFile | None) -> None:
        with self._guard:
            if file is None:
                self._known.pop((owner, file_id), None)
            else:
                self._known[owner, file_id] = file

    def _arrived(self, owner: str, change_bytes: int) -> int:
        """Bytes of all uploads of an owner to this process that are under way, after a change."""
        with self._guard:
            arriving_bytes = self._arriving.get(owner, 0) + change_bytes
            self._arriving[owner] = arriving_bytes
            if not arriving_bytes:
                del self._arriving[owner]
        return arriving_bytes

    def _check_room(self, owner: str, size_bytes: int) -> int:
        """For one more file of this size, so far. The bytes kept; raises FilesFull naming the setting."""
        files = self.of(owner)
        limits = self.limits
        if len(files) + 1 > limits.max_count:
            raise FilesFull(
                f"{len(files)} files are kept, and one more is sent; allowed: {limits.max_count} "
                "(gateway.files_count); delete some",
                param="file",
            )
        kept_bytes = sum(file.size_bytes for file in files)
        if kept_bytes + size_bytes > limits.total_bytes:
            raise FilesFull(
                f"{kept_bytes} bytes of files are kept, and {size_bytes} more are sent; allowed: {limits.total_bytes} "
                "(gateway.files_bytes); "
                "delete some",
                param="file",
            )
        return kept_bytes

    def _add(self, owner: str, directory: Path, file: StoredFile) -> None:
        """Raises FilesFull. One process at a time, so that the limits hold for all together."""
        with locked(self._root / "lock"):
            self._check_room(owner, file.size_bytes)
            target = self._place(owner)
            target.mkdir(mode=0o700, exist_ok=True)
            os.rename(directory, target / file.id)
            sync(target)
        self._note(owner, file.id, file)


class Arriving:
    """An upload under way: `write` its pieces, then `commit` or `abandon`."""

    def __init__(self, store: FileStore, owner: str, directory: Path, *, kept_bytes: int) -> None:
        """`kept_bytes`: of the owner's files before this one."""
        self._store = store
        self._owner = owner
        self._directory = directory
        self._kept_bytes = kept_bytes
        self._is_over = False
        self.size_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._content = os.fdopen(os.open(directory / _CONTENT, flags, 0o600), "r+b", buffering=0)

    def write(self, piece: bytes | bytearray) -> None:
        """Raises FileTooLarge, FilesFull, Overloaded for a full disk."""
        limits = self._store.limits
        self.size_bytes += len(piece)
        arriving_bytes = self._store._arrived(self._owner, len(piece))
        if self.size_bytes > limits.file_max_bytes:
            raise too_large(limits, f"more than {limits.file_max_bytes} bytes")
        # Of all that arrives at the same time: the disk has to hold it before it is known what will be kept.
        if self._kept_bytes + arriving_bytes > limits.total_bytes:
            raise FilesFull(
                f"{self._kept_bytes} bytes of files are kept, and {arriving_bytes} are arriving; "
                f"allowed: {limits.total_bytes} (gateway.files_bytes); delete some",
                param="file",
            )
        view = memoryview(piece)
        with _disk_full_named():
            while view:
                view = view[self._content.write(view) :]

    def commit(self, *, filename: str, purpose: Purpose, ttl_s: float) -> StoredFile:
        """Keep it. Raises FilesFull, Overloaded for a full disk."""
        now_s = self._store._unix_clock()
        with _disk_full_named():
            modality, kind = self._recognised()
            file = StoredFile(
                id=f"file-{secrets.token_hex(16)}",
                filename=filename,
                purpose=purpose,
                size_bytes=self.size_bytes,
                created_unix_s=int(now_s),
                created_order=int(now_s * 1e9),
                expires_unix_s=int(now_s + min(ttl_s, self._store.limits.ttl_s)),
                media_type=kind,
                modality=modality,
            )
            os.fsync(self._content.fileno())
            self._content.close()
            write_new(self._directory / _ABOUT, msgspec.json.encode(file))
            sync(self._directory)
            self._store._add(self._owner, self._directory, file)
        return file

    def abandon(self) -> None:
        """Leave nothing. To be called after `commit` as well, which it does not undo."""
        if not self._is_over:
            self._is_over = True
            self._store._arrived(self._owner, -self.size_bytes)
        self._content.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _recognised(self) -> tuple[Modality | None, str]:
        if not self.size_bytes:
            return None, "application/octet-stream"
        with mmap.mmap(self._content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return modality_of(mapped), media_type(mapped)


def too_large(limits: FileLimits, what: str) -> FileTooLarge:
    return FileTooLarge(
        f"the file has {what}; allowed: {limits.file_max_bytes} (gateway.file_max_bytes)",
        param="file",
    )


def unknown_file(file_id: str) -> UnknownFile:
    return UnknownFile(f"there is no file {shown(file_id)}", param="file_id")


@contextmanager
def _disk_full_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
            raise
        logger.warning("a file could not be stored: %s", error)
        raise Overloaded("the server has no room for files at present", retry_after_s=30.0) from error
