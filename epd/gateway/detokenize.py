"""Token ids to text, one delta at a time.

A byte-level vocabulary maps every token to bytes, so text is made by decoding the byte stream: a character split over
tokens appears when its last byte does, and joining the pieces gives what decoding everything at once would give.
"""

import codecs
from collections.abc import Collection, Iterable, Mapping

from epd.token_table import byte_alphabet


class TokenBytes:
    """The bytes of every token. Added tokens stand for their own text; hidden ones (`<|im_end|>`) for nothing."""

    def __init__(self, vocabulary: Mapping[str, int], added: Mapping[str, int], *, hidden: Collection[int]) -> None:
        """`vocabulary` holds byte-level spellings. Raises ValueError for a spelling outside the byte alphabet."""
        alphabet = byte_alphabet()
        added_ids = set(added.values())
        self._bytes: dict[int, bytes] = {}
        for spelling, token_id in vocabulary.items():
            if token_id in added_ids:
                continue
            try:
                self._bytes[token_id] = bytes(alphabet[character] for character in spelling)
            except KeyError as error:
                raise ValueError(f"token {token_id} {spelling!r} is not byte-level: character {error}") from error
        self._spelled = {**self._bytes, **{token_id: text.encode() for text, token_id in added.items()}}
        self._longest_bytes = max(map(len, self._spelled.values()), default=1)
        self._bytes.update({token_id: b"" if token_id in hidden else text.encode() for text, token_id in added.items()})

    @property
    def longest_bytes(self) -> int:
        """Bytes of the token with the longest spelling."""
        return self._longest_bytes

    @property
    def largest_id(self) -> int:
        """The largest id of any token, -1 of an empty vocabulary."""
        return max(self._spelled, default=-1)

    def visible(self, token_id: int) -> bytes:
        """What the token adds to the answer. A padding row of the vocabulary, without a spelling, adds nothing."""
        return self._bytes.get(token_id, b"")

    def spelled(self, token_id: int) -> bytes:
        """The token's own spelling, hidden or not; for log-probabilities."""
        return self._spelled.get(token_id, b"")


class Detokenizer:
    """One answer's byte stream to text; hidden tokens are part of it only with `shows_hidden`."""

    def __init__(self, tokens: TokenBytes, *, shows_hidden: bool = False) -> None:
        self._bytes_of = tokens.spelled if shows_hidden else tokens.visible
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became complete with these tokens; a half character waits for its rest."""
        return self._decoder.decode(b"".join(self._bytes_of(token_id) for token_id in token_ids))

    def close(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the stop string that is complete first, also across piece borders; holds back what might become one.

    Of several that end at the same character the longest counts, so the result does not depend on how the text is cut.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Text that can be shown. After a match (`matched` is set) nothing more is returned.

        A stop string that is complete with text that came while it was not armed does not count.
        """
        if self.matched is not None:
            return ""
        num_seen = len(self._held)
        text = self._held + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, num_seen - len(stop) + 1))) >= 0
        ]
        if found and is_armed:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = self._longest_prefix_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """The held text: the answer ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_prefix_at_end(self, text: str) -> int:
        """Characters at the end of `text` that begin some stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class AnswerText:
    """Tokens of one answer to the text that can be shown, up to the stop string that ends it.

    Stop strings are looked for after the first `min_tokens` tokens, and end the text before them, or behind them with
    `shows_stop`. `stop_token_ids` are the client's own, which workers look for.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stops: tuple[str, ...] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        shows_stop: bool = False,
        shows_hidden: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokens, shows_hidden=shows_hidden)
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._shows_stop = shows_stop
        self._num_tokens = 0
        self._stopped_by: int | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer; nothing more is shown after it."""
        return self._stops.matched

    @property
    def stop_reason(self) -> str | int | None:
        """What of the client's ended the answer: a stop string or a token."""
        return self._stopped_by if self.matched is None else self.matched

    def push(self, token_id: int) -> str:
        """What can be shown with this token."""
        if self.matched is not None:
            return ""
        self._num_tokens += 1
        text = self._stops.push(self._detokenizer.push((token_id,)), is_armed=self._num_tokens > self._min_tokens)
        return text + self.matched if self.matched is not None and self._shows_stop else text

    def close(self, stop_token_id: int | None = None) -> str:
        """What was held back, at the end of the answer; `stop_token_id` is the token that ended it, if one did."""
        tail = ""
        if stop_token_id is not None and stop_token_id in self._stop_token_ids and self.matched is None:
            self._stopped_by = stop_token_id
            if self._shows_stop:
                tail = self._stops.push(self._detokenizer.push((stop_token_id,)), is_armed=False)
        return tail + self._stops.push(self._detokenizer.close(), is_armed=False) + self._stops.close()
