"""Bytes that a cached token takes: counted in the real pools, after a long sequence has come and gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from cli.bench_case import Bars, Case, Contest, Findings, Setting
from cli.bench_kv_contest import Geometry
from cli.bench_kv_trace import Run, Session, Turn, written
from epd import DualPool, PrefixCache, RetentionPolicy

__all__ = ["byte_cases", "bytes_per_token"]

_PAGE_SIZE = 16
_NUM_TOKENS = 100_000
_CHUNK_TOKENS = 2048
_MODELS = {"pro": "mimo-v2.5-pro", "v25": "mimo-v2.5"}
# Windows at the ends alone: what is kept besides is a choice, and goes first when memory is short.
_ENDS_ONLY = RetentionPolicy(retention_stride_tokens=0, long_stride_tokens=0, at_chunk_ends=False)


def byte_cases() -> tuple[Case, ...]:
    """`kv.bytes_per_token_pro` and `kv.bytes_per_token_v25`."""
    return tuple(
        Case(
            name=f"kv.bytes_per_token_{short}",
            unit="B",
            ours="held in both pools by a finished sequence, per token",
            baseline="a single pool, where window layers keep every token",
            limit="full layers keep every token, window layers one window",
            open=partial(_opened, model=model),
            max_runs=1,
            is_counted=True,
        )
        for short, model in _MODELS.items()
    )


@contextmanager
def _opened(setting: Setting, bars: Bars, *, model: str) -> Iterator[Contest]:
    geometry = Geometry.of(model, _PAGE_SIZE)
    layout, num_tokens = geometry.layout, _NUM_TOKENS // 100 if setting.quick else _NUM_TOKENS
    bars.begin(f"{model}: {num_tokens:,} tokens", 1)
    held = bytes_per_token(geometry, num_tokens)
    least = layout.full_bytes_per_token + layout.window_bytes_per_token * layout.window_tokens / num_tokens
    asymptote = geometry.single_bytes_per_token / layout.full_bytes_per_token
    yield Contest(
        detail=f"{model}, {num_tokens:,} tokens, 16-bit keys and values, pages of {_PAGE_SIZE}",
        ours=lambda: held,
        baseline=float(geometry.single_bytes_per_token),
        limit=least,
        findings=lambda: Findings(
            lines=(f"for ever longer sequences a single pool holds {asymptote:.2f} times as much",),
            figures={"asymptotic_ratio": round(asymptote, 4), "over_the_limit": round(held / least - 1, 5)},
        ),
    )


def bytes_per_token(geometry: Geometry, num_tokens: int) -> float:
    """What both pools hold for a sequence of so many tokens, computed in chunks and finished, over its tokens."""
    layout, page_size = geometry.layout, geometry.layout.page_size
    num_pages = -(-num_tokens // page_size)
    pool = DualPool(num_full_pages=num_pages, num_window_pages=num_pages)
    cache = PrefixCache(pool, page_size=page_size, window_tokens=layout.window_tokens, retention=_ENDS_ONLY)
    turn = Turn(0.0, 0, (Run(1, 0, num_tokens - 1),), Run(2, 0, 1))
    (request,) = written(Session(0.0, (turn,)), page_size=page_size)
    pages = cache.begin(request.keys, num_tokens)
    for stop in [*range(_CHUNK_TOKENS, num_tokens, _CHUNK_TOKENS), num_tokens]:
        pages.extend(stop)
        pages.commit(stop, request.keys)
    pages.finish()
    num_full = num_pages - pool.full.num_free
    num_window = num_pages - pool.window.num_free
    return (num_full * layout.full_page_bytes + num_window * layout.window_page_bytes) / num_tokens
