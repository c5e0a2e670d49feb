"""A process that does everything that can be done to an arena, as fast as it can, until it is killed."""

import contextlib
import random
import sys
import time
from multiprocessing.connection import Connection

from encoder.cache.arena import checksum
from encoder.cache.index import RowFormat
from encoder.cache.store import EmbeddingStore
from encoder.errors import ArenaFull, EncoderBusy
from preprocess.types import MediaKey, MediaLayout, Modality

ROWS = RowFormat(16, "float32", 64)
NUM_KEYS = 40


def rows_of(number: int) -> int:
    """Of a key, the same in every process; 1 to 24 pages."""
    return 1 + number * 7 % 47


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(rows_of(number) * ROWS.row_bytes)


def hammer(arena: str, holder: str, seed: int, up: Connection) -> None:
    """Until killed: make room, write, publish or not, lease, look at what is leased, release, sweep.

    Says a word on `up` when it is at work.
    """
    source = random.Random(seed)
    store = EmbeddingStore(arena, holder=holder, rows=ROWS)
    leases: list[str] = []
    contents = [content_of(number) for number in range(NUM_KEYS)]
    up.send("up")
    while True:
        with contextlib.suppress(ArenaFull, EncoderBusy):
            step(store, source, leases, contents)


def step(store: EmbeddingStore, source: random.Random, leases: list[str], contents: list[bytes]) -> None:
    number = source.randrange(NUM_KEYS)
    key, content = MediaKey(f"key-{number}"), contents[number]
    if store.lookup(key) is None:
        room = store.reserve(key, rows_of(number))
        room.destination[:] = content
        if source.random() < 0.1:
            store.abandon(room)
            return
        layout = MediaLayout(modality=Modality.AUDIO, num_audio_rows=rows_of(number))
        store.publish(room, layout=layout, checksum=checksum(content))
    try:
        ref = store.lease(key, owner=f"peer-{source.randrange(3)}", expires_s=time.time() + source.choice((0.01, 0.2)))
    except KeyError:
        return
    leases.append(ref.lease_id)
    try:
        is_right = store.content(key) == content
    except KeyError:
        is_right = False
    # Only a lease that has expired, and with that was released, may lose its rows.
    if not is_right and store.release(ref.lease_id):
        sys.exit(f"the rows of {key} are not its rows")
    while len(leases) > 3:
        store.release(leases.pop(source.randrange(len(leases))))
    if source.random() < 0.05:
        store.release_owner("peer-0")
        store.expire(time.time())
        store.tidy()
