"""Where a prompt resumes when the tree has its full pages but not the windows at their end.

The tree reaches N tokens in full layers, yet only R <= N can be resumed from: beyond R windows are gone. Instead of all
of [R, N) the windows before N alone can be restored, by re-running the last rows before N (see heal_rows.py, which also
says why that is exact). Full layers meanwhile read the cached keys of every earlier token, and their pages are not
written. Nothing is published before the end, and then only windows that are exact in every layer.
"""

from dataclasses import dataclass

from epd.cache.prefix import PrefixCache
from epd.engine.heal_cost import HealCost, Resume
from epd.engine.heal_rows import HealRing, ring_pages
from epd.engine.plan import PageTable
from epd.engine.sequence import Sequence
from epd.kv.errors import NoPages


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a sequence without pages has to do, with the cache as it is now: work worth `num_compute_tokens`, from
    `resume` on. One that was put back counts for no more than when it was first admitted."""

    resume: Resume
    num_compute_tokens: int


def outlook(cache: PrefixCache, sequence: Sequence, cost: HealCost) -> Outlook:
    """The cheaper way, or the only one for a sequence that may not heal."""
    hit = cache.match(sequence.chain.keys, sequence.num_tokens)
    resumed, num_tokens = Resume(hit.num_tokens, hit.num_tokens), hit.num_full_only_tokens - hit.num_tokens
    if sequence.may_heal:
        resumed, num_tokens = cost.resume(hit)
    num_tokens += sequence.num_tokens - hit.num_full_only_tokens
    return Outlook(resumed, num_tokens if sequence.place_tokens is None else min(num_tokens, sequence.place_tokens))


def pages_needed(cache: PrefixCache, sequence: Sequence, resumed: Resume) -> tuple[int, int]:
    """Full and window pages to start with: full ones for all tokens it has and one more, windows for the least that
    `lease` asks for."""
    page_size = cache.page_size
    num_full = -(-(sequence.num_tokens + 1 - resumed.heal_stop) // page_size)
    return num_full, _ring(cache, resumed, chunk_tokens=1) + 1 if resumed.heals else 1


def lease(cache: PrefixCache, sequence: Sequence, resumed: Resume, *, chunk_tokens: int) -> bool:
    """Give the sequence the pages it resumes from. False, with nothing changed, when there is no room to heal."""
    keys, num_tokens = sequence.chain.keys, sequence.num_tokens
    if not resumed.heals:
        sequence.pages = cache.begin(keys, num_tokens)
        sequence.num_computed = sequence.heal_stop = sequence.pages.num_cached_tokens
        return True
    pages = cache.begin(keys, num_tokens, full_only=True, max_cached_tokens=resumed.heal_stop)
    stop_page = resumed.heal_stop // cache.page_size
    # Rather in small chunks than not at all.
    for chunk in (chunk_tokens, 1):
        num_places = _ring(cache, resumed, chunk_tokens=chunk)
        try:
            pages.extend(resumed.heal_stop, window_start=stop_page - num_places)
        except NoPages:
            continue
        first_page = resumed.start // cache.page_size
        sequence.ring = HealRing(first_page, stop_page, num_places, cache.window_tokens, cache.page_size)
        sequence.pages, sequence.num_computed, sequence.heal_stop = pages, resumed.start, resumed.heal_stop
        return True
    pages.abort()
    return False


def heal_table(sequence: Sequence, start: int, stop: int) -> PageTable:
    """The pages for healing the chunk `[start, stop)`."""
    pages, ring = sequence.pages, sequence.ring
    assert pages is not None
    assert ring is not None
    return PageTable(
        full_pages=tuple(pages.full_pages[: -(-stop // ring.page_size)]),
        window_pages=tuple(pages.window_pages[place] for place in ring.places(start, stop)),
        window_start=ring.window_start(start),
    )


def _ring(cache: PrefixCache, resumed: Resume, *, chunk_tokens: int) -> int:
    return ring_pages(
        (resumed.heal_stop - resumed.start) // cache.page_size,
        window_pages=cache.window_pages,
        chunk_pages=-(-chunk_tokens // cache.page_size),
    )
