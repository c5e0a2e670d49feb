"""What an arena tells somebody who is none of its encoders: sizes, users, ages; and emptying it from there."""

import contextlib
import sqlite3
import time
from dataclasses import dataclass

from encoder.cache.arena import INDEX_SUFFIX, SHM_DIR, Extent
from encoder.cache.holder import Process
from encoder.cache.index import Index
from encoder.cache.usage import StoreUsage, usage_of
from encoder.errors import ArenaUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderReport:
    """One encoder process that has the arena open, or died with it open."""

    incarnation: str
    pid: int
    is_alive: bool
    reserved_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaReport:
    """One arena at one moment. Ages count from an entry's last use; None in an empty arena."""

    name: str
    pid: int
    """Of the process that made the arena and will unlink it."""
    created_unix_s: float
    width: int | None
    """Of the rows, with `dtype`: None until the first encoder has opened the arena."""
    dtype: str | None
    page_bytes: int
    usage: StoreUsage
    num_entries: int
    num_leases: int
    oldest_use_age_s: float | None
    newest_use_age_s: float | None
    hits: int
    """Of all encoders since the arena was made, those that have ended included; up to a second late."""
    misses: int
    holders: tuple[HolderReport, ...]


def arena_reports() -> list[ArenaReport]:
    """The arenas of this host whose maker runs and which this user may read, by name."""
    reports = []
    for path in sorted(SHM_DIR.glob(f"*{INDEX_SUFFIX}")):
        # Not an arena's, somebody else's, or gone meanwhile: nothing to tell.
        with contextlib.suppress(ArenaUnavailable, sqlite3.OperationalError):
            report = _report(path.name.removesuffix(INDEX_SUFFIX))
            if report is not None:
                reports.append(report)
    return reports


def clear_arena(name: str) -> int:
    """Evict every embedding without a lease; how many bytes that gave back. Raises ArenaUnavailable, EncoderBusy."""
    with contextlib.closing(Index(name)) as index:
        with index.writing():
            runs = index.rows("DELETE FROM entries WHERE num_leases = 0 RETURNING start, stop")
            for start, stop in runs:
                index.give_pages(Extent(start, stop))
        return sum(int(stop) - int(start) for start, stop in runs) * index.geometry.page_bytes


def _report(name: str) -> ArenaReport | None:
    """None when the arena's maker has ended. Raises ArenaUnavailable."""
    with contextlib.closing(Index(name)) as index, index.reading():
        pid, started, created, width, dtype, hits, misses = index.row(
            "SELECT pid, started_ticks, created_unix_s, width, dtype, hits, misses FROM arena"
        )
        if not Process(pid, started).is_alive:
            return None
        num_entries, oldest_ns, newest_ns = index.row(
            "SELECT count(*), min(last_use_ns), max(last_use_ns) FROM entries"
        )
        (num_leases,) = index.row("SELECT count(*) FROM leases")
        holders = _holders(index)
        return ArenaReport(
            name=name,
            pid=pid,
            created_unix_s=created,
            width=width,
            dtype=dtype,
            page_bytes=index.geometry.page_bytes,
            usage=usage_of(index),
            num_entries=num_entries,
            num_leases=num_leases,
            oldest_use_age_s=_age_s(oldest_ns),
            newest_use_age_s=_age_s(newest_ns),
            hits=hits + sum(holder.hits for holder in holders),
            misses=misses + sum(holder.misses for holder in holders),
            holders=holders,
        )


def _holders(index: Index) -> tuple[HolderReport, ...]:
    rows = index.rows(
        "SELECT id, pid, started_ticks, hits, misses,"
        " (SELECT coalesce(sum(stop - start), 0) FROM reservations WHERE holder = holders.id)"
        " FROM holders ORDER BY pid, id"
    )
    return tuple(
        HolderReport(
            incarnation=holder,
            pid=pid,
            is_alive=Process(pid, started).is_alive,
            reserved_bytes=num_pages * index.geometry.page_bytes,
            hits=hits,
            misses=misses,
        )
        for holder, pid, started, hits, misses, num_pages in rows
    )


def _age_s(use_ns: int | None) -> float | None:
    return None if use_ns is None else max(0.0, (time.monotonic_ns() - use_ns) / 1e9)
