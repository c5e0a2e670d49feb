"""Requests driven through a prefix cache the way an engine would, with nothing computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd.cache.keys import page_keys
from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.cache.victims import WindowEviction, make_policy
from epd.cache.window import num_window_pages
from epd.kv.dual import DualPool

__all__ = ["SEED", "CacheDriver", "text"]

SEED = b"model/layout"


@dataclass
class CacheDriver:
    """A cache of small pools, and counts of what its requests found."""

    page_size: int = 4
    window_tokens: int = 8
    num_full: int = 400
    num_window: int = 200
    retention: RetentionPolicy = field(
        default_factory=lambda: RetentionPolicy(retention_stride_tokens=0, at_chunk_ends=False)
    )
    enabled: bool = True
    policy: WindowEviction = "marginal"
    heal_tokens: int = 0
    checks: bool = True
    """Whether the whole cache is audited after every step."""

    def __post_init__(self) -> None:
        self.pool = DualPool(num_full_pages=self.num_full, num_window_pages=self.num_window)
        self.cache = PrefixCache(
            self.pool,
            page_size=self.page_size,
            window_tokens=self.window_tokens,
            retention=self.retention,
            enabled=self.enabled,
            policy=make_policy(
                self.policy,
                window_pages=num_window_pages(self.window_tokens, self.page_size),
                tail_pages=self.retention.tail_pages,
                page_size=self.page_size,
                num_window_pages=self.num_window,
                heal_tokens=self.heal_tokens,
            ),
        )

    def keys(self, tokens: list[int]) -> list[bytes]:
        return page_keys(tokens, [], page_size=self.page_size, seed=SEED)

    def prefill(self, tokens: list[int], *, chunk_tokens: int = 1000) -> SequencePages:
        keys = self.keys(tokens)
        pages = self.cache.begin(keys, len(tokens))
        self.advance(pages, keys, len(tokens), chunk_tokens=chunk_tokens)
        return pages

    def advance(self, pages: SequencePages, keys: list[bytes], num_tokens: int, *, chunk_tokens: int = 1000) -> None:
        while pages.num_committed_tokens < num_tokens:
            stop = min(num_tokens, pages.num_committed_tokens + chunk_tokens)
            pages.extend(stop)
            pages.commit(stop, keys)
            self.check()

    def serve(self, tokens: list[int], *, chunk_tokens: int = 1000, num_answer_tokens: int = 0) -> int:
        """One whole request, `tokens` ending with its answer; returns the tokens that were cached."""
        keys = self.keys(tokens)
        num_prompt_tokens = len(tokens) - num_answer_tokens
        pages = self.cache.begin(keys[: num_prompt_tokens // self.page_size], num_prompt_tokens)
        self.advance(pages, keys, num_prompt_tokens, chunk_tokens=chunk_tokens)
        self.advance(pages, keys, len(tokens), chunk_tokens=self.page_size)
        pages.finish()
        self.check()
        return pages.num_cached_tokens

    def hit(self, tokens: list[int]) -> int:
        return self.cache.match(self.keys(tokens), len(tokens)).num_tokens

    def check(self) -> None:
        if self.checks:
            self.cache.check()


def text(session: int, num_tokens: int) -> list[int]:
    """Tokens that no other session has."""
    return [session * 100_000 + position for position in range(num_tokens)]
