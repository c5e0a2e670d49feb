"""Tensors of a GGUF file as one safetensors file, one tensor in memory at a time.

Blocks are dequantised to fp32 as every reader of the format does it; fp32, fp16 and bf16 are kept as they are. A
narrower type for dequantised blocks would round: a weight of a 4-bit block is scale * q + minimum, both fp16.

Query and key rows lie in the file in the order of interleaved rotary pairs, here in that of rotary halves:

    file, one head of width 8     0 4 1 5 2 6 3 7        rows 0..3 are the first halves of the pairs
    ours                          0 1 2 3 4 5 6 7

Shape letters: R rows, C columns.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from epd.model.gguf.errors import GgufError

_NUM_NAMES_SHOWN = 20
_OUTPUT = "output.weight"


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a tensor of the file goes. `num_rotary_heads` is set for query and key projections."""

    name: str
    shape: tuple[int, ...]
    num_rotary_heads: int | None = None


def is_tied(tensors: Sequence[Any]) -> bool:
    """A file without an output projection uses the embedding table."""
    return all(tensor.name != _OUTPUT for tensor in tensors)


def write_tensors(tensors: Sequence[Any], config: Mapping[str, Any], path: Path) -> None:
    """`tensors` are those of a `gguf.GGUFReader`, `config` the config.json beside `path`.

    Raises GgufError naming every tensor that is missing, unexpected or of another shape, or the first whose type cannot
    be read.
    """
    targets = _targets(config)
    _check(tensors, targets)
    header: dict[str, object] = {}
    offset = 0
    for tensor in tensors:
        target, dtype = targets[tensor.name], _stored_dtype(tensor)
        size_bytes = int(np.prod(target.shape)) * (4 if dtype == "F32" else 2)
        header[target.name] = {"dtype": dtype, "shape": target.shape, "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    with path.open("xb") as file:
        _write_header(file, header)
        for tensor in tensors:
            _values(tensor, targets[tensor.name]).tofile(file)


def _write_header(file: BinaryIO, header: Mapping[str, object]) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    file.flush()


def _targets(config: Mapping[str, Any]) -> dict[str, _Target]:
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    table = config["vocab_size"], width
    targets = {
        "token_embd.weight": _Target("model.embed_tokens.weight", table),
        "output_norm.weight": _Target("model.norm.weight", (width,)),
    }
    if not config["tie_word_embeddings"]:
        targets[_OUTPUT] = _Target("lm_head.weight", table)
    query, key = (num_heads * head_dim, width), (num_kv_heads * head_dim, width)
    for i in range(config["num_hidden_layers"]):
        ours, file = f"model.layers.{i}", f"blk.{i}"
        targets |= {
            f"{file}.attn_norm.weight": _Target(f"{ours}.input_layernorm.weight", (width,)),
            f"{file}.attn_q.weight": _Target(f"{ours}.self_attn.q_proj.weight", query, num_heads),
            f"{file}.attn_k.weight": _Target(f"{ours}.self_attn.k_proj.weight", key, num_kv_heads),
            f"{file}.attn_v.weight": _Target(f"{ours}.self_attn.v_proj.weight", key),
            f"{file}.attn_output.weight": _Target(f"{ours}.self_attn.o_proj.weight", query[::-1]),
            f"{file}.ffn_norm.weight": _Target(f"{ours}.post_attention_layernorm.weight", (width,)),
            f"{file}.ffn_gate.weight": _Target(f"{ours}.mlp.gate_proj.weight", (inner, width)),
            f"{file}.ffn_up.weight": _Target(f"{ours}.mlp.up_proj.weight", (inner, width)),
            f"{file}.ffn_down.weight": _Target(f"{ours}.mlp.down_proj.weight", (width, inner)),
        }
    return targets


def _check(tensors: Sequence[Any], targets: Mapping[str, _Target]) -> None:
    # The format counts dimensions from the fastest one.
    found = {tensor.name: tuple(int(size) for size in tensor.shape[::-1]) for tensor in tensors}
    problems = {
        "missing": sorted(targets.keys() - found.keys()),
        "not implemented": sorted(found.keys() - targets.keys()),
        "of another shape": [
            f"{name} (expected {list(target.shape)}, found {list(found[name])})"
            for name, target in targets.items()
            if name in found and found[name] != target.shape
        ],
    }
    lines = [
        f"{len(names)} tensors {kind}: {', '.join(names[:_NUM_NAMES_SHOWN])}"
        for kind, names in problems.items()
        if names
    ]
    if lines:
        raise GgufError("; ".join(lines))


def _stored_dtype(tensor: Any) -> str:
    kind: str = tensor.tensor_type.name
    return kind if kind in ("F16", "BF16") else "F32"


def _values(tensor: Any, target: _Target) -> NDArray[Any]:
    """[R, C] or [C] as it is written, bf16 as its bits."""
    from gguf import dequantize

    kind, data = tensor.tensor_type.name, tensor.data
    values: NDArray[Any]
    if kind == "BF16":
        values = data.view(np.uint16)
    elif kind in ("F16", "F32"):
        values = data
    else:
        try:
            values = dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise GgufError(f"{tensor.name} is of type {kind}, which cannot be read") from error
    values = values.reshape(target.shape)
    return values if target.num_rotary_heads is None else values[half_order(len(values), target.num_rotary_heads)]


def half_order(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """Row of the file for each of ours, int64 [R]."""
    pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
