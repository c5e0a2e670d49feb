import os
import signal
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

# Examples have no time limit each: tests that compute run at a low priority beside others (see scripts/check).
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Set before anything is imported and for every process that the tests start. No server of a test keeps KV anywhere
# unless the test says so with a flag, and then never where the user's own servers do.
os.environ["MIMO_ENGINE__KV_STORE"] = ""
_KV_STORE_DIR = tempfile.TemporaryDirectory(prefix="mimo-tests-kv-")
os.environ["MIMO_KV_STORE_DIR"] = _KV_STORE_DIR.name

# A shell without job control starts what runs in its background with Ctrl-C ignored, which whatever the tests start
# would inherit: then no test could interrupt anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _priority_as_it_was() -> Iterator[None]:
    """A test that leaves its process a real-time one starves every process it starts, and all others."""
    yield
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert policy == os.SCHED_OTHER, "use tests.fakes.media.priority around encoders"
