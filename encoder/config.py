"""Frozen settings of the towers (read from a checkpoint's own config files) and of the encoder server.

Model configs are read with `from_hf`; a value the towers do not implement is refused by name, never ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SinkForm = Literal["key0", "denominator"]
MergerNorm = Literal["layernorm", "rmsnorm"]


def _refuse(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{key} is {value!r}; supported: {allowed}")


def _require(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config lacks {key}")
    return config[key]


def _int_list(value: int | str | Sequence[int], count: int, key: str) -> tuple[int, ...]:
    """Sizes per channel from an int, a digit or dash-separated string, or a list; one value stands for all channels."""
    if isinstance(value, str):
        sizes = tuple(int(part) for part in value.split("-"))
    elif isinstance(value, int):
        sizes = (value,)
    else:
        sizes = tuple(int(part) for part in value)
    if len(sizes) == 1:
        sizes *= count
    if len(sizes) < count:
        raise ValueError(f"{key} lists {len(sizes)} sizes for {count} channels")
    return sizes[:count]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. `window_patches` is the half-width of the band; block types: -1 global, 0 row, 1 column."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    out_hidden_size: int
    window_patches: int
    block_types: tuple[int, ...]
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    use_sink: bool = True
    norm_eps: float = 1e-6
    # Implementations disagree on the next two; the defaults are the checkpoint's own code.
    sink_form: SinkForm = "key0"
    merger_norm: MergerNorm = "layernorm"
    # The published checkpoint has no merger biases; a file that does carry them is loaded with them.
    merger_bias: bool = False

    @property
    def patch_width(self) -> int:
        """Columns of one row of `pixel_values`: channel x time x row x column."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_unit(self) -> int:
        """Patches merged into one embedding row."""
        return self.merge_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "VisionConfig":
        """Read `vision_config` of a checkpoint; `config` is that section or the whole config.json."""
        section = config.get("vision_config") or config
        heads = int(_require(section, "num_heads"))
        head_dim = int(section.get("qk_channels") or 64)
        if int(section.get("kv_channels") or 64) != head_dim:
            raise _refuse("kv_channels", section.get("kv_channels"), f"the value of qk_channels, {head_dim}")
        if section.get("hidden_act", "silu") != "silu":
            raise _refuse("hidden_act", section["hidden_act"], "'silu'")
        if int(section.get("spatial_merge_size", 2)) != 2:
            raise _refuse("spatial_merge_size", section["spatial_merge_size"], "2")
        depth = int(_require(section, "depth"))
        return cls(
            depth=depth,
            hidden_size=int(_require(section, "hidden_size")),
            intermediate_size=int(_require(section, "intermediate_size")),
            num_heads=heads,
            num_kv_heads=int(section.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            out_hidden_size=int(_require(section, "out_hidden_size")),
            window_patches=int(_require(section, "visual_token_window_size")),
            block_types=_block_types(section, depth),
            in_channels=int(section.get("in_chans") or section.get("in_channels") or 3),
            patch_size=int(section.get("patch_size") or 16),
            temporal_patch_size=int(section.get("temporal_patch_size") or 2),
            use_sink=bool(section.get("use_sink", True)),
        )


def _block_types(section: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    types = tuple(int(kind) for kind in _require(section, "vit_window_attn_types"))
    if len(types) != depth or not set(types) <= {-1, 0, 1}:
        raise _refuse("vit_window_attn_types", types, f"{depth} values of -1, 0 or 1")
    full = tuple(i for i, kind in enumerate(types) if kind == -1)
    listed = tuple(sorted(int(i) for i in section.get("fullatt_block_indexes", full)))
    if listed != full:
        raise _refuse("fullatt_block_indexes", listed, f"the -1 entries of vit_window_attn_types, {full}")
    return types


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """The audio encoder: code embeddings, a small transformer over groups of code frames, a projection."""

    num_channels: int
    group_size: int
    segment_frames: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    out_hidden_size: int
    vocab_sizes: tuple[int, ...]
    zero_ids: tuple[int, ...]
    rope_theta: float = 640_000.0
    rotary_dim: int = 64
    full_attention: bool = True
    add_post_norm: bool = True
    projection_layers: int = 2
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "AudioConfig":
        """Read `audio_config` of a checkpoint; `config` is that section or the whole config.json."""
        section = config.get("audio_config") or config
        channels = int(_require(section, "audio_channels"))
        head_dim = int(_require(section, "input_local_head_dim"))
        layers = int(section.get("projection_layers") or 2)
        if layers not in (1, 2):
            raise _refuse("projection_layers", layers, "1 or 2")
        if section.get("input_local_hidden_dropout"):
            raise _refuse("input_local_hidden_dropout", section["input_local_hidden_dropout"], "0")
        return cls(
            num_channels=channels,
            group_size=int(_require(section, "group_size")),
            segment_frames=int(_require(section, "audio_segment_size")),
            hidden_size=int(_require(section, "input_local_dim")),
            num_layers=int(_require(section, "input_local_layers")),
            num_heads=int(_require(section, "input_local_attn_heads")),
            head_dim=head_dim,
            intermediate_size=int(_require(section, "input_local_intermediate_size")),
            out_hidden_size=int(_require(section, "out_hidden_size")),
            vocab_sizes=_int_list(_require(section, "speech_vocab_size"), channels, "speech_vocab_size"),
            zero_ids=_int_list(_require(section, "speech_zeroemb_idx"), channels, "speech_zeroemb_idx"),
            rope_theta=float(section.get("rope_theta") or 640_000.0),
            rotary_dim=int(head_dim * float(section.get("partial_rotary_factor") or 1.0)),
            full_attention=bool(section.get("input_full_attention", True)),
            add_post_norm=bool(section.get("add_post_norm", True)),
            projection_layers=layers,
        )


@dataclass(frozen=True, slots=True)
class AudioTokenizerConfig:
    """The audio tokenizer's encoder. Windows are inclusive distances in positions; None is unbounded."""

    d_model: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    num_mels: int
    codebook_sizes: tuple[int, ...]
    skip_layer: int | None
    causal: bool
    window_left: int | None
    window_right: int | None
    windowed_layers: tuple[bool, ...]
    kernel_size: int = 3
    stride: int = 2
    pool: int = 2
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def num_quantizers(self) -> int:
        """Codes per code frame."""
        return len(self.codebook_sizes)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "AudioTokenizerConfig":
        """Read `audio_tokenizer/config.json`."""
        if config.get("ln_type", "LayerNorm") != "LayerNorm":
            raise _refuse("ln_type", config["ln_type"], "'LayerNorm'")
        if config.get("activation_function", "gelu") != "gelu":
            raise _refuse("activation_function", config["activation_function"], "'gelu'")
        layers = int(_require(config, "encoder_layers"))
        left, right = (int(edge) for edge in config.get("encoder_attn_window_size", (-1, -1)))
        hybrid, period = bool(config.get("hybrid_attention", False)), int(config.get("swa_per_block", 1))
        count = int(_require(config, "num_quantizers"))
        skip_id = config.get("encoder_skip_layer_id")
        return cls(
            d_model=int(_require(config, "d_model")),
            num_layers=layers,
            num_heads=int(_require(config, "encoder_attention_heads")),
            ffn_dim=int(_require(config, "encoder_ffn_dim")),
            num_mels=int(config.get("n_mels", 128)),
            codebook_sizes=_int_list(_require(config, "codebook_size"), count, "codebook_size"),
            skip_layer=None if skip_id is None else int(skip_id) - 1,
            causal=bool(config.get("encoder_causal", True)),
            window_left=None if left < 0 else left,
            window_right=None if right < 0 else right,
            windowed_layers=tuple(not hybrid or i % period < period - 1 for i in range(layers)),
            kernel_size=int(config.get("kernel_size", 3)),
            stride=int(config.get("stride_size", 2)),
            pool=int(config.get("avg_pooler", 2)),
            rope_theta=float(config.get("rope_theta", 10_000)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Knobs of one encoder process. Raises ValueError naming key, value and what is allowed."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Results depend in their last bits on the number of threads that share a matrix product, so the value is part of
    # what an embedding is: every process that must agree bit for bit uses the same one.
    tower_threads: int = 1
    decode_threads: int = 2
    # One batch takes at most this much; a larger medium is a batch of its own.
    max_batch_patches: int = 32_768
    max_batch_mel_frames: int = 24_000
    max_batch_jobs: int = 64
    # Media of a batch run one after another (see `runner`), so waiting for company gains nothing while the tower idles.
    max_batch_wait_s: float = 0.0
    # Requests admitted and not yet replied to; one more is refused with 503.
    max_pending: int = 256
    # Content that waits to be decoded; the first medium is always taken.
    max_pending_bytes: int = 2**30
    retry_after_s: float = 1.0
    arena_bytes: int = 256 * 2**20
    page_bytes: int = 4096
    # How long a medium waits for leases to end when the arena is full of them; then it is refused with 503.
    arena_wait_s: float = 10.0
    # A lease lasts until its request's deadline, and never longer than this.
    max_lease_s: float = 900.0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise _refuse("dtype", self.dtype, "'float32' or 'bfloat16'")
        at_least_one = ("tower_threads", "decode_threads", "max_batch_patches", "max_batch_mel_frames")
        for name in (*at_least_one, "max_batch_jobs", "max_pending", "max_pending_bytes"):
            if getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "1 or more")
        for name in ("max_batch_wait_s", "retry_after_s", "arena_wait_s", "max_lease_s"):
            if getattr(self, name) < 0:
                raise _refuse(name, getattr(self, name), "0 or more")
        if self.page_bytes < 64 or self.page_bytes % 64:
            raise _refuse("page_bytes", self.page_bytes, "a multiple of 64")
        if self.arena_bytes < self.page_bytes:
            raise _refuse("arena_bytes", self.arena_bytes, f"at least page_bytes, {self.page_bytes}")
