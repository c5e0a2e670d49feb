"""The tensors of a checkpoint's towers, named, shaped and typed from configuration alone. Free of torch.

`TensorSpec` is also what the text model's inventory is made of (`epd.model.inventory`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from encoder.checkpoint import ITEM_BYTES
from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig

StoredDtype = Literal["F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8"]
# In the order they are shown.
Part = Literal[
    "embedding",
    "full_attention",
    "window_attention",
    "dense_mlp",
    "experts",
    "router",
    "norms",
    "lm_head",
    "mtp",
    "vision",
    "speech_embeddings",
    "audio_encoder",
    "audio_tokenizer",
]

_CODEBOOK_TRAINING_STATE = ("_codebook.inited", "_codebook.cluster_size", "_codebook.embed_avg")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file; `dtype` as safetensors spells it.

    `params_per_element` is how many parameters of the model one stored element holds: none for the scales of a
    quantised matrix, two where a byte packs a pair of 4-bit values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredDtype
    part: Part
    params_per_element: int = 1

    @property
    def num_elements(self) -> int:
        """Stored elements."""
        return prod(self.shape)

    @property
    def num_params(self) -> int:
        """Parameters of the model these elements hold."""
        return self.num_elements * self.params_per_element

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, the header not counted."""
        return self.num_elements * ITEM_BYTES[self.dtype]


def vision_tensors(config: VisionConfig, dtype: StoredDtype = "BF16") -> Iterator[TensorSpec]:
    """Yield the tensors under `visual.`; merger biases as `config.merger_bias` says."""
    width, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    patch = config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"visual.{name}", shape, dtype, "vision")

    yield spec("patch_embed.proj.weight", width, *patch)
    for i, kind in enumerate(config.block_types):
        block = f"blocks.{i}"
        yield spec(f"{block}.norm1.weight", width)
        yield spec(f"{block}.attn.qkv.weight", q_width + 2 * kv_width, width)
        yield spec(f"{block}.attn.qkv.bias", q_width + 2 * kv_width)
        yield spec(f"{block}.attn.proj.weight", width, q_width)
        yield spec(f"{block}.attn.proj.bias", width)
        if config.use_sink and kind != -1:
            yield spec(f"{block}.attn.sinks", config.num_heads)
        yield spec(f"{block}.norm2.weight", width)
        for name, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
            yield spec(f"{block}.mlp.{name}_proj.weight", rows, columns)
            yield spec(f"{block}.mlp.{name}_proj.bias", rows)
    unit = width * config.patches_per_unit
    yield spec("merger.ln_q.weight", width)
    for name, rows in (("merger.mlp.0", unit), ("merger.mlp.2", config.out_hidden_size)):
        yield spec(f"{name}.weight", rows, unit)
        if config.merger_bias:
            yield spec(f"{name}.bias", rows)


def audio_encoder_tensors(config: AudioConfig, dtype: StoredDtype = "BF16") -> Iterator[TensorSpec]:
    """Yield the tensors under `speech_embeddings.` and `audio_encoder.`."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"audio_encoder.{name}", shape, dtype, "audio_encoder")

    for channel, size in enumerate(config.vocab_sizes):
        yield TensorSpec(f"speech_embeddings.{channel}.weight", (size, width), dtype, "speech_embeddings")
    for i in range(config.num_layers):
        layer = f"input_local_transformer.layers.{i}"
        yield spec(f"{layer}.input_layernorm.weight", width)
        for kind in "qkv":
            yield spec(f"{layer}.self_attn.{kind}_proj.weight", heads, width)
            yield spec(f"{layer}.self_attn.{kind}_proj.bias", heads)
        yield spec(f"{layer}.self_attn.o_proj.weight", width, heads)
        yield spec(f"{layer}.post_attention_layernorm.weight", width)
        yield spec(f"{layer}.mlp.gate_proj.weight", inner, width)
        yield spec(f"{layer}.mlp.up_proj.weight", inner, width)
        yield spec(f"{layer}.mlp.down_proj.weight", width, inner)
    if config.add_post_norm:
        yield spec("input_local_transformer.norm.weight", width)
    group = width * config.group_size
    if config.projection_layers == 1:
        yield spec("projection.mlp.0.weight", config.out_hidden_size, group)
    else:
        yield spec("projection.mlp.0.weight", 4 * group, group)
        yield spec("projection.mlp.2.weight", config.out_hidden_size, 4 * group)


def used_tokenizer_name(name: str) -> str | None:
    """Return the name as `audio_tokenizer_tensors` spells it; None for what the file holds besides the encoder.

    That is the vocoder and the training state of the codebooks. Some files leave the prefix away.
    """
    if name.startswith("decoder.") or name.endswith(_CODEBOOK_TRAINING_STATE):
        return None
    return name if name.startswith("encoder.") else f"encoder.{name}"


def audio_tokenizer_tensors(config: AudioTokenizerConfig, dtype: StoredDtype = "BF16") -> Iterator[TensorSpec]:
    """Yield what is used of `audio_tokenizer/model.safetensors`: the encoder and its codebooks, not the vocoder."""
    width = config.d_model

    def pair(name: str, *shape: int) -> Iterator[TensorSpec]:
        yield spec(f"{name}.weight", *shape)
        yield spec(f"{name}.bias", shape[0])

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"encoder.{name}", shape, dtype, "audio_tokenizer")

    yield from pair("conv1", width, config.num_mels, config.kernel_size)
    yield from pair("conv2", width, width, config.kernel_size)
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        yield from pair(f"{layer}.self_attn.q_proj", width, width)
        yield spec(f"{layer}.self_attn.k_proj.weight", width, width)
        yield from pair(f"{layer}.self_attn.v_proj", width, width)
        yield from pair(f"{layer}.self_attn.out_proj", width, width)
        yield from pair(f"{layer}.self_attn_layer_norm", width)
        yield from pair(f"{layer}.fc1", config.ffn_dim, width)
        yield from pair(f"{layer}.fc2", width, config.ffn_dim)
        yield from pair(f"{layer}.final_layer_norm", width)
    yield from pair("layer_norm", width)
    yield spec("down_sample_layer.0.weight", width, width, config.pool)
    yield from pair("down_sample_norm", width)
    for level, size in enumerate(config.codebook_sizes):
        yield spec(f"quantizer.vq.layers.{level}._codebook.embed", size, width)
