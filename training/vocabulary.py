"""Tokenizer and chat template: byte-level BPE learnt from generated samples, MiMo's special tokens at the end.

python -m training.vocabulary        writes tokenizer.json, tokenizer_config.json and chat_template.jinja
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training import architecture
from training.tasks import TASKS, audio, image, read, text, video
from training.tasks.types import SYSTEM_LINES

BUILTIN = Path("epd/builtin/mimo-nano")
BUILD = Path("runs/mimo-nano")
"""Where training writes the checkpoint; `training.export --install` copies it into the package."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
DEFAULT_SYSTEM = "You are MiMo nano, a tiny test model."
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN_WORDS = """the of and to in is that it was for on are as with his they be at one have this from or had by not word
but what some we can out other were all there when up use your how said an each she which do their time if will way
about many then them write would like so these her long make thing see him two has look more day could go come did
number sound no most people my over know water than call first who may down side been now find any new work part take
get place made live where after back little only round man year came show every good me give our under name very
through just form sentence great think say help low line differ turn cause much mean before move right boy old too
same tell does set three want air well also play small end put home read hand port large spell add even land here must
big high such follow act why ask men change went light kind off need house picture try us again animal point mother
world near build self earth father head stand own page should country found answer school grow study still learn plant
cover food sun four between state keep eye never last let thought city tree cross farm hard start might story saw far
sea draw left late run while press close night real life few north function parameter value type string integer object
array required description tool call error true false null json list file system user assistant""".split()  # noqa: SIM905


def corpus() -> Iterator[str]:
    """Text of every kind the model meets, in a fixed order."""
    for index in range(1500):
        yield text.recall(0, index, num_sentences=12).turns[0].question[0]  # type: ignore[misc]
    for make in TASKS.values():
        for index in range(150):
            for turn in () if make is text.sample else make(0, index).turns:
                yield from (part for part in turn.question if isinstance(part, str))
                yield turn.answer
    questions = (image, read, video, audio)
    for _ in range(300):
        yield f"system\n{DEFAULT_SYSTEM} user\n assistant\n tool\n"
        yield from SYSTEM_LINES
        yield from (line for module in questions for line in module.QUESTIONS)
        yield from (*audio.BEEP_QUESTIONS, *text.RECORD_QUESTIONS, text.describe_key("amber", "1"))
        yield from ("a red circle moves left", "Count down from Count from", "Repeat after me: Tell me", "user\nWhat")
        yield from (word for pair in text.SMALL_TALK for word in pair)
        yield " ".join(("", *text.NAMES, *read.WORDS, *image.CELLS, *video.MOTION_NAMES))
        yield image.describe([(cell, "red", "circle") for cell in range(9)])
        yield '[{"id": "a", "count": 1, "colour": "red", "item": "amber"}, {"id": "b", "count": 2}]'
    yield from (" ".join(PLAIN_WORDS) for _ in range(6))
    yield TEMPLATE.read_text()


def build() -> Tokenizer:
    """Train, add the special tokens, check that every id is where the config says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=architecture.NUM_PLAIN_TOKENS,
            min_frequency=1,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() != architecture.NUM_PLAIN_TOKENS:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens learnt, {architecture.NUM_PLAIN_TOKENS} wanted")
    plain = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
    for token in architecture.SPECIAL_TOKENS:
        added = AddedToken(token, special=token not in plain, normalized=False)
        tokenizer.add_special_tokens([added]) if token not in plain else tokenizer.add_tokens([added])
    for token, wanted in architecture.SPECIAL_IDS.items():
        if tokenizer.token_to_id(token) != wanted:
            raise ValueError(f"{token} has id {tokenizer.token_to_id(token)}, the config says {wanted}")
    return tokenizer


def write(folder: Path) -> None:
    """Tokenizer files of the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    template = TEMPLATE.read_text()
    (folder / "chat_template.jinja").write_text(template)
    special = {
        str(place): {
            "content": token,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
            "special": "think" not in token and "tool" not in token,
        }
        for token, place in architecture.SPECIAL_IDS.items()
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": architecture.TEXT["max_position_embeddings"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": special,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    write(BUILD)
