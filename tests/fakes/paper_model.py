"""A model on paper: pages hold which token is where, and an answer is a digest of what its pages say.

It writes and reads through the page tables of a plan like the real one. A page that was lost, shared by mistake or
never written is an assertion or another answer. Time does not pass, tensors there are none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from encoder.types import EmbeddingRef
from epd.engine.plan import KvImport, SequenceStep, StepOutcome, StepPlan, StepResult
from epd.engine.sampler import SampledToken

VOCABULARY = 1000


def next_token(tokens: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(token.to_bytes(8, "little") for token in tokens)) % VOCABULARY


def paper_answer(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """What follows `tokens`, computed at once."""
    known = list(tokens)
    for _ in range(num_tokens):
        known.append(next_token(known))
    return known[len(tokens) :]


def media_token(ref: EmbeddingRef, row: int) -> int:
    """A row of a medium as if it were a token."""
    return xxhash.xxh3_64_intdigest(f"{ref.key}/{row}".encode())


@dataclass
class PaperModel:
    """`tensor` is asked for the rows of every media slice. Pages are dicts of place to (position, token)."""

    page_size: int
    window_tokens: int
    tensor: Callable[[EmbeddingRef], object]
    imported: dict[str, Sequence[int]] = field(default_factory=dict)
    full: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    window: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for planned in plan.imports:
            self._import(planned)
        return StepResult(tuple(self._step(step) for step in plan.steps))

    def _step(self, step: SequenceStep) -> StepOutcome:
        tokens = list(step.token_ids)
        for part in step.media:
            self.tensor(part.ref)
            for offset in range(part.start, part.stop):
                tokens[offset] = media_token(part.ref, part.row_start + offset - part.start)
        for offset, token in enumerate(tokens):
            position = step.start + offset
            if step.heals:
                assert self._read_full(step, position) == token, "healing over other tokens"
            else:
                self.full[self._place(step.pages.full_pages, 0, position)] = (position, token)
            if step.pages.window_pages:
                self.window[self._place(step.pages.window_pages, step.pages.window_start, position)] = (position, token)
        if self.window_tokens and not step.heals:
            self._check_window(step)
        if step.sample is None:
            return StepOutcome()
        seen = [self._read_full(step, position) for position in range(step.stop)]
        return StepOutcome((SampledToken(next_token(seen)),))

    def _check_window(self, step: SequenceStep) -> None:
        for position in range(max(0, step.start - self.window_tokens), step.stop):
            held = self.window.get(self._place(step.pages.window_pages, step.pages.window_start, position))
            assert held == (position, self._read_full(step, position)), f"the window at {position} holds {held}"

    def _import(self, planned: KvImport) -> None:
        table, num_tokens = planned.pages, planned.held.transfer.num_tokens
        for position, token in enumerate(self.imported[planned.request_id][:num_tokens]):
            if position >= planned.first_full_page * self.page_size:
                self.full[self._place(table.full_pages, 0, position)] = (position, token)
            if position >= table.window_start * self.page_size and table.window_pages:
                self.window[self._place(table.window_pages, table.window_start, position)] = (position, token)

    def _read_full(self, step: SequenceStep, position: int) -> int:
        held = self.full.get(self._place(step.pages.full_pages, 0, position))
        assert held is not None, f"token {position} was never written"
        assert held[0] == position, f"the page of token {position} holds token {held[0]}"
        return held[1]

    def _place(self, pages: Sequence[int], first_page: int, position: int) -> tuple[int, int]:
        index = position // self.page_size - first_page
        assert index >= 0, f"there is no page for position {position}"
        return pages[index], position % self.page_size
