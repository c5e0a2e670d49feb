"""A workload for the KV cache: sessions of requests, known by whose tokens they are instead of by token ids.

A context is a list of runs: tokens [start, start + length) of a content that has a number. Two prompts share a token
exactly where they show the same place of the same content after equal beginnings, so a page key can be made from the
runs alone, for a page at a time:

    key(page i) = xxh3_128(key(page i - 1), the runs of page i)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

__all__ = ["Request", "Run", "Session", "Trace", "Turn", "written"]

_SEED = xxhash.xxh3_128_digest(b"mimo bench kv")
_RUN = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, start + length) of one content."""

    content: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. Its prompt is the first `num_kept` tokens of what the session had (prompt and answer
    of the turn before), and `added` after them."""

    pause_s: float
    """From the end of the answer before; for the first turn from the start of the session."""
    num_kept: int
    added: tuple[Run, ...]
    answer: Run


@dataclass(frozen=True, slots=True)
class Session:
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    sessions: tuple[Session, ...]

    @property
    def num_prompt_tokens(self) -> int:
        turns = (turn for session in self.sessions for turn in session.turns)
        return sum(turn.num_kept + sum(run.length for run in turn.added) for turn in turns)

    def statistics(self) -> dict[str, float]:
        """What traces are compared by; lengths in tokens, times in seconds, answers taking none.

        `kept` is what an infinite cache of single tokens would find, but for what sessions share.
        """
        turns = [turn for session in self.sessions for turn in session.turns]
        prompts = [turn.num_kept + sum(run.length for run in turn.added) for turn in turns]
        kept = [turn.num_kept for turn in turns]
        per_session = [len(session.turns) for session in self.sessions]
        pauses = [turn.pause_s for session in self.sessions for turn in session.turns[1:]]
        starts = [session.start_s for session in self.sessions]
        found = {"sessions": float(len(per_session)), "requests": float(len(turns))}
        found |= _spread("prompt", prompts) | _spread("answer", [turn.answer.length for turn in turns])
        found |= _spread("turns", per_session) | _spread("pause_s", pauses or [0.0])
        found["prompt_tokens"] = float(sum(prompts))
        found["kept_share"] = sum(kept) / sum(prompts)
        found["half_kept_share"] = sum(2 * k >= p for k, p in zip(kept, prompts, strict=True)) / len(turns)
        found["several_turns_share"] = sum(count > 1 for count in per_session) / len(per_session)
        found["sessions_fano_per_minute"] = _fano(starts, 60.0)
        for low, high in ((0, 64), (64, 256), (256, 1024)):
            inside = sum(low << 10 < length <= high << 10 for length in prompts)
            found[f"prompts_{low}k_{high}k_share"] = inside / len(turns)
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """A turn with page keys: what a replay needs. `keys` covers the whole pages of prompt and answer."""

    pause_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    keys: list[bytes]


def contexts(session: Session) -> list[tuple[Run, ...]]:
    """Prompt and answer of each turn, as runs that do not continue each other."""
    found: list[tuple[Run, ...]] = []
    context: list[Run] = []
    for turn in session.turns:
        context = _first(context, turn.num_kept)
        for run in (*turn.added, turn.answer):
            _append(context, run)
        found.append(tuple(context))
    return found


def written(session: Session, *, page_size: int) -> list[Request]:
    """The session's requests with the keys of their pages; what a turn keeps is not hashed again."""
    requests: list[Request] = []
    keys: list[bytes] = []
    for turn, context in zip(session.turns, contexts(session), strict=True):
        num_tokens = sum(run.length for run in context)
        keys = keys[: turn.num_kept // page_size]
        keys += _keys(context, len(keys), keys[-1] if keys else _SEED, page_size)
        answer = turn.answer.length
        requests.append(Request(turn.pause_s, num_tokens - answer, answer, keys))
    return requests


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    found = {f"{name}_mean": float(array.mean()), f"{name}_max": float(array.max())}
    logs = np.log(array[array > 0])
    if len(logs):
        found |= {f"{name}_ln_mean": float(logs.mean()), f"{name}_ln_sd": float(logs.std())}
    for percent in (10, 50, 90, 99):
        found[f"{name}_p{percent}"] = float(np.percentile(array, percent))
    return found


def _fano(times_s: Sequence[float], step_s: float) -> float:
    """Variance over mean of the counts per whole step."""
    num_steps = max(1, int(max(times_s) // step_s))
    counts = np.histogram(times_s, bins=num_steps, range=(0.0, num_steps * step_s))[0]
    return float(counts.var() / max(counts.mean(), 1e-9))


def _first(context: Sequence[Run], num_tokens: int) -> list[Run]:
    kept, left = [], num_tokens
    for run in context:
        if left <= 0:
            break
        kept.append(run if run.length <= left else Run(run.content, run.start, left))
        left -= run.length
    if left > 0:
        raise ValueError(f"a turn keeps {num_tokens} tokens of {num_tokens - left}")
    return kept


def _append(context: list[Run], run: Run) -> None:
    last = context[-1] if context else None
    if last is not None and last.content == run.content and last.start + last.length == run.start:
        context[-1] = Run(last.content, last.start, last.length + run.length)
    elif run.length > 0:
        context.append(run)


def _keys(context: Sequence[Run], first_page: int, parent: bytes, page_size: int) -> list[bytes]:
    """Of the whole pages from `first_page` on."""
    keys: list[bytes] = []
    digest, pack = xxhash.xxh3_128_digest, _RUN.pack
    position, page_stop, pending = 0, (first_page + 1) * page_size, b""
    for run in context:
        stop = position + run.length
        at = max(position, page_stop - page_size)
        while at < stop:
            upto = min(stop, page_stop)
            pending += pack(run.content, run.start + at - position, upto - at)
            if upto == page_stop:
                parent = digest(parent + pending)
                keys.append(parent)
                pending, page_stop = b"", page_stop + page_size
            at = upto
        position = stop
    return keys
