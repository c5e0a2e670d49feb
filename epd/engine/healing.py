"""Where a prompt resumes when the tree has its full pages but not the windows at their end.

The tree reaches N tokens in full layers, yet only R <= N can be resumed from: beyond R windows are gone. Instead of all
of [R, N) it is enough to re-run [s, N) with s = N - layers * reach, `reach` being what a window layer sees to its left:

    after the k-th window layer hidden states are exact from s + k * reach on, so the windows of every layer are exact
    on [N - reach, N), which is all that token N reads.

Full layers meanwhile read the cached keys of every earlier token and their pages are not written. Near the beginning of
the sequence s is 0, where windows are whole by themselves.
"""

from dataclasses import dataclass

from epd.cache.prefix import PrefixCache, PrefixHit
from epd.engine.sequence import Sequence
from epd.kv.errors import NoPages


@dataclass(frozen=True, slots=True)
class Resume:
    """Compute from `start` on; up to `heal_stop` only windows are restored. Equal when there is nothing to heal."""

    start: int
    heal_stop: int

    @property
    def heals(self) -> bool:
        return self.start < self.heal_stop


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a sequence without pages has to do, with the cache as it is now: `num_compute_tokens` from `resume` on,
    for which it may read embedding rows of tokens from `rows_from` on."""

    resume: Resume
    num_compute_tokens: int
    rows_from: int


def outlook(cache: PrefixCache, sequence: Sequence, *, heal_tokens: int) -> Outlook:
    """See `resume`."""
    hit = cache.match(sequence.chain.keys, sequence.num_tokens)
    resumed = resume(hit, heal_tokens=heal_tokens, page_size=cache.page_size)
    # Without room to heal it starts at the hit, before the place where healing would.
    return Outlook(resumed, sequence.num_tokens - resumed.start, rows_from=hit.num_tokens)


def resume(hit: PrefixHit, *, heal_tokens: int, page_size: int) -> Resume:
    """The way with less to compute. `heal_tokens` is layers * reach; 0 never heals."""
    start = max(0, hit.num_full_only_tokens - heal_tokens) // page_size * page_size
    if heal_tokens > 0 and start > hit.num_tokens:
        return Resume(start, hit.num_full_only_tokens)
    return Resume(hit.num_tokens, hit.num_tokens)


def lease(cache: PrefixCache, sequence: Sequence, resumed: Resume) -> None:
    """Give the sequence the pages it resumes from; without room to heal it resumes where windows are whole."""
    keys, num_tokens = sequence.chain.keys, sequence.num_tokens
    if resumed.heals:
        pages = cache.begin(keys, num_tokens, full_only=True)
        try:
            pages.extend(resumed.heal_stop, window_start=resumed.start // cache.page_size)
        except NoPages:
            pages.abort()
        else:
            sequence.pages = pages
            sequence.num_computed, sequence.heal_stop = resumed.start, resumed.heal_stop
            return
    sequence.pages = cache.begin(keys, num_tokens)
    sequence.num_computed = sequence.heal_stop = sequence.pages.num_cached_tokens
