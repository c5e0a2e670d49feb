"""Token ids to text, one delta at a time.

A byte-level vocabulary maps every token to bytes, so text is made by decoding the byte stream: a character split over
tokens appears when its last byte does, and joining the pieces gives what decoding everything at once would give.
"""

import codecs
from collections.abc import Collection, Iterable, Mapping


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte value (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(value): value for value in printable}
    # The other bytes are given the code points from 256 on, in order.
    for shift, value in enumerate(value for value in range(256) if value not in set(printable)):
        table[chr(256 + shift)] = value
    return table


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
    """One answer's byte stream to text."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became complete with these tokens; a half character waits for its rest."""
        return self._decoder.decode(b"".join(self._tokens.visible(token_id) for token_id in token_ids))

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

    def push(self, text: str) -> str:
        """Text that can be shown. After a match (`matched` is set) nothing more is returned."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
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
