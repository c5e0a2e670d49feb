"""Paths that hold wrong KV: no lookup finds them, whoever uses them goes on."""

import hypothesis.strategies as st
from hypothesis import given

from epd.cache.keys import page_keys
from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.kv.dual import DualPool
from tests.oracles.effort import effort

PAGE_SIZE = 4


def make_cache() -> PrefixCache:
    return PrefixCache(
        DualPool(num_full_pages=400, num_window_pages=400),
        page_size=PAGE_SIZE,
        window_tokens=5,
        retention=RetentionPolicy(dense_retention_tokens=0, retention_stride_tokens=16, release_interval_tokens=4),
    )


def keys_of(tokens: list[int]) -> list[bytes]:
    return page_keys(tokens, [], page_size=PAGE_SIZE, seed=b"s")


def computed(cache: PrefixCache, tokens: list[int]) -> SequencePages:
    pages = cache.begin(keys_of(tokens), len(tokens))
    pages.extend(len(tokens))
    pages.commit(len(tokens), keys_of(tokens))
    return pages


def test_others_go_on_and_nobody_new_finds_the_path() -> None:
    cache = make_cache()
    stem = list(range(24))
    first, second = computed(cache, [*stem, 1, 1, 1, 1]), computed(cache, [*stem, 2, 2, 2, 2])
    unrelated = computed(cache, [9] * 20)
    unrelated.finish()
    held = list(second.full_pages)
    first.condemn()
    first.finish()
    cache.check()
    assert second.full_pages == held
    assert cache.match(keys_of([*stem, 0]), 25).num_full_only_tokens == 0
    assert cache.match(keys_of([9] * 20), 20).num_tokens == 16
    # What a row below the path goes on to publish is out of reach as well.
    longer = [*stem, 2, 2, 2, 2, *([3] * 12)]
    second.extend(len(longer))
    second.commit(len(longer), keys_of(longer))
    cache.check()
    assert cache.match(keys_of([*longer, 0]), len(longer) + 1).num_full_only_tokens == 0
    second.finish()
    cache.check()
    again = computed(cache, longer)
    assert again.num_cached_tokens == 0
    assert cache.match(keys_of([*longer, 0]), len(longer) + 1).num_tokens == len(longer)
    again.finish()
    cache.clear()
    assert cache.stats().full.free == cache.stats().full.total
    assert cache.stats().window.free == cache.stats().window.total


@effort(100)
@given(st.data())
def test_the_books_balance_in_any_order(data: st.DataObject) -> None:
    cache = make_cache()
    texts: list[list[int]] = [[0] * 16]
    rows: list[tuple[SequencePages, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["begin", "go on", "condemn", "finish", "evict"]))
        if action == "begin" and len(rows) < 5:
            text = data.draw(st.sampled_from(texts))
            text = text[: data.draw(st.integers(0, len(text)))] + [data.draw(st.integers(0, 1))] * 9
            texts.append(text)
            rows.append((computed(cache, text), text))
        elif action == "evict":
            cache._ledger.evict_window(data.draw(st.integers(1, 5)))
            cache._ledger.evict_full(data.draw(st.integers(0, 5)))
        elif rows:
            index = data.draw(st.integers(0, len(rows) - 1))
            pages, text = rows[index]
            if action == "go on":
                text += [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 9))
                pages.extend(len(text))
                pages.commit(len(text), keys_of(text))
            elif action == "condemn":
                wrong = set(pages.full_pages)
                pages.condemn()
                # The same text may be there from somebody who computed it anew.
                found = cache.begin(keys_of(text), len(text), full_only=True)
                assert not wrong.intersection(found.full_pages)
                found.abort()
                del rows[index]
            else:
                pages.finish()
                del rows[index]
        cache.check()
    for pages, _ in rows:
        pages.finish()
    cache.check()
    assert cache.stats().full.leased == cache.stats().window.leased == 0
