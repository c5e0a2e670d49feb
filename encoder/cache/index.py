"""The index of an arena: which pages hold which embedding, who leases it, who is about to write where.

An SQLite file beside the segment, opened by every process that uses the arena. Its locks die with the process that
holds them and its journal makes an unfinished transaction void, so a process may be killed at any instruction: what it
published stays, what it only began never was.

    free          runs of pages nobody has, none adjacent to the next
    entries       published embeddings; those without a lease can be evicted, oldest use first
    leases        by number; an entry counts its own
    reservations  pages somebody is about to write, with the holder they belong to
    holders       the stores that are open: a process each, and what it found and missed

Nothing is synced to a disk (there is none) and no transaction spans a wait, so one takes tens of microseconds. Who
finds the index locked tries again at once. After `patience_s` that is ArenaLocked, and until the lock is got again a
single try is: no event loop stands still because another process was stopped, or is being torn down, inside a
transaction. Who can wait does so between tries (see `encoder.cache.patience`).
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from encoder.cache.arena import Extent, create_segment, index_path, remove_arena
from encoder.cache.holder import Process
from encoder.errors import ArenaLocked, ArenaUnavailable, EncoderBusy

VERSION: Final = 1
APPLICATION_ID: Final = 0x4D694D6F
# How long a process that may wait does: it starts, ends, or is a tool.
PATIENCE_S: Final = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3
# Pages of journal before they are moved to the index itself: that takes about a millisecond.
_CHECKPOINT_PAGES = 256

# The last is what many processes opening the index at once may give.
_LOCKED: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)

# RETURNING.
_OLDEST_SQLITE = (3, 35)

_SCHEMA = """
CREATE TABLE arena (
    version INTEGER NOT NULL, page_bytes INTEGER NOT NULL, num_pages INTEGER NOT NULL,
    pid INTEGER NOT NULL, started_ticks INTEGER NOT NULL, created_unix_s REAL NOT NULL,
    width INTEGER, dtype TEXT, row_bytes INTEGER,
    hits INTEGER NOT NULL DEFAULT 0, misses INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE free (start INTEGER PRIMARY KEY, stop INTEGER NOT NULL UNIQUE);
CREATE TABLE entries (
    key TEXT PRIMARY KEY, start INTEGER NOT NULL, stop INTEGER NOT NULL,
    num_leases INTEGER NOT NULL DEFAULT 0, last_use_ns INTEGER NOT NULL,
    num_rows INTEGER NOT NULL, checksum BLOB NOT NULL, layout BLOB NOT NULL, warnings BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX idle ON entries (last_use_ns) WHERE num_leases = 0;
CREATE INDEX leased ON entries (start, stop) WHERE num_leases > 0;
CREATE TABLE leases (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, holder TEXT NOT NULL, owner TEXT NOT NULL, expires_s REAL NOT NULL
);
CREATE INDEX expiry ON leases (expires_s);
CREATE TABLE reservations (
    id INTEGER PRIMARY KEY, holder TEXT NOT NULL, key TEXT NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL
);
CREATE TABLE holders (
    id TEXT PRIMARY KEY, pid INTEGER NOT NULL, started_ticks INTEGER NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, misses INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What one row of every embedding of an arena is."""

    width: int
    dtype: str
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    page_bytes: int
    num_pages: int


def create_arena(name: str, *, size_bytes: int, page_bytes: int) -> None:
    """Make segment and index of an empty arena, replacing one of that name. Raises ArenaUnavailable.

    The index gets its name last: who finds it finds a whole arena. Of which rows, the first store says.
    """
    if size_bytes < page_bytes:
        raise ValueError(f"size_bytes is {size_bytes}, must be at least page_bytes, {page_bytes}")
    remove_arena(name)
    num_pages = size_bytes // page_bytes
    create_segment(name, num_pages * page_bytes)
    path = index_path(name)
    unready = path.with_name(f"{path.name}-new")
    maker = Process.current()
    try:
        os.close(os.open(unready, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(unready, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = MEMORY")
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.executescript(_SCHEMA)
            database.execute(
                "INSERT INTO arena (version, page_bytes, num_pages, pid, started_ticks, created_unix_s) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (VERSION, page_bytes, num_pages, maker.pid, maker.started_ticks, time.time()),
            )
            database.execute("INSERT INTO free VALUES (0, ?)", (num_pages,))
            database.execute("PRAGMA journal_mode = WAL")
        unready.rename(path)
    except (OSError, sqlite3.Error) as error:
        remove_arena(name)
        raise ArenaUnavailable(f"the index of the embedding arena cannot be made in {path.parent}: {error}") from error


class Index:
    """One connection to the index of an arena, used from one thread at a time. Statements belong inside `writing`."""

    def __init__(self, name: str) -> None:
        """Raises ArenaUnavailable when there is no such arena, or one of another version, and ArenaLocked."""
        self._database = open_database(index_path(name))
        self._depth = 0
        self.patience_s = PATIENCE_S
        """How long a call stands still before it is ArenaLocked."""
        self._locked_since_s: float | None = None
        self._last_ns = 0
        self._seen_version = 0
        version, page_bytes, num_pages = self.row("SELECT version, page_bytes, num_pages FROM arena")
        if version != VERSION:
            self._database.close()
            raise ArenaUnavailable(f"the arena {name} is of version {version}, this process needs {VERSION}")
        self.geometry = Geometry(page_bytes, num_pages)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction that is undone when the block raises; inside another one, a part of that.

        Raises ArenaLocked when another process keeps the index locked.
        """
        if not self._depth:
            self._execute("BEGIN IMMEDIATE", ())
            # Only this proves it: reading goes on beside most locks.
            self._locked_since_s = None
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            if not self._depth and self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._depth -= 1
        if not self._depth:
            try:
                self._execute("COMMIT", ())
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All reads of the block see the same moment."""
        self._execute("BEGIN", ())
        try:
            yield
        finally:
            self._database.execute("ROLLBACK")

    def run(self, statement: str, arguments: Sequence[Any] = ()) -> int:
        """Execute a statement that returns nothing; how many rows it changed."""
        return self._execute(statement, arguments).rowcount

    def rows(self, statement: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        # All at once: a statement that is still being read would keep a transaction open.
        return self._execute(statement, arguments).fetchall()

    def find(self, statement: str, arguments: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row, None without any."""
        found = self.rows(statement, arguments)
        return found[0] if found else None

    def row(self, statement: str, arguments: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The one row of a statement that always has one."""
        (found,) = self.rows(statement, arguments)
        return found

    def tick_ns(self) -> int:
        """A time that no earlier call of any process returned, on the clock that all processes of a host share.

        Inside `writing`: there the processes take turns.
        """
        self._last_ns = max(time.monotonic_ns(), self._last_ns + 1)
        return self._last_ns

    def changed_elsewhere(self) -> bool:
        """Whether another connection has written since the last call."""
        (version,) = self.row("PRAGMA data_version")
        changed: bool = version != self._seen_version
        self._seen_version = version
        return changed

    def adopt(self, rows: RowFormat) -> None:
        """Say what a row is; the first store decides. Raises ArenaUnavailable for another format than the arena's."""
        with self.writing():
            self.run(
                "UPDATE arena SET width = ?, dtype = ?, row_bytes = ? WHERE width IS NULL",
                (rows.width, rows.dtype, rows.row_bytes),
            )
            found = RowFormat(*self.row("SELECT width, dtype, row_bytes FROM arena"))
        if found != rows:
            raise ArenaUnavailable(
                f"the arena has rows of {found.width} {found.dtype}, this encoder makes {rows.width} {rows.dtype}"
            )

    def insist(self, patience_s: float) -> None:
        """From now on stand still for so long, also where it was locked before: there is no later."""
        self.patience_s, self._locked_since_s = patience_s, None

    @property
    def locked_s(self) -> float:
        """How long every attempt to write has failed because of another process; 0 when the last one did not."""
        return 0.0 if self._locked_since_s is None else time.monotonic() - self._locked_since_s

    def close(self) -> None:
        self._database.close()

    # Pages, inside `writing`

    def take_pages(self, num_pages: int) -> Extent | None:
        """The lowest free run of `num_pages` (at least 1), or None if no free run is long enough."""
        found = self.find("SELECT start, stop FROM free WHERE stop - start >= ? ORDER BY start LIMIT 1", (num_pages,))
        if found is None:
            return None
        taken = Extent(found[0], found[0] + num_pages)
        if taken.stop == found[1]:
            self.run("DELETE FROM free WHERE start = ?", (taken.start,))
        else:
            self.run("UPDATE free SET start = ? WHERE start = ?", (taken.stop, taken.start))
        return taken

    def give_pages(self, extent: Extent) -> Extent:
        """Give pages back; the free run they are part of now."""
        start, stop = extent.start, extent.stop
        for first, end in self.rows(
            "DELETE FROM free WHERE stop = ? OR start = ? RETURNING start, stop", (start, stop)
        ):
            start, stop = min(start, first), max(stop, end)
        self.run("INSERT INTO free VALUES (?, ?)", (start, stop))
        return Extent(start, stop)

    def _execute(self, statement: str, arguments: Sequence[Any]) -> sqlite3.Cursor:
        pause_s, give_up_s = _FIRST_PAUSE_S, 0.0
        while True:
            try:
                cursor = self._database.execute(statement, arguments)
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & 0xFF
                if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                    full = "shared memory is full: no room for the arena's index"
                    raise EncoderBusy(full, retry_after_s=1.0) from error
                if code not in _LOCKED:
                    raise
                now_s = time.monotonic()
                patience_s = self.patience_s if self._locked_since_s is None else 0.0
                give_up_s = give_up_s or now_s + patience_s
                if now_s >= give_up_s:
                    self._locked_since_s = self._locked_since_s or now_s
                    raise ArenaLocked("another process keeps the embedding arena locked", retry_after_s=1.0) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                return cursor


def open_database(path: Path) -> sqlite3.Connection:
    """Raises ArenaUnavailable when the file is no index of an arena, or this Python's SQLite is too old for any."""
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        needed = ".".join(map(str, _OLDEST_SQLITE))
        raise ArenaUnavailable(f"this Python has SQLite {sqlite3.sqlite_version}; the arena's index needs {needed}")
    try:
        database = sqlite3.connect(
            f"file:{path}?mode=rw", uri=True, isolation_level=None, timeout=PATIENCE_S, check_same_thread=False
        )
        try:
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA temp_store = MEMORY")
            database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            (found,) = database.execute("PRAGMA application_id").fetchone()
            # From here on `Index` waits, which knows for how long.
            database.execute("PRAGMA busy_timeout = 0")
        except sqlite3.Error:
            database.close()
            raise
    except sqlite3.Error as error:
        raise ArenaUnavailable(f"{path} cannot be opened as the index of an embedding arena: {error}") from error
    if found != APPLICATION_ID:
        database.close()
        raise ArenaUnavailable(f"{path} is not the index of an embedding arena")
    return database
