"""The process that speaks to a Mooncake store on behalf of `epd.cache.l3.mooncake_node`. Run as a program, by its path.

Mooncake's library blocks for seconds while its master is away, partly with the interpreter's lock held, starts dozens
of threads and logs to the standard error stream. Here it may: the engine waits for an answer as long as it likes.

    argv: settings as JSON. Descriptors: a connection for requests, and memory for values that both processes map.
    request   (number, operation, keys, places, sizes)  ->  reply (number, answers)

Nothing of the package is imported: this must start quickly, and also where the package is not on the path.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

# No code of the library.
NOT_SET_UP = -10_000
_LOCAL_BUFFER_BYTES = 16 << 20


class Agent:
    """Owns the library's client; sets it up when it is first needed, and again until that works."""

    def __init__(self, settings: dict[str, Any], memory: mmap.mmap) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._open = MooncakeDistributedStore
        self._settings = settings
        self._size_bytes = len(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._replication = ReplicateConfig()
        self._replication.replica_num = settings["replicas"]
        self._store: Any = None

    def answer(self, operation: str, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        """The library's code for each key: sizes or statuses, negative for errors."""
        if self._store is None and not self._set_up():
            return [NOT_SET_UP] * len(keys)
        addresses = [self._address + place for place in places]
        match operation:
            case "open":
                return [0] * len(keys)
            case "get":
                return list(self._store.batch_get_into(keys, addresses, sizes))
            case "put":
                # A plain put would keep the value that is there.
                return list(self._store.batch_upsert_from(keys, addresses, sizes, self._replication))
            case "exists":
                return list(self._store.batch_is_exist(keys))
            case "discard":
                # By force: what was read a moment ago is still leased to the reader.
                return list(self._store.batch_remove(keys, True))
        raise ValueError(f"there is no operation {operation}")

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _set_up(self) -> bool:
        settings, store = self._settings, self._open()
        status = store.setup(
            settings["host"],
            "P2PHANDSHAKE",
            settings["lend_bytes"],
            _LOCAL_BUFFER_BYTES,
            settings["protocol"],
            settings["devices"],
            settings["master"],
        )
        if status != 0 or store.register_buffer(self._address, self._size_bytes) != 0:
            store.close()
            return False
        self._store = store
        return True


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1])
    requests = Connection(settings["requests_fd"])
    with mmap.mmap(settings["memory_fd"], settings["buffer_bytes"]) as memory:
        try:
            agent = Agent(settings, memory)
        except (ImportError, OSError) as error:
            requests.send_bytes(msgspec.msgpack.encode(str(error)))
            return
        requests.send_bytes(msgspec.msgpack.encode(""))
        try:
            while True:
                number, operation, keys, places, sizes = msgspec.msgpack.decode(requests.recv_bytes())
                answers = agent.answer(operation, keys, places, sizes)
                requests.send_bytes(msgspec.msgpack.encode((number, answers)))
        except (EOFError, ConnectionError):
            agent.close()


if __name__ == "__main__":
    main()
