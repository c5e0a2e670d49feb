"""Where a prompt resumes, also when its full pages are there but not the windows at their end.

Pages on the device and in host memory count alike: what is in host memory alone is copied while the forward runs.

The cache reaches N tokens in full layers, yet only R <= N can be resumed from: beyond R windows are gone. Instead of
all of [R, N) the windows before N alone can be restored, by re-running the last rows before N (see heal_rows.py, which
also says why that is exact). Full layers meanwhile read the cached keys of every earlier token, and their pages are not
written. Nothing is published before the end, and then only windows that are exact in every layer.
"""

from dataclasses import dataclass

from epd.cache.prefix import PrefixHit
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.tiered import TieredCache
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
    hit: PrefixHit


def outlook(cache: TieredCache, sequence: Sequence, cost: HealCost) -> Outlook:
    """The cheaper way, or the only one for a sequence that may not heal."""
    found = cache if sequence.may_load else cache.device
    hit = found.match(sequence.chain.keys, sequence.num_tokens)
    resumed, num_tokens = Resume(hit.num_tokens, hit.num_tokens), hit.num_full_only_tokens - hit.num_tokens
    if sequence.may_heal:
        resumed, num_tokens = cost.resume(hit)
    num_tokens += sequence.num_tokens - hit.num_full_only_tokens
    if sequence.place_tokens is not None:
        num_tokens = min(num_tokens, sequence.place_tokens)
    return Outlook(resumed, num_tokens, hit)


def pages_needed(cache: TieredCache, sequence: Sequence, resumed: Resume) -> tuple[int, int]:
    """Full and window pages to start with: full ones for all tokens it has and one more, windows for the least that
    `lease` asks for."""
    page_size = cache.page_size
    num_full = -(-(sequence.num_tokens + 1 - resumed.heal_stop) // page_size)
    return num_full, _ring(cache, resumed, chunk_tokens=1) + 1 if resumed.heals else 1


def lease(cache: TieredCache, sequence: Sequence, resumed: Resume, *, chunk_tokens: int) -> bool:
    """Give the sequence the pages it resumes from, at times fewer than it was to have: it computes the rest. False,
    with nothing changed, when it was to heal and there is no room for that."""
    if not resumed.heals:
        sequence.pages = _resume(cache, sequence, None)
        sequence.num_computed = sequence.heal_stop = sequence.pages.num_cached_tokens
        return True
    pages = _resume(cache, sequence, resumed.heal_stop, full_only=True)
    if pages.num_cached_tokens < resumed.heal_stop:
        pages.abort()
        return False
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


def _resume(
    cache: TieredCache, sequence: Sequence, hit_tokens: int | None, *, full_only: bool = False
) -> SequencePages:
    """From all tiers or, where there is no room for what is to be copied, from what the device has."""
    keys, num_tokens = sequence.chain.keys, sequence.num_tokens
    if sequence.may_load:
        try:
            return cache.resume(keys, num_tokens, hit_tokens, full_only=full_only)
        except NoPages:
            pass
    return cache.begin(keys, num_tokens, max_cached_tokens=hit_tokens, full_only=full_only)


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


def _ring(cache: TieredCache, resumed: Resume, *, chunk_tokens: int) -> int:
    return ring_pages(
        (resumed.heal_stop - resumed.start) // cache.page_size,
        window_pages=cache.window_pages,
        chunk_pages=-(-chunk_tokens // cache.page_size),
    )
