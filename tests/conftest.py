import os
import signal
from collections.abc import Iterator

import pytest

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
