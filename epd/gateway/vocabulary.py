"""A checkpoint's tokenizer.json: text to ids, ids to bytes, and no way for a client's text to become a special token.

Added tokens (`<|im_start|>`, `<think>`, ...) are split off here, not by the library: `encode_plain` never produces one,
whatever the text spells.
"""

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from encoder.checkpoint import CheckpointError, read_json_object
from epd.gateway.answer import THINK_CLOSE, THINK_OPEN
from epd.gateway.detokenize import TokenBytes
from epd.gateway.toolcalls import CALL_CLOSE, CALL_OPEN
from preprocess.ranges import Whole, shown_value

_TOKEN_ID = Whole(0, 2**24 - 1)
# Part of the answer's text even where a tokenizer calls them special: `epd.gateway.answer` reads them.
_ALWAYS_VISIBLE = frozenset({THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE})


class Vocabulary:
    """Thread-safe after construction."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """`spec` is a parsed tokenizer.json. Raises ValueError when it is not byte-level BPE."""
        _require_byte_level(spec)
        added = spec.get("added_tokens") or []
        for token in added:
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
                raise ValueError(f"added token {token['content']!r} has lstrip, rstrip or single_word set; unsupported")
        self.special_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        hidden = {
            int(token["id"]) for token in added if token.get("special") and token["content"] not in _ALWAYS_VISIBLE
        }
        for spelling, token_id in [*spec["model"]["vocab"].items(), *self.special_ids.items()]:
            if token_id not in _TOKEN_ID:
                raise ValueError(
                    f"token {shown_value(spelling)} has id {shown_value(token_id)}, allowed is {_TOKEN_ID}"
                )
        self._plain = _library_tokenizer(
            {**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        )
        self._before, self._after = _frame(spec, self._plain)
        self.token_bytes = TokenBytes(spec["model"]["vocab"], self.special_ids, hidden=hidden)
        by_length = sorted(self.special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        # Random, so that no text can contain it; ASCII letters, so that it survives escaping in a template.
        self._mark = f"q{secrets.token_hex(16)}q"

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Raises CheckpointError for a file that cannot be read or is no tokenizer of this kind."""
        spec = read_json_object(path)
        try:
            return cls(spec)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not laid out like a tokenizer: {error!r}") from error

    @property
    def num_token_ids(self) -> int:
        """One more than the largest id of a token."""
        return self.token_bytes.largest_id + 1

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of template output, without tokenising it."""
        text = self.unguard(text)
        # Composing characters (NFC) makes text shorter: three Hangul letters of 3 bytes become one syllable of 3.
        num_bytes = len(text) if text.isascii() else len(text.encode()) // 3
        return num_bytes // self.token_bytes.longest_bytes

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text as text; a special token's spelling becomes ordinary tokens."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def guard(self, text: str) -> str:
        """The text with every special token's spelling broken by a mark that `encode` removes again."""
        while self._special.search(text):
            text = self._special.sub(lambda found: found[0][:1] + self._mark + found[0][1:], text)
        return text

    def unguard(self, text: str) -> str:
        return text.replace(self._mark, "")

    def encode(self, text: str) -> list[int]:
        """Ids of template output: special tokens where they are spelled out, guarded text as plain text."""
        ids: list[int] = []
        at = 0
        for found in self._special.finditer(text):
            if found.start() > at:
                ids.extend(self.encode_plain(self.unguard(text[at : found.start()])))
            ids.append(self.special_ids[found[0]])
            at = found.end()
        if at < len(text):
            ids.extend(self.encode_plain(self.unguard(text[at:])))
        return ids

    def framed(self, token_ids: list[int]) -> list[int]:
        """What the tokenizer itself makes of a text with these ids: some begin texts with a token, or end them."""
        return [*self._before, *token_ids, *self._after]

    def spell(self, token_ids: Sequence[int]) -> bytes:
        """The tokens' own bytes, special ones included."""
        return b"".join(self.token_bytes.spelled(token_id) for token_id in token_ids)


def _frame(spec: dict[str, Any], plain: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer's post-processor puts before and behind a text."""
    if not spec.get("post_processor"):
        return [], []
    sample = "a"
    framed = _library_tokenizer({**spec, "truncation": None, "padding": None}).encode(sample).ids
    ids = plain.encode(sample, add_special_tokens=False).ids
    starts = [at for at in range(len(framed)) if framed[at : at + len(ids)] == ids]
    if not starts:
        raise ValueError("its post_processor changes the tokens of a text; supported: one that adds some around it")
    return framed[: starts[0]], framed[starts[0] + len(ids) :]


def _library_tokenizer(spec: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"no tokenizer can be made of it: {error}") from error


def _require_byte_level(spec: dict[str, Any]) -> None:
    model = spec.get("model") or {}
    if model.get("type") != "BPE":
        raise ValueError(f"tokenizer model.type is {model.get('type')!r}; supported: 'BPE'")
    decoder = spec.get("decoder") or {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders") or [])]
    if "ByteLevel" not in kinds:
        raise ValueError(f"tokenizer decoder.type is {decoder.get('type')!r}; supported: 'ByteLevel'")
