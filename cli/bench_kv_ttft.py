"""How long a prompt of 8K tokens takes to its first token when the cache has it, or most of it, already."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cli.bench_case import Bars, BenchFailed, Case, Contest, Setting, Stopwatch
from cli.load import BUILTIN_MODELS
from epd.config import EngineConfig
from epd.types import Role

if TYPE_CHECKING:
    from epd import EngineTrial

__all__ = ["ttft_cases"]

_MODEL = "mimo-nano"
_PROMPT_TOKENS = 8192
_ADDED_TOKENS = 64
_CHUNK_TOKENS = 2048
# Ids that are no marks, in every tokenizer we carry.
_IDS = range(300, 1000)


def ttft_cases() -> tuple[Case, ...]:
    """`kv.ttft_warm_8k` and `kv.ttft_next_turn_8k`."""
    shared = {"unit": "s", "baseline": "a prompt of the same length that nobody sent before", "limit": "none"}
    return tuple(
        Case(name=f"kv.{name}", ours=words, open=partial(_opened, num_added=added), **shared)  # type: ignore[arg-type]
        for name, words, added in (
            ("ttft_warm_8k", "to the first token of the prompt sent last, sent again", 0),
            ("ttft_next_turn_8k", f"the same, with {_ADDED_TOKENS} tokens more", _ADDED_TOKENS),
        )
    )


@contextmanager
def _opened(setting: Setting, bars: Bars, *, num_added: int) -> Iterator[Contest]:
    from encoder import num_threads
    from epd import EngineTrial

    length = 512 if setting.quick else _PROMPT_TOKENS
    chance = random.Random(8)
    with num_threads(setting.num_threads):
        bars.begin("loading the engine", 1)
        trial = EngineTrial(
            EngineConfig(
                model_dir=BUILTIN_MODELS[_MODEL],
                model_name=_MODEL,
                role=Role.BOTH,
                threads=setting.num_threads,
                kv_budget_bytes=512 << 20,
                expected_sequence_tokens=length + num_added + 1,
                chunk_tokens=_CHUNK_TOKENS,
                max_running=1,
            )
        )
        sent = [_prompt(chance, length)]
        _ttft_s(trial, sent[-1], num_cached=0)

        def cold() -> float:
            sent.append(_prompt(chance, length))
            return _ttft_s(trial, sent[-1], num_cached=0)

        def warm() -> float:
            # At least one token is computed, and whole pages are found.
            return _ttft_s(trial, sent[-1] + _prompt(chance, num_added), num_cached=length - 16)

        yield Contest(
            detail=f"{_MODEL}, {length} tokens, one request at a time, in this process",
            ours=warm,
            baseline=cold,
        )


def _prompt(chance: random.Random, length: int) -> list[int]:
    return chance.choices(_IDS, k=length)


def _ttft_s(trial: EngineTrial, prompt: list[int], *, num_cached: int) -> float:
    """Raises BenchFailed when fewer tokens came from the cache than should, or any from one that should be empty."""
    with Stopwatch() as watch:
        request_id = trial.submit(prompt, max_tokens=1)
        while request_id not in trial.usage:
            trial.step()
    found = trial.usage[request_id].cached_tokens
    trial.finish()
    if found < num_cached or (num_cached == 0 and found):
        raise BenchFailed(f"{found} of {len(prompt)} tokens came from the cache, {num_cached} were expected")
    return watch.elapsed_s
