"""A GGUF file of a tiny Llama, written by the format's own package: shuffled rows, blocks, a byte-level vocabulary."""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from epd.token_table import byte_alphabet

WIDTH, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 96, 160, 6, 2, 16, 3
ALPHABET = sorted(byte_alphabet(), key=lambda character: byte_alphabet()[character])
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ġ 1"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<note>"]
TYPES = [3, 3, 3, *[1] * (len(TOKENS) - 4), 4]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = {
    "attn_q": "Q4_1",
    "attn_k": "Q8_0",
    "attn_v": "Q4_0",
    "attn_output": "F16",
    "ffn_gate": "BF16",
    "ffn_up": "Q4_1",
    "ffn_down": "F32",
}


def weights(*, tied: bool = True) -> dict[str, NDArray[np.float32]]:
    """Under the file's names, rows in Hugging Face order: what the tensors mean."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.normal(scale=shape[-1] ** -0.5, size=shape).astype(np.float32)

    made = {"token_embd.weight": normal(len(TOKENS), WIDTH), "output_norm.weight": 1 + normal(WIDTH)}
    if not tied:
        made["output.weight"] = normal(len(TOKENS), WIDTH)
    for i in range(LAYERS):
        made |= {
            f"blk.{i}.attn_norm.weight": 1 + normal(WIDTH),
            f"blk.{i}.attn_q.weight": normal(HEADS * HEAD, WIDTH),
            f"blk.{i}.attn_k.weight": normal(KV_HEADS * HEAD, WIDTH),
            f"blk.{i}.attn_v.weight": normal(KV_HEADS * HEAD, WIDTH),
            f"blk.{i}.attn_output.weight": normal(WIDTH, HEADS * HEAD),
            f"blk.{i}.ffn_norm.weight": 1 + normal(WIDTH),
            f"blk.{i}.ffn_gate.weight": normal(INNER, WIDTH),
            f"blk.{i}.ffn_up.weight": normal(INNER, WIDTH),
            f"blk.{i}.ffn_down.weight": normal(WIDTH, INNER),
        }
    return made


def interleaved(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to query and key rows: it puts the two halves of each head side by side."""
    head = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return np.ascontiguousarray(head.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    *,
    keys: dict[str, object] | None = None,
    tensors: dict[str, NDArray[np.float32] | None] | None = None,
    tied: bool = True,
    kinds: dict[str, str] | None = None,
) -> Path:
    """`keys` and `tensors` replace or add what the file says; None leaves something out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (_keys() | (keys or {})).items():
        _add(writer, key, value)
    for name, values in (weights(tied=tied) | (tensors or {})).items():
        if values is None:
            continue
        part = name.split(".")[-2]
        if values.ndim == 2 and part in ("attn_q", "attn_k"):
            values = interleaved(values, HEADS if part == "attn_q" else KV_HEADS)
        kind = gguf.GGMLQuantizationType[(KINDS | (kinds or {})).get(part, "F32") if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys() -> dict[str, object]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": HEAD,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        "general.quantization_version": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str() if key == "general.architecture":
            writer.kv_data[0][key].value = value
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)
