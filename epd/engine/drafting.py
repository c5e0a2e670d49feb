"""How many tokens a step may guess, and what it tells its draft heads.

Every decoding sequence's step computes its newest token and up to `num_heads` guesses after it, in one forward. That
pays while a forward over several tokens costs little more than one over a single token, so not in large batches.
Guesses that have no pages, or nothing left to be guessed, are left out: drafting never takes room from anyone.
"""

from dataclasses import dataclass

from epd.engine.plan import DraftInput
from epd.engine.sequence import Sequence
from epd.kv.errors import NoPages


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """`num_heads` draft heads are loaded, 0 for none. `max_batch_tokens` bounds what a step of decoding sequences with
    their drafts computes."""

    num_heads: int = 0
    max_batch_tokens: int = 1

    def num_drafts(self, num_decoding: int) -> int:
        """Drafts of each of so many sequences."""
        return max(0, min(self.num_heads, self.max_batch_tokens // max(1, num_decoding) - 1))


def draft_input(sequence: Sequence, stop: int, *, num_heads: int, num_drafts: int) -> DraftInput:
    """For a step that ends at `stop`. Extends the sequence's pages for the drafts, if there are any to be had."""
    tail = sequence.draft_tail
    if tail is not None and tail.num_tokens != sequence.num_computed:
        # The sequence was put back to waiting since, and begins elsewhere.
        tail = None
    if num_heads == 0 or sequence.is_healing:
        return DraftInput()
    if stop < sequence.num_tokens:
        ahead_stop = stop + num_heads
        ahead = tuple(sequence.token_ids[stop:ahead_stop])
        return DraftInput(ahead=ahead, media=tuple(sequence.media_slices(stop, ahead_stop)), tail=tail)
    if tail is None or not sequence.is_decoding:
        return DraftInput(tail=tail)
    # One token comes without a draft; more than the request may still get would be computed for nothing.
    num_left = sequence.request.sampling.max_tokens - sequence.output_index - 1
    drafts = tail.guesses[: min(num_drafts, num_left)]
    if drafts:
        assert sequence.pages is not None
        try:
            sequence.pages.extend(stop + len(drafts))
        except NoPages:
            drafts = ()
    return DraftInput(drafts=drafts, tail=tail)
