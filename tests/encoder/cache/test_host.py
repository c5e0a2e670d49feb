"""An arena whose maker was killed goes with the last process that uses it, and not before."""

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from encoder.cache.arena import SHM_DIR, index_path, remove_arena
from encoder.cache.holder import Process
from encoder.cache.host import embedding_arena, remove_orphaned
from encoder.cache.index import RowFormat
from encoder.cache.store import EmbeddingStore
from encoder.config import EncoderConfig

ROWS = RowFormat(16, "float32", 64)
MAKE = """
import sys
from encoder.cache.index import create_arena
create_arena(sys.argv[1], size_bytes=1 << 20, page_bytes=4096)
"""


@pytest.fixture
def orphaned() -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex}"
    subprocess.run([sys.executable, "-c", MAKE, name], check=True)
    yield name
    remove_arena(name)


def is_there(name: str) -> bool:
    return bool(list(SHM_DIR.glob(f"{name}*")))


def test_the_last_to_leave_removes_it(orphaned: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as another:
        process = Process.of(another.pid)
        assert process is not None
        # Never closed by its process, as if that were killed.
        other = EmbeddingStore(orphaned, holder="other", rows=ROWS, process=process)
        with closing(EmbeddingStore(orphaned, holder="mine", rows=ROWS)):
            pass
        remove_orphaned(orphaned)
        assert is_there(orphaned), "another process uses it"
        other._index.close()
        another.communicate(b"\n")
    remove_orphaned(orphaned)
    assert not is_there(orphaned)
    remove_orphaned(orphaned)


def test_who_made_it_and_lives_removes_it_itself() -> None:
    config = EncoderConfig(arena_bytes=1 << 20)
    name, code = f"t-{uuid.uuid4().hex}", f"{MAKE}\ninput()"
    with subprocess.Popen([sys.executable, "-c", code, name], stdin=subprocess.PIPE) as maker:
        try:
            while not index_path(name).exists():
                assert maker.poll() is None
                time.sleep(0.01)
            remove_orphaned(name)
            assert is_there(name)
            maker.communicate(b"\n")
        finally:
            remove_arena(name)
    with embedding_arena(config, name):
        assert is_there(name)
    assert not is_there(name)
