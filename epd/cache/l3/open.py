"""How a setting names a store.

    local                            shared memory and a directory of the user's for caches
    local:/DIR                       shared memory and this directory
    redis://HOST[:PORT][/DB][,redis://...]   one or several servers; rediss: with TLS, unix:///SOCKET on this host
    mooncake://MASTER:PORT[?...]     a Mooncake store

Processes that name the same directory share a local store; pages of different models never meet, since their keys
differ.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from epd.cache.l3.base import NodeFailed, StoreNode
from epd.cache.l3.client import StoreClient
from epd.cache.l3.local import LocalNode
from epd.cache.l3.shelf import make_private
from epd.store_address import check_store, redis_nodes

__all__ = ["cold_root", "hot_root", "noted_directory", "open_local", "open_store"]

logger = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")
# Of the files: another layout has other directories, and leaves these alone.
LAYOUT: Final = "v1"
_NOTE: Final = "directory"
# Others need shared memory, too.
_MEMORY_SHARE: Final = 0.5
# No server that could be dead: what is slow here is the host, and in its place there is nothing better.
_LOCAL_TIMEOUT_S: Final = 2.0


def open_store(
    url: str,
    *,
    memory_bytes: int,
    disk_bytes: int,
    io_bytes: int,
    timeout_s: float,
    ttl_s: float | None,
    value_bytes: Callable[[bytes], int] | None = None,
    largest_bytes: int = 0,
) -> StoreClient:
    """The store that `url` names. Bytes bound a local one, `ttl_s` the age of what servers keep unread.

    `largest_bytes` is the size of the largest value, if it is known: a local store that has no room for it is refused.
    For the others see StoreClient. Raises ValueError for another kind of URL, NodeFailed for a store that cannot be
    used; a server that does not answer is no reason.
    """
    check_store(url)
    scheme, _, rest = url.partition(":")
    if scheme == "local":
        node = open_local(
            Path(rest) if rest else _cache_dir(),
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            largest_bytes=min(io_bytes, largest_bytes),
        )
        return StoreClient(
            [node], io_bytes=io_bytes, timeout_s=max(timeout_s, _LOCAL_TIMEOUT_S), value_bytes=value_bytes
        )
    if scheme in ("redis", "rediss", "unix"):
        from epd.cache.l3.placement import Placement

        try:
            from epd.cache.l3.redis_node import RedisNode
        except ModuleNotFoundError as error:
            raise NodeFailed(
                "a KV store on Redis needs the package redis: pip install 'mimo-epd[redis]' (from a checkout: "
                "pip install -e '.[redis]')"
            ) from error
        nodes: list[StoreNode] = [RedisNode(part, ttl_s=ttl_s) for part in redis_nodes(url)]
        return StoreClient(
            nodes,
            placement=Placement([node.name for node in nodes]),
            io_bytes=io_bytes,
            timeout_s=timeout_s,
            value_bytes=value_bytes,
        )
    if scheme == "mooncake":
        from epd.cache.l3.mooncake_node import MooncakeNode

        return StoreClient(
            [MooncakeNode(url, io_bytes=io_bytes)],
            io_bytes=io_bytes,
            timeout_s=timeout_s,
            value_bytes=value_bytes,
        )
    raise ValueError(f"{scheme!r} is no kind of store")


def open_local(directory: Path, *, memory_bytes: int, disk_bytes: int, largest_bytes: int = 0) -> LocalNode:
    """This process's part in the local store of a directory. Raises NodeFailed, and leaves nothing in shared memory."""
    if disk_bytes:
        _check_directory(directory)
    try:
        space = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise NodeFailed(f"a local KV store needs {SHARED_MEMORY}: {error.strerror}") from error
    most_bytes = int(space.f_frsize * space.f_blocks * _MEMORY_SHARE)
    if memory_bytes > most_bytes:
        logger.warning(
            "the local KV store takes %d MiB of memory instead of %d: half of what %s has",
            most_bytes >> 20,
            memory_bytes >> 20,
            SHARED_MEMORY,
        )
    was_there = hot_root(directory).exists()
    try:
        node = LocalNode(
            hot_root(directory),
            cold_root(directory),
            memory_bytes=min(memory_bytes, most_bytes),
            disk_bytes=disk_bytes,
            largest_bytes=largest_bytes,
        )
    except NodeFailed:
        if not was_there:
            shutil.rmtree(hot_root(directory), ignore_errors=True)
        raise
    # For people who look for stores; whether it can be written is of no matter to the store.
    with contextlib.suppress(OSError):
        (hot_root(directory) / _NOTE).symlink_to(os.path.realpath(directory.expanduser()))
    return node


def _check_directory(directory: Path) -> None:
    """Make what is needed on disk. Raises NodeFailed, naming the directory as its user did."""
    root, fault = cold_root(directory), ""
    try:
        make_private(root)
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            fault = f"{root} cannot be written"
    except OSError as error:
        fault = f"{error.filename}: {error.strerror}"
    except NodeFailed as error:
        fault = str(error)
    if fault:
        raise NodeFailed(
            f"a local KV store needs a directory that can be written, or be made, and {directory} is none ({fault})"
        )


def noted_directory(root: Path) -> Path | None:
    """The directory of the store that keeps its memory at `root`, as noted there; see `hot_root`."""
    try:
        return (root / _NOTE).readlink()
    except OSError:
        return None


def hot_root(directory: Path) -> Path:
    """Where the local store of a directory keeps its memory: one place for each user, layout and directory."""
    name = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(directory.expanduser())))
    return SHARED_MEMORY / f"mimo-kv-{os.geteuid()}-{LAYOUT}-{name}"


def cold_root(directory: Path) -> Path:
    """Where it keeps its files."""
    return directory.expanduser() / f"mimo-kv-{LAYOUT}"


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "mimo-epd" / "kv"
