"""Which window pages outlive the sequence that wrote them: the anchors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.kv.numbers import require_at_least

__all__ = ["RetentionPolicy"]

_LEAST = {
    0: ("dense_retention_tokens", "retention_stride_tokens", "long_prompt_tokens", "long_stride_tokens"),
    1: ("tail_pages", "release_interval_tokens", "learning_threshold_tokens"),
}


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Anchors are page boundaries whose window stays after the sequence has moved on (until evicted under pressure).

    The end of the prompt, the end of the response and every boundary that was hit are always anchors. The others are
    offers: under pressure the victim policy takes them first (see victims.py), so a dense retention crowds out nothing.
    """

    dense_retention_tokens: int = 0
    """Every window page below this position is kept."""
    retention_stride_tokens: int = 4096
    """A boundary is kept every so many tokens; 0 keeps none."""
    long_prompt_tokens: int = 65_536
    """Prompts of so many tokens or more have a stride of their own: `long_stride_tokens`."""
    long_stride_tokens: int = 16_384
    """The stride for long prompts; 0 keeps none."""
    at_chunk_ends: bool = True
    """Keep the boundary at the end of each prefill chunk."""
    tail_pages: int = 1
    """Pages kept before the window at a prompt's or response's end. 1 is enough for a prompt that is sent again, looked
    up one boundary before its end, with draft heads and without; with 2 a prompt a page shorter hits as well."""
    release_interval_tokens: int = 1
    """A running sequence lets go of windows behind it once per so many tokens."""
    learns_branches: bool = True
    """Keep the boundary where a sequence leaves what others have computed: other prompts will leave it there too.

    That is the end of the full pages a lookup found beyond its last usable boundary, and the place where its pages part
    from another sequence's in the tree.
    """
    learning_threshold_tokens: int = 128
    """How far beyond the usable boundary full pages must have reached for the lookup to be learned from."""

    def __post_init__(self) -> None:
        for least, names in _LEAST.items():
            require_at_least(least, **{name: getattr(self, name) for name in names})
        for name in ("at_chunk_ends", "learns_branches"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; allowed: True, False")

    def learns_from(self, num_usable_tokens: int, num_full_only_tokens: int) -> bool:
        """Whether a lookup with this outcome shows a boundary worth keeping, at `num_full_only_tokens`."""
        return self.learns_branches and num_full_only_tokens - num_usable_tokens >= self.learning_threshold_tokens

    def stride_anchors(
        self, start_page: int, stop_page: int, page_size: int, *, num_prompt_tokens: int = 0
    ) -> Iterator[int]:
        """Boundaries b, in pages, with start_page < b <= stop_page, that the stride, in whole pages, asks for."""
        is_long = num_prompt_tokens >= self.long_prompt_tokens
        stride_tokens = self.long_stride_tokens if is_long else self.retention_stride_tokens
        if stride_tokens == 0:
            return
        stride = max(1, stride_tokens // page_size)
        yield from range((start_page // stride + 1) * stride, stop_page + 1, stride)

    def kept_runs(
        self, previous_tokens: int, num_tokens: int, *, num_prompt_tokens: int, page_size: int, window_pages: int
    ) -> Iterator[tuple[int, int]]:
        """Page ranges whose windows a sequence keeps when its committed tokens grow from `previous_tokens`."""
        start, stop = previous_tokens // page_size, num_tokens // page_size
        yield start, min(stop, -(-self.dense_retention_tokens // page_size))
        for boundary in self.stride_anchors(start, stop, page_size, num_prompt_tokens=num_prompt_tokens):
            yield boundary - window_pages, boundary
        if self.at_chunk_ends and num_tokens <= num_prompt_tokens:
            yield stop - window_pages, stop
        if previous_tokens < num_prompt_tokens <= num_tokens:
            boundary = num_prompt_tokens // page_size
            yield boundary - window_pages - self.tail_pages, boundary
