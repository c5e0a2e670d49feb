"""The keys of a GGUF file, each either understood or refused by name, and the configuration they make.

`general.*` describes the file for people; only its architecture and quantisation version matter. `llama.*` and
`tokenizer.*` must hold nothing but what is listed here: a key that is not read could change every answer.
"""

from collections.abc import Mapping

from epd.model.config_ranges import TEXT_RANGES
from epd.model.gguf.errors import GgufError
from preprocess.ranges import shown_value

Metadata = Mapping[str, object]

ARCHITECTURE = "llama"
_QUANTIZATION_VERSION = 2
_ROPE_THETA = 10000.0  # what the format means where the key is absent
# Each number by the range of the key that it becomes.
_RANGES = {
    f"{ARCHITECTURE}.{name}": TEXT_RANGES[key]
    for name, key in {
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.value_length": "head_dim",
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "rope.dimension_count": "head_dim",
        "rope.freq_base": "rope_theta",
        "vocab_size": "vocab_size",
    }.items()
}
_MODEL_KEYS = frozenset(_RANGES)
_TOKENIZER_KEYS = frozenset(
    {
        "tokenizer.chat_template",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.model",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.unknown_token_id",
    }
)
# What the reader itself adds.
_FRAME_PREFIX = "GGUF."


def check_keys(metadata: Metadata) -> None:
    """Raises GgufError naming what is not implemented."""
    architecture = text(metadata, "general.architecture")
    if architecture != ARCHITECTURE:
        raise GgufError(f"general.architecture is {architecture!r}; implemented: {ARCHITECTURE!r}")
    version = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
    if version != _QUANTIZATION_VERSION:
        raise GgufError(f"general.quantization_version is {version!r}; implemented: {_QUANTIZATION_VERSION}")
    known = _MODEL_KEYS | _TOKENIZER_KEYS
    unknown = [key for key in metadata if key not in known and not key.startswith(("general.", _FRAME_PREFIX))]
    if unknown:
        raise GgufError(f"{', '.join(unknown)}: not implemented for {ARCHITECTURE} files")


def model_config(metadata: Metadata, *, tied: bool) -> dict[str, object]:
    """config.json of the checkpoint. `tied`: the file has no output projection of its own. Raises GgufError."""
    width, num_heads = count(metadata, "llama.embedding_length"), count(metadata, "llama.attention.head_count")
    num_kv_heads = count(metadata, "llama.attention.head_count_kv", default=num_heads)
    head_dim = count(metadata, "llama.attention.key_length", default=width // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (value := count(metadata, key, default=head_dim)) != head_dim:
            raise GgufError(f"{key} is {value}; implemented: the width of a head, {head_dim}")
    num_tokens = len(items(metadata, "tokenizer.ggml.tokens"))
    if (vocab_size := count(metadata, "llama.vocab_size", default=num_tokens)) != num_tokens:
        raise GgufError(f"llama.vocab_size is {vocab_size}, tokenizer.ggml.tokens has {num_tokens}")
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": count(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": count(metadata, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number(metadata, "llama.rope.freq_base", default=_ROPE_THETA),
        "max_position_embeddings": count(metadata, "llama.context_length"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    return config | special_ids(metadata)


def generation_config(metadata: Metadata) -> dict[str, object]:
    """generation_config.json. The file says nothing of sampling, so a silent request gets the likeliest tokens."""
    return {**special_ids(metadata), "do_sample": False}


def special_ids(metadata: Metadata) -> dict[str, object]:
    """What ends an answer, begins a text and fills a batch. Raises GgufError when nothing ends an answer."""
    ends = [token_id(metadata, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    known = [end for end in ends if end is not None]
    if not known:
        raise GgufError("tokenizer.ggml.eos_token_id is absent: no token would end an answer")
    found: dict[str, object] = {"eos_token_id": list(dict.fromkeys(known))}
    for name, kind in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (value := token_id(metadata, f"tokenizer.ggml.{kind}_token_id")) is not None:
            found[name] = value
    return found


def text(metadata: Metadata, key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise GgufError(f"{key}: expected text, found {_shown(value)}")
    return value


def items(metadata: Metadata, key: str) -> list[object]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise GgufError(f"{key}: expected a list, found {_shown(value)}")
    return value


def count(metadata: Metadata, key: str, default: int | None = None) -> int:
    value, allowed = metadata.get(key, default), _RANGES[key]
    if not isinstance(value, int) or value not in allowed:
        raise GgufError(f"{key}: expected {allowed}, found {_shown(value)}")
    return value


def number(metadata: Metadata, key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if not isinstance(value, (int, float)) or value not in _RANGES[key]:
        raise GgufError(f"{key}: expected {_RANGES[key]}, found {_shown(value)}")
    return float(value)


def token_id(metadata: Metadata, key: str) -> int | None:
    """An id inside the vocabulary, or None where the key is absent."""
    value = metadata.get(key)
    if value is None:
        return None
    num_tokens = len(items(metadata, "tokenizer.ggml.tokens"))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise GgufError(f"{key}: expected an id of the {num_tokens} tokens, found {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return "nothing" if value is None else shown_value(value)
