"""Which window pages outlive the sequence that wrote them: the anchors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["RetentionPolicy"]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Anchors are page boundaries whose window stays after the sequence has moved on (until evicted under pressure).

    The end of the prompt, the end of the response and every boundary that was hit are always anchors.
    """

    dense_retention_tokens: int = 0
    """Every window page below this position is kept."""
    retention_stride_tokens: int = 4096
    """A boundary is kept every so many tokens; 0 keeps none."""
    at_chunk_ends: bool = True
    """Keep the boundary at the end of each prefill chunk."""
    tail_pages: int = 1
    """Pages kept before the window at a prompt's or response's end: 1, or 2 when draft layers drop a page of a hit."""
    release_interval_tokens: int = 1
    """A running sequence lets go of windows behind it once per so many tokens."""

    def __post_init__(self) -> None:
        if min(self.dense_retention_tokens, self.retention_stride_tokens) < 0:
            raise ValueError("retention distances must not be negative")
        if self.tail_pages < 1 or self.release_interval_tokens < 1:
            raise ValueError("tail_pages and release_interval_tokens must be at least 1")

    def stride_anchors(self, start_page: int, stop_page: int, page_size: int) -> Iterator[int]:
        """Boundaries b, in pages, with start_page < b <= stop_page, that the stride, in whole pages, asks for."""
        if self.retention_stride_tokens == 0:
            return
        stride = max(1, self.retention_stride_tokens // page_size)
        yield from range((start_page // stride + 1) * stride, stop_page + 1, stride)
