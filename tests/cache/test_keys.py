"""Page identity: what must share a page and what must not."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd.cache.keys import KEY_BYTES, MediaRun, PageKeyChain, page_keys
from tests.oracles.effort import effort

SEED = b"model/layout"
PAD = 7


def keys_of(tokens: list[int], media: list[MediaRun] | None = None, page_size: int = 4) -> list[bytes]:
    return page_keys(tokens, media or [], page_size=page_size, seed=SEED)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 9])
def test_only_whole_pages_have_keys(num_tokens: int) -> None:
    keys = keys_of(list(range(num_tokens)))
    assert len(keys) == num_tokens // 4
    assert all(len(key) == KEY_BYTES for key in keys)


@effort(100)
@given(
    first=st.lists(st.integers(0, 1), max_size=12),
    second=st.lists(st.integers(0, 1), max_size=12),
    page_size=st.integers(1, 4),
)
def test_keys_agree_exactly_as_far_as_the_tokens_do(first: list[int], second: list[int], page_size: int) -> None:
    ours, theirs = keys_of(first, page_size=page_size), keys_of(second, page_size=page_size)
    for page in range(min(len(ours), len(theirs))):
        stop = (page + 1) * page_size
        assert (ours[page] == theirs[page]) == (first[:stop] == second[:stop])


@effort(100)
@given(data=st.data(), page_size=st.integers(1, 5))
def test_grown_in_pieces_equals_made_at_once(data: st.DataObject, page_size: int) -> None:
    tokens = data.draw(st.lists(st.integers(0, 200_000), max_size=24))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    spans = (
        data.draw(st.lists(st.integers(0, len(tokens)), min_size=2, max_size=4, unique=True)) if len(tokens) > 3 else []
    )
    media = [MediaRun(*span, key=b"m" * 16) for span in zip(sorted(spans)[::2], sorted(spans)[1::2], strict=False)]
    chain = PageKeyChain(page_size=page_size, seed=SEED)
    for start, stop in pairwise([0, *cuts, len(tokens)]):
        runs = [
            MediaRun(
                max(run.start, start) - start, min(run.stop, stop) - start, run.key, max(run.start, start) - run.start
            )
            for run in media
            if max(run.start, start) < min(run.stop, stop)
        ]
        chain.extend(tokens[start:stop], runs)
    assert chain.num_tokens == len(tokens)
    assert chain.keys == keys_of(tokens, media, page_size)


def test_append_equals_extend() -> None:
    chain = PageKeyChain(page_size=3, seed=SEED)
    for token in range(10):
        chain.append(token)
    assert chain.keys == keys_of(list(range(10)), page_size=3)


def test_media_content_counts_and_the_placeholder_does_not() -> None:
    image, other = MediaRun(2, 6, b"image-one"), MediaRun(2, 6, b"image-two")
    tokens = [1, 2, PAD, PAD, PAD, PAD, 3, 4]
    other_pad = [1, 2, 9, 9, 9, 9, 3, 4]
    assert keys_of(tokens, [image]) == keys_of(other_pad, [image])
    assert keys_of(tokens, [image])[0] != keys_of(tokens, [other])[0]
    assert keys_of(tokens, [image])[0] != keys_of(tokens)[0]


def test_rows_of_one_media_differ() -> None:
    tokens = [PAD] * 8
    assert keys_of(tokens, [MediaRun(0, 8, b"a")]) != keys_of(tokens, [MediaRun(0, 8, b"a", row_start=1)])
    in_two = [MediaRun(0, 5, b"a"), MediaRun(5, 8, b"a", row_start=5)]
    assert keys_of(tokens, in_two) == keys_of(tokens, [MediaRun(0, 8, b"a")])


def test_seed_separates_models_and_tenants() -> None:
    tokens = list(range(8))
    assert not set(page_keys(tokens, [], page_size=4, seed=b"a")) & set(page_keys(tokens, [], page_size=4, seed=b"b"))


@pytest.mark.parametrize("run", [(3, 3, 0), (4, 3, 0), (-1, 2, 0), (0, 2, -1)])
def test_malformed_runs_are_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="media run"):
        MediaRun(run[0], run[1], b"a", run[2])


@pytest.mark.parametrize("media", [[MediaRun(0, 9, b"a")], [MediaRun(0, 4, b"a"), MediaRun(3, 6, b"b")]])
def test_runs_must_fit_and_not_overlap(media: list[MediaRun]) -> None:
    with pytest.raises(ValueError, match="overlaps another or leaves"):
        keys_of(list(range(8)), media)
