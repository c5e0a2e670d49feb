"""A tokenizer.json for the tiny models of 128 tokens: ASCII, pairs of letters, a line feed, special tokens last."""

import json
from pathlib import Path

from epd.token_table import byte_alphabet

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = 127
_PAIRS = ('{"', '":', '",', '"}', "an", "ab", "ba", "12", "00", "tr", "ue", "e}", "[[", "]]")


def write_tokenizer(folder: Path, *, num_token_ids: int = 128) -> None:
    """The last id is `<|im_end|>`, as in `tests.fakes.tiny_checkpoint`; before it stand the tags."""
    letter = {value: character for character, value in byte_alphabet().items()}
    words = [letter[value] for value in range(ord(" "), 127)]
    words += ["".join(letter[ord(character)] for character in pair) for pair in _PAIRS]
    words.append(letter[ord("\n")])
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    added = [
        {"id": num_token_ids - 1 - back, "content": content, "special": content == "<|im_end|>"}
        for back, content in enumerate(("<|im_end|>", *TAGS))
    ]
    spec = {
        "added_tokens": [
            {**token, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} for token in added
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [[letter[ord(pair[0])], letter[ord(pair[1])]] for pair in _PAIRS],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
