"""SVT-AV1 makes the thread that opens its encoder a real-time one wherever it may, and everything else waits for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ordinary_priority() -> Iterator[None]:
    """Whatever an encoder did to the calling thread's scheduling ends with the block."""
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
