"""Schedules as bytes: what happens to a small cache, in an order nobody would choose.

A schedule is a header of HEADER_BYTES (the setting: page size, window, pools, retention, eviction policy), then steps
of STEP_BYTES each: what happens, and three arguments. Every byte string is a schedule and zero bytes do nothing, so
hypothesis shrinks one by shortening it and by setting steps to zero, and `random.randbytes` makes as many as wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from epd.cache.retention import RetentionPolicy

__all__ = ["HEADER_BYTES", "STEP_BYTES", "Op", "Setting", "Step", "setting_of", "size_of", "steps_of"]

HEADER_BYTES = 6
STEP_BYTES = 4


class Op(IntEnum):
    """What one step does; `a`, `b` and `c` are its arguments, read by `World`."""

    NOTHING = 0
    BEGIN = 1
    """A request whose prompt branches off a known text."""
    AGAIN = 2
    """A request with exactly a known text, with or without a limit on what it may lease."""
    ADVANCE = 3
    """One chunk of a prompt, or decoded tokens behind it."""
    SPECULATE = 4
    """Drafts behind the last token; some are accepted, the others leave wrong KV in the row."""
    REJECT = 5
    """Drafts behind the last token, none accepted."""
    FINISH = 6
    ABORT = 7
    RETRACT = 8
    """Abort, and the same tokens queue again at once."""
    RECEIVE = 9
    """A prompt whose KV comes from elsewhere: the full pages missing here, and the live window."""
    HEAL = 10
    """A prompt whose full pages are there and whose windows are re-run."""
    SERVE = 11
    """A whole request in chunks, begin to finish."""
    PROBE = 12
    """Look, and lease without using it."""
    EVICT = 13
    CONDEMN = 14
    CLEAR = 15
    REOPEN = 16
    """Windows are opened for pages a run has published, or a lease holds, and the run ends before it commits them."""


# How many of 256 byte values mean each step. What is rare here would leave nothing to look at if it were frequent.
_SHARES = {
    Op.NOTHING: 2,
    Op.BEGIN: 34,
    Op.AGAIN: 18,
    Op.ADVANCE: 60,
    Op.SPECULATE: 14,
    Op.REJECT: 8,
    Op.FINISH: 20,
    Op.ABORT: 6,
    Op.RETRACT: 8,
    Op.RECEIVE: 12,
    Op.HEAL: 16,
    Op.SERVE: 18,
    Op.PROBE: 10,
    Op.EVICT: 18,
    Op.CONDEMN: 2,
    Op.CLEAR: 2,
    Op.REOPEN: 8,
}
_OPS = [op for op, share in _SHARES.items() for _ in range(share)]
assert len(_OPS) == 256


@dataclass(frozen=True, slots=True)
class Step:
    op: Op
    a: int
    b: int
    c: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A small cache. The window is k pages and -1, 0 or +1 token, so that page and window borders meet and miss."""

    page_size: int
    window_tokens: int
    num_full_pages: int
    num_window_pages: int
    retention: RetentionPolicy
    policy: int


def setting_of(schedule: bytes, *, roomy: bool = False) -> Setting:
    """The header. `roomy` pools never have to evict."""
    size, window, full, narrow, keep, tail = schedule[:HEADER_BYTES]
    page_size = 1 + size % 4
    return Setting(
        page_size=page_size,
        window_tokens=max(0, window % 4 * page_size + window // 4 % 3 - 1),
        num_full_pages=300 if roomy else 5 + full % 28,
        num_window_pages=300 if roomy else 5 + narrow % 20,
        retention=RetentionPolicy(
            dense_retention_tokens=(0, 0, 5, 1000)[keep % 4],
            retention_stride_tokens=(0, 4, 9)[keep // 4 % 3],
            at_chunk_ends=keep >= 128,
            tail_pages=1 + tail % 2,
            release_interval_tokens=(1, 1, 3, 8)[tail // 2 % 4],
            learns_branches=tail // 8 % 4 > 0,
            learning_threshold_tokens=(1, 3, 9)[tail // 32 % 3],
            long_prompt_tokens=30 if keep // 16 % 2 else 1000,
            long_stride_tokens=(0, 6)[keep // 32 % 2],
        ),
        policy=size // 4,
    )


def steps_of(schedule: bytes) -> Iterator[Step]:
    """The steps in order; a rest too short for one is left out."""
    for at in range(HEADER_BYTES, len(schedule) - STEP_BYTES + 1, STEP_BYTES):
        op = _OPS[schedule[at]]
        if op is not Op.NOTHING:
            yield Step(op, schedule[at + 1], schedule[at + 2], schedule[at + 3])


def size_of(num_steps: int) -> int:
    """Bytes of a schedule of so many steps."""
    return HEADER_BYTES + num_steps * STEP_BYTES
