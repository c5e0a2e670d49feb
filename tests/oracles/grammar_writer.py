"""A model that writes anything at all that its grammar allows, and comes to an end."""

import random
from pathlib import Path

from llguidance import LLTokenizer

from epd.gateway.grammar import GrammarMaker, Wish
from epd.gateway.vocabulary import Vocabulary
from epd.token_table import TokenTable, compile_grammar, load_token_table

MODEL_DIR = Path(__file__).parents[2] / "epd" / "builtin" / "mimo-nano"
VOCABULARY = Vocabulary.load(MODEL_DIR / "tokenizer.json")
TABLE: TokenTable = load_token_table(MODEL_DIR)
ENDS = (1519, 1517, 1533)
TOKENIZER: LLTokenizer = TABLE.tokenizer(ENDS)
MAKER = GrammarMaker(VOCABULARY, ENDS)

_CLOSERS = b'"]},:0'
_CLOSINGS = [VOCABULARY.encode_plain(text) for text in ("</parameter>", "</parameter>\n</function>\n", '"', '"}')]
_MAX_TOKENS = 1500


class NoEnd(Exception):
    """It wrote and wrote. There are grammars from which chance finds no way out."""


def allowed(grammar: str, token_ids: list[int]) -> list[int]:
    """What may come after these tokens."""
    matcher = compile_grammar(grammar, TOKENIZER)
    assert matcher.consume_tokens(token_ids), matcher.get_error()
    return _listed(matcher.compute_bitmask())


def write(grammar: str, rng: random.Random, *, patience: int = 25) -> str:
    """A whole answer, the spelling of its tokens; after `patience` tokens it mostly takes those that close something,
    and else single characters."""
    matcher = compile_grammar(grammar, TOKENIZER)
    token_ids: list[int] = []
    while len(token_ids) < _MAX_TOKENS:
        choices = _listed(matcher.compute_bitmask())
        assert choices, f"{matcher.get_error()} after {VOCABULARY.spell(token_ids)!r}"
        chosen = [rng.choice(choices)]
        if len(token_ids) > patience:
            ends = [one for one in choices if one in ENDS]
            closing = rng.choice(_CLOSINGS)
            if ends and rng.random() < 0.2:
                chosen = ends[:1]
            elif rng.random() < 0.5 and matcher.validate_tokens(closing) == len(closing):
                chosen = closing
            elif wanted := [one for one in choices if (_closes if rng.random() < 0.6 else _is_short)(one)]:
                chosen = [rng.choice(wanted)]
        if chosen[0] in ENDS:
            return VOCABULARY.spell(token_ids).decode()
        assert matcher.consume_tokens(chosen), matcher.get_error()
        token_ids += chosen
    raise NoEnd(f"no end after {VOCABULARY.spell(token_ids[-100:])!r}")


def written(wish: Wish, rng: random.Random) -> str:
    grammar = MAKER.grammar(wish)
    assert grammar is not None
    return write(grammar, rng)


def _closes(token_id: int) -> bool:
    spelling = TABLE.spelled[token_id]
    return token_id in ENDS or spelling.startswith(b"</") or (len(spelling) == 1 and spelling in _CLOSERS)


def _is_short(token_id: int) -> bool:
    return len(TABLE.spelled[token_id]) == 1 or token_id in TABLE.special_ids


def _listed(mask: bytes) -> list[int]:
    return [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
