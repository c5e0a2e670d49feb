"""The byte-level BPE of a GGUF file as tokenizer.json and tokenizer_config.json."""

from enum import IntEnum
from typing import Any

from epd.model.gguf.errors import GgufError
from epd.model.gguf.metadata import Metadata, items, text, token_id

# How text is cut before merging, by the name the file gives. Digits stand alone in smollm.
_BYTE_LEVEL: dict[str, object] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_PRE_TOKENIZERS: dict[str, dict[str, object]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]},
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`. The kinds that only SentencePiece vocabularies have are refused."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """Raises GgufError for another kind of tokenizer, or one that adds tokens of its own to a text."""
    if (model := text(metadata, "tokenizer.ggml.model")) != "gpt2":
        raise GgufError(f"tokenizer.ggml.model is {model!r}; implemented: 'gpt2', byte-level BPE")
    pre = text(metadata, "tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise GgufError(f"tokenizer.ggml.pre is {pre!r}; implemented: {', '.join(_PRE_TOKENIZERS)}")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if metadata.get(f"tokenizer.ggml.{key}", False) is not False:
            raise GgufError(f"tokenizer.ggml.{key} is {metadata[f'tokenizer.ggml.{key}']!r}; implemented: False")
    tokens, types = _tokens(metadata)
    added = [i for i, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], special=types[i] is TokenType.CONTROL) for i in added],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens) if types[i] is not TokenType.UNUSED},
            "merges": _merges(metadata, set(tokens)),
        },
    }


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Special tokens by their spelling, and the chat template. Raises GgufError when the file has no template."""
    tokens, _ = _tokens(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": text(metadata, "tokenizer.chat_template"),
    }
    for name, kind in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (found := token_id(metadata, f"tokenizer.ggml.{kind}_token_id")) is not None:
            config[f"{name}_token"] = tokens[found]
    return config


def _tokens(metadata: Metadata) -> tuple[list[str], list[TokenType]]:
    tokens = [str(token) for token in items(metadata, "tokenizer.ggml.tokens")]
    raw_types = items(metadata, "tokenizer.ggml.token_type")
    if len(raw_types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise GgufError(
            f"tokenizer.ggml.tokens: {len(tokens)} tokens, {len(set(tokens))} of them distinct, with "
            f"{len(raw_types)} in tokenizer.ggml.token_type"
        )
    known = {int(kind) for kind in TokenType}
    unknown = next(((i, kind) for i, kind in enumerate(raw_types) if kind not in known), None)
    if unknown is not None:
        raise GgufError(
            f"tokenizer.ggml.token_type of token {unknown[0]} is {unknown[1]}; implemented: {sorted(known)}"
        )
    return tokens, [TokenType(int(str(kind))) for kind in raw_types]


def _merges(metadata: Metadata, tokens: set[str]) -> list[str]:
    merges = [str(merge) for merge in items(metadata, "tokenizer.ggml.merges")]
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= tokens:
            raise GgufError(f"tokenizer.ggml.merges: {merge!r} does not join two tokens to a third")
    return merges


def _added(index: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
