"""Pieces of text joined are the text, wherever tokens and characters are cut."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.gateway.detokenize import Detokenizer, StopStrings, TokenBytes, byte_alphabet
from tests.fakes.gateway import RENDERER

TOKENS = RENDERER.vocabulary.token_bytes
SPECIAL = RENDERER.vocabulary.special_ids


def test_the_alphabet_covers_every_byte_once() -> None:
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert table["\u0120"] == ord(" ")
    assert table["A"] == ord("A")


@given(st.text(max_size=80), st.randoms())
@settings(max_examples=150, deadline=None)
def test_joined_pieces_are_the_whole(text: str, rng: random.Random) -> None:
    ids = RENDERER.vocabulary.encode_plain(text)
    whole = RENDERER.vocabulary.spell(ids).decode()
    detokenizer, pieces, at = Detokenizer(TOKENS), [], 0
    while at < len(ids):
        step = rng.randint(1, 3)
        pieces.append(detokenizer.push(ids[at : at + step]))
        assert "\ufffd" not in pieces[-1].replace("\ufffd" if "\ufffd" in text else "", "")
        at += step
    assert "".join(pieces) + detokenizer.close() == whole


def test_a_half_character_waits_and_is_replaced_at_the_end() -> None:
    ids = RENDERER.vocabulary.encode_plain("\U0001f600")
    assert len(ids) > 1
    detokenizer = Detokenizer(TOKENS)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.close() == "\ufffd"


def test_hidden_tokens_add_nothing() -> None:
    detokenizer = Detokenizer(TOKENS)
    assert detokenizer.push([SPECIAL["<|im_end|>"], SPECIAL["<|image_pad|>"], 10**6]) == ""
    assert detokenizer.push([SPECIAL["<think>"], SPECIAL["</tool_call>"]]) == "<think></tool_call>"
    assert TOKENS.spelled(SPECIAL["<|im_end|>"]) == b"<|im_end|>"


def test_a_spelling_outside_the_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="not byte-level"):
        TokenBytes({"\u2581a": 0}, {}, hidden=())


def naive_stop(text: str, stops: list[str]) -> str:
    """The slow truth: read one character after the other, cut where a stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(
    st.text(alphabet="ab", max_size=24),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.randoms(),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_against_the_plain_way(text: str, stops: list[str], rng: random.Random) -> None:
    finder, shown, at = StopStrings(tuple(stops)), "", 0
    while at < len(text) and finder.matched is None:
        step = rng.randint(1, 4)
        shown += finder.push(text[at : at + step])
        assert naive_stop(text, stops).startswith(shown)
        at += step
    if finder.matched is None:
        shown += finder.close()
    assert shown == naive_stop(text, stops)
    assert (finder.matched is not None) == any(stop in text for stop in stops)
