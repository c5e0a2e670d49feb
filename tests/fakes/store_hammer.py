"""A process that works on a local KV store, to be killed at any moment: `python -m tests.fakes.store_hammer`.

It puts values through a client, and notes in a file of its own each one that it was told is kept, before it puts the
next ones. Values follow from their keys. In the mode "mixed" it also overwrites, discards, reads and checks.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from epd.cache.l3.client import StoreClient
from epd.cache.l3.local import LocalNode
from tests.fakes.store_calls import StoreCalls

SEGMENT_BYTES = 1 << 17
IO_BYTES = 1 << 14
BATCH = 6


def key_of(worker: int, number: int) -> bytes:
    return b"f%08d%08d" % (worker, number)


def value_of(key: bytes, seed: int = 0) -> bytes:
    """Some of them need several slices."""
    chance = random.Random(key + bytes([seed]))
    return chance.randbytes(20_000 if key[-1] % 7 == 0 else 2_000)


def open_client(root: Path, memory_bytes: int, disk_bytes: int) -> StoreClient:
    node = LocalNode(
        root / "hot", root / "cold", memory_bytes=memory_bytes, disk_bytes=disk_bytes, segment_bytes=SEGMENT_BYTES
    )
    return StoreClient([node], io_bytes=IO_BYTES, timeout_s=20, value_bytes=lambda key: len(value_of(key)))


def put_and_note(calls: StoreCalls, notes: int, worker: int, start: int) -> None:
    keys = [key_of(worker, number) for number in range(start, start + BATCH)]
    kept = calls.put({key: value_of(key) for key in keys})
    os.write(notes, b"".join(b"%b\n" % key for key, is_kept in zip(keys, kept, strict=True) if is_kept))


def mixed(calls: StoreCalls, chance: random.Random) -> None:
    """Something, to keys that everybody uses; what is read is right whatever the others do meanwhile."""
    keys = [key_of(0, chance.randrange(200)) for _ in range(8)]
    match chance.randrange(5):
        case 0:
            seed = chance.randrange(3)
            calls.put({key: value_of(key, seed) for key in keys})
        case 1:
            calls.client.discard("", keys[:2])
        case 2:
            calls.client.touch("", keys)
        case _:
            for key, value in calls.get({key: len(value_of(key)) for key in keys}).items():
                if value is not None and value not in {value_of(key, seed) for seed in range(3)}:
                    sys.exit(f"{key!r} has a value that nobody put")


def main() -> None:
    root, worker, mode, seconds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    client = open_client(root, int(sys.argv[5]), int(sys.argv[6]))
    calls = StoreCalls(client)
    notes = os.open(root / f"notes-{worker}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    # What an earlier life of this worker did is not done again.
    if mode == "put":
        number = (root / f"notes-{worker}").read_bytes().count(b"\n") * 2 + 1000 * int(sys.argv[7])
    print("ready", flush=True)
    chance = random.Random(worker)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if mode == "put":
            put_and_note(calls, notes, worker, number)
            number += BATCH
        else:
            mixed(calls, chance)
    client.close()
    stats = client.stats()
    if stats.failures or stats.timeouts:
        sys.exit(f"{stats}")


if __name__ == "__main__":
    main()
