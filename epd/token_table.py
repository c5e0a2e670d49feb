"""A vocabulary as a grammar sees it: the bytes of every token id, and which of them are no text.

Gateway and engine both ask llguidance what may come next, the one to refuse in time, the other to sample; here is what
they must agree on. Importing this costs no torch.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from encoder.checkpoint import CheckpointError, read_json_object

ANSWER_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Never text to a grammar where the vocabulary has a token for them, whatever the tokenizer calls it."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`spelled[i]` are the bytes of token i, empty for an id without a token. `special_ids` are tokens that no text
    holds: a grammar names them one by one or they do not come. `encode` gives the usual tokens of a text."""

    spelled: tuple[bytes, ...]
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    @property
    def num_token_ids(self) -> int:
        return len(self.spelled)

    def id_of(self, tag: str) -> int | None:
        """The special token that is spelled like this; None where it would be written as text."""
        spelling = tag.encode()
        return next((token_id for token_id in sorted(self.special_ids) if self.spelled[token_id] == spelling), None)

    def tokenizer(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        """What llguidance works with; `eos_token_ids` end a text. Takes a tenth of a second for a large vocabulary."""
        known = sorted(token_id for token_id in eos_token_ids if token_id < len(self.spelled))
        if not known:
            raise ValueError("no token of this vocabulary ends an answer")
        wrapper = TokenizerWrapper(_Words(self.spelled, self.special_ids | set(known), known[0], self.encode))
        return LLTokenizer(wrapper, n_vocab=len(self.spelled), eos_token=known)


class _Words:
    """What `TokenizerWrapper` asks for."""

    def __init__(
        self, spelled: Sequence[bytes], special_ids: Iterable[int], eos: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = list(spelled)
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            # The wrapper asks once whether bytes are taken, and goes by the refusal.
            raise TypeError("text only")
        return self._encode(text)


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the grammar. Raises ValueError with llguidance's own words where it has none.

    Bounded in time and memory by limits: about 20 ms for the lexer, then as much for each further step.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise ValueError(matcher.get_error().strip() or "the grammar allows nothing")
    return matcher


def _limits() -> LLParserLimits:
    # A state of the lexer takes 1 to 2 kB; each matcher that runs may have as many.
    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte value (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(value): value for value in printable}
    # The other bytes are given the code points from 256 on, in order.
    for shift, value in enumerate(value for value in range(256) if value not in set(printable)):
        table[chr(256 + shift)] = value
    return table


def load_token_table(model_dir: Path) -> TokenTable:
    """From tokenizer.json. Raises CheckpointError for a file that is not there or is no byte-level BPE."""
    path = model_dir / "tokenizer.json"
    spec = read_json_object(path)
    try:
        return _read(spec)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not laid out like a byte-level tokenizer: {error!r}") from error


def _read(spec: dict[str, Any]) -> TokenTable:
    added = {int(token["id"]): token for token in spec.get("added_tokens") or []}
    alphabet = byte_alphabet()
    spelled: dict[int, bytes] = {
        int(token_id): bytes(alphabet[character] for character in spelling)
        for spelling, token_id in spec["model"]["vocab"].items()
        if token_id not in added
    }
    spelled.update({token_id: token["content"].encode() for token_id, token in added.items()})
    special = {token_id for token_id, token in added.items() if token.get("special") or token["content"] in ANSWER_TAGS}
    plain = _library_tokenizer(spec)
    return TokenTable(
        spelled=tuple(spelled.get(token_id, b"") for token_id in range(max(spelled) + 1)),
        special_ids=frozenset(special),
        encode=lambda text: list(plain.encode(text, add_special_tokens=False).ids),
    )


def _library_tokenizer(spec: dict[str, Any]) -> Tokenizer:
    """Of the text between special tokens."""
    bare = {**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        return Tokenizer.from_str(json.dumps(bare))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"no tokenizer can be made of it: {error}") from error
