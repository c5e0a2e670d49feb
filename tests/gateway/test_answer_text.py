"""Tokens of an answer to text with stops, against reading it character by character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.gateway.detokenize import AnswerText
from tests.fakes.gateway import RENDERER

TOKENS = RENDERER.vocabulary.token_bytes
SPECIAL = RENDERER.vocabulary.special_ids
ALPHABET = "ab é\U0001f600"


def tokens_of(text: str, rng: random.Random) -> list[int]:
    """Ids whose borders are anywhere, also inside characters."""
    by_byte = {TOKENS.visible(token_id): token_id for token_id in range(256)}
    ids: list[int] = []
    for piece in text:
        if rng.random() < 0.5:
            ids += RENDERER.vocabulary.encode_plain(piece)
        else:
            ids += [by_byte[bytes([byte])] for byte in piece.encode()]
    return ids


def naive(ids: list[int], stops: list[str], *, min_tokens: int, shows_stop: bool) -> tuple[str, str | None, int]:
    """The slow truth: text, the stop string, and how many tokens were read."""
    raw = b""
    seen = ""
    for number, token_id in enumerate(ids, start=1):
        raw += TOKENS.visible(token_id)
        text = raw.decode("utf-8", "ignore")
        if number > min_tokens:
            for end in range(len(seen) + 1, len(text) + 1):
                complete = [stop for stop in stops if text[:end].endswith(stop)]
                if complete:
                    longest = max(complete, key=len)
                    return text[: end if shows_stop else end - len(longest)], longest, number
        seen = text
    return raw.decode("utf-8", "replace"), None, len(ids)


@given(
    st.text(alphabet=ALPHABET, max_size=16),
    st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
    st.booleans(),
    st.randoms(),
)
@settings(max_examples=300, deadline=None)
def test_against_the_plain_way(
    text: str, stops: list[str], min_tokens: int, shows_stop: bool, rng: random.Random
) -> None:
    ids = tokens_of(text, rng)
    expected, stop, num_read = naive(ids, stops, min_tokens=min_tokens, shows_stop=shows_stop)
    reader = AnswerText(TOKENS, stops=tuple(stops), min_tokens=min_tokens, shows_stop=shows_stop)
    shown, num_pushed = "", 0
    for token_id in ids:
        shown += reader.push(token_id)
        assert expected.startswith(shown), "shown too early"
        num_pushed += 1
        if reader.matched is not None:
            break
    if reader.matched is None:
        shown += reader.close()
    assert (shown, reader.matched, num_pushed) == (expected, stop, num_read)
    assert reader.stop_reason == stop


@pytest.mark.parametrize(("shows", "text"), [(False, "a"), (True, "a<|im_end|>")])
def test_a_token_of_the_client_ends_it(shows: bool, text: str) -> None:
    end = SPECIAL["<|im_end|>"]
    reader = AnswerText(TOKENS, stop_token_ids=[end], shows_stop=shows, shows_hidden=True)
    shown = "".join(reader.push(token_id) for token_id in RENDERER.vocabulary.encode_plain("a"))
    assert shown + reader.close(end) == text
    assert reader.stop_reason == end


def test_a_token_that_ends_every_answer_is_no_reason() -> None:
    reader = AnswerText(TOKENS, stop_token_ids=[5])
    assert reader.close(SPECIAL["<|im_end|>"]) == ""
    assert reader.stop_reason is None


def test_hidden_tokens_are_shown_when_asked_for() -> None:
    reader = AnswerText(TOKENS, shows_hidden=True, stops=("|>b",))
    ids = [SPECIAL["<|im_start|>"], *RENDERER.vocabulary.encode_plain("b")]
    assert "".join(reader.push(token_id) for token_id in ids) == "<|im_start"
    assert reader.matched == "|>b"
