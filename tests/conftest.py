import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _priority_as_it_was() -> Iterator[None]:
    """A test that leaves its process a real-time one starves every process it starts, and all others."""
    yield
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert policy == os.SCHED_OTHER, "use tests.fakes.media.priority around encoders"
