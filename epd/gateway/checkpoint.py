"""What the gateway reads of a model directory, checked as it is read: whatever is wrong names its file.

    config.json, generation_config.json   numbers within range, end tokens inside the vocabulary
    tokenizer.json                        no larger than the model's vocabulary
    chat_template.jinja and its kin       a template that compiles

All of it raises CheckpointError, a ValueError.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encoder.checkpoint import CheckpointError, read_json_object, read_text
from epd.gateway.template import ChatTemplate
from epd.gateway.vocabulary import Vocabulary
from preprocess.ranges import Range, Real, Whole, printable, shown_value

_TOKENS = Whole(1, 2**30)
_VOCABULARY = Whole(1, 2**24)
# As wide as what a client may ask for; top_k 0 means none.
_SAMPLING: Mapping[str, Range] = {
    "temperature": Real(0, 2),
    "top_p": Real(0, 1, above=True),
    "top_k": Whole(0, 2**31 - 1),
}


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json, of which the gateway uses the two sizes checked here."""
    path = model_dir / "config.json"
    config = read_json_object(path)
    for key, allowed in (("max_position_embeddings", _TOKENS), ("vocab_size", _VOCABULARY)):
        if config.get(key) not in allowed:
            raise refusal(path, key, config.get(key), allowed)
    return config


def read_generation(model_dir: Path, vocab_size: int) -> dict[str, Any]:
    """generation_config.json, empty where there is none."""
    path = model_dir / "generation_config.json"
    if not os.path.lexists(path):
        return {}
    generation = read_json_object(path)
    for key, allowed in _SAMPLING.items():
        if generation.get(key) is not None and generation[key] not in allowed:
            raise refusal(path, key, generation[key], allowed)
    check_end_tokens(path, generation, vocab_size)
    return generation


def check_end_tokens(path: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """`eos_token_id` is an id, a list of ids, or absent."""
    value, allowed = config.get("eos_token_id"), Whole(0, vocab_size - 1)
    if any(entry not in allowed for entry in (value if isinstance(value, list) else [] if value is None else [value])):
        raise refusal(path, "eos_token_id", value, f"{allowed} (vocab_size is {vocab_size:,}), or a list of such")


def read_vocabulary(model_dir: Path, vocab_size: int) -> Vocabulary:
    """tokenizer.json. Rows of the model's vocabulary beyond it are padding; the other way round texts would have ids
    that the model has no row for."""
    path = model_dir / "tokenizer.json"
    if not os.path.lexists(path):
        raise CheckpointError(f"{printable(str(path))} is missing: the model cannot be served without its tokenizer")
    vocabulary = Vocabulary.load(path)
    if vocabulary.num_token_ids > vocab_size:
        raise CheckpointError(
            f"{printable(str(path))}: its largest token id is {vocabulary.num_token_ids - 1:,}, allowed is below "
            f"vocab_size of config.json, {vocab_size:,}; is it the tokenizer of another model?"
        )
    return vocabulary


def read_template(model_dir: Path) -> ChatTemplate:
    """The chat template, from wherever `ChatTemplate.load` finds it."""
    settings, shipped = model_dir / "tokenizer_config.json", model_dir / "chat_template.json"
    source = settings
    for path in (settings, shipped):
        if os.path.lexists(path) and read_json_object(path).get("chat_template") is not None:
            source = path
    if os.path.lexists(path := model_dir / "chat_template.jinja"):
        source = path
        for file in (path, *sorted((model_dir / "additional_chat_templates").glob("*.jinja"))):
            read_text(file)
    try:
        return ChatTemplate.load(model_dir)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{printable(str(source))}: {error}") from error


def refusal(path: Path, key: str, value: object, allowed: Range | str) -> CheckpointError:
    """What to raise about a value."""
    return CheckpointError(f"{printable(str(path))}: {key}: expected {allowed}, got {shown_value(value)}")
