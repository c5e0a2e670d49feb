import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from epd.cache.l3.open import hot_root

# Examples have no time limit each: tests that compute run at a low priority beside others (see scripts/check).
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Set before anything is imported and for every process that the tests start: no store of a test is where the user's own
# servers keep theirs.
_KV_STORE_DIR = tempfile.TemporaryDirectory(prefix="mimo-tests-kv-")
os.environ["MIMO_KV_STORE_DIR"] = _KV_STORE_DIR.name

# A shell without job control starts what runs in its background with Ctrl-C ignored, which whatever the tests start
# would inherit: then no test could interrupt anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def kv_store_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory for a local store of KV, whose part in shared memory goes with the test."""
    directory = tmp_path / "kv"
    yield directory
    shutil.rmtree(hot_root(directory), ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _no_store_is_left() -> Iterator[None]:
    """The one of servers of tests, should any have made it."""
    yield
    shutil.rmtree(hot_root(Path(_KV_STORE_DIR.name)), ignore_errors=True)


@pytest.fixture(autouse=True)
def _priority_as_it_was() -> Iterator[None]:
    """A test that leaves its process a real-time one starves every process it starts, and all others."""
    yield
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert policy == os.SCHED_OTHER, "use tests.fakes.media.priority around encoders"
