"""Frozen settings of the towers (read from a checkpoint's own config files) and of the encoder server.

Model configs are read with `from_hf`; a value the towers do not implement is refused by name, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from encoder.config_ranges import AUDIO_RANGES, TOKENIZER_RANGES, VISION_RANGES, SectionKeys
from encoder.tiers.base import check_store_url
from preprocess.config import DecodeSettings, Isolation, VideoBackend, check_video_backend

SinkForm = Literal["key0", "denominator"]
MergerNorm = Literal["layernorm", "rmsnorm"]


def _refuse(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{key} is {value!r}; supported: {allowed}")


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
        keys = SectionKeys(config.get("vision_config") or config, VISION_RANGES, "vision_config.")
        heads = keys.integer("num_heads")
        kv_heads = keys.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise keys.refusal("num_key_value_heads", kv_heads, f"a divisor of num_heads, {heads}")
        head_dim = keys.integer("qk_channels", 64)
        # A quarter of the channels turns by row, a quarter by column.
        if head_dim % 4:
            raise keys.refusal("qk_channels", head_dim, "a multiple of 4")
        if keys.integer("kv_channels", 64) != head_dim:
            raise keys.refusal("kv_channels", keys.integer("kv_channels", 64), f"the value of qk_channels, {head_dim}")
        keys.one_of("hidden_act", "silu")
        keys.integer("spatial_merge_size", 2)
        depth = keys.integer("depth")
        return cls(
            depth=depth,
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            out_hidden_size=keys.integer("out_hidden_size"),
            window_patches=keys.integer("visual_token_window_size"),
            block_types=_block_types(keys, depth),
            in_channels=keys.integer("in_chans", keys.integer("in_channels", 3)),
            patch_size=keys.integer("patch_size", 16),
            temporal_patch_size=keys.integer("temporal_patch_size", 2),
            use_sink=keys.flag("use_sink", True),
        )


def _block_types(keys: SectionKeys, depth: int) -> tuple[int, ...]:
    types = tuple(keys.integers("vit_window_attn_types", length=depth))
    full = tuple(i for i, kind in enumerate(types) if kind == -1)
    listed = tuple(sorted(keys.integers("fullatt_block_indexes", list(full))))
    if listed != full:
        raise keys.refusal("fullatt_block_indexes", listed, f"the -1 entries of vit_window_attn_types, {full}")
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
        keys = SectionKeys(config.get("audio_config") or config, AUDIO_RANGES, "audio_config.")
        channels = keys.integer("audio_channels")
        head_dim = keys.integer("input_local_head_dim")
        rotary_dim = int(head_dim * keys.number("partial_rotary_factor", 1.0))
        if rotary_dim % 2 or rotary_dim < 2:
            raise keys.refusal("input_local_head_dim", head_dim, "a width whose rotary part is even and at least 2")
        keys.number("input_local_hidden_dropout", 0.0)
        vocab_sizes = keys.per_channel("speech_vocab_size", channels)
        zero_ids = keys.per_channel("speech_zeroemb_idx", channels)
        if any(zero >= size for zero, size in zip(zero_ids, vocab_sizes, strict=True)):
            raise keys.refusal("speech_zeroemb_idx", zero_ids, f"codes below speech_vocab_size, {vocab_sizes}")
        return cls(
            num_channels=channels,
            group_size=keys.integer("group_size"),
            segment_frames=keys.integer("audio_segment_size"),
            hidden_size=keys.integer("input_local_dim"),
            num_layers=keys.integer("input_local_layers"),
            num_heads=keys.integer("input_local_attn_heads"),
            head_dim=head_dim,
            intermediate_size=keys.integer("input_local_intermediate_size"),
            out_hidden_size=keys.integer("out_hidden_size"),
            vocab_sizes=vocab_sizes,
            zero_ids=zero_ids,
            rope_theta=keys.number("rope_theta", 640_000.0),
            rotary_dim=rotary_dim,
            full_attention=keys.flag("input_full_attention", True),
            add_post_norm=keys.flag("add_post_norm", True),
            projection_layers=keys.integer("projection_layers", 2),
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
        keys = SectionKeys(config, TOKENIZER_RANGES, "audio_tokenizer/config.json: ")
        keys.one_of("ln_type", "LayerNorm")
        keys.one_of("activation_function", "gelu")
        layers, width = keys.integer("encoder_layers"), keys.integer("d_model")
        heads = keys.integer("encoder_attention_heads")
        if width % (2 * heads):
            raise keys.refusal("encoder_attention_heads", heads, f"heads of an even width out of d_model, {width}")
        left, right = keys.integers("encoder_attn_window_size", [-1, -1], length=2)
        hybrid, period = keys.flag("hybrid_attention", False), keys.integer("swa_per_block", 1)
        skip_id = keys.optional_integer("encoder_skip_layer_id")
        if skip_id is not None and skip_id > layers:
            raise keys.refusal("encoder_skip_layer_id", skip_id, f"one of the {layers} layers")
        return cls(
            d_model=width,
            num_layers=layers,
            num_heads=heads,
            ffn_dim=keys.integer("encoder_ffn_dim"),
            num_mels=keys.integer("n_mels", 128),
            codebook_sizes=keys.per_channel("codebook_size", keys.integer("num_quantizers")),
            skip_layer=None if skip_id is None else skip_id - 1,
            causal=keys.flag("encoder_causal", True),
            window_left=None if left < 0 else left,
            window_right=None if right < 0 else right,
            windowed_layers=tuple(not hybrid or i % period < period - 1 for i in range(layers)),
            kernel_size=keys.integer("kernel_size", 3),
            stride=keys.integer("stride_size", 2),
            pool=keys.integer("avg_pooler", 2),
            rope_theta=keys.number("rope_theta", 10_000.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Knobs of one encoder process. Raises ValueError naming key, value and what is allowed."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Results depend in their last bits on the number of threads that share a matrix product, so the value is part of
    # what an embedding is: every process that must agree bit for bit uses the same one.
    tower_threads: int = 1
    # Steps of the vision tower go through torch.compile: a minute at the start. Another rounding, as with more threads.
    compile: bool = False
    # Media decoded at once: by a thread each, or by a worker process each; see `DecodeSettings` for what follows.
    decode_threads: int = 2
    isolation: Isolation = "threads"
    video_threads: int | None = None
    # What decodes videos. Part of what an embedding of a video is: frames are the same, their pixels not to the bit.
    video_backend: VideoBackend = "pyav"
    max_item_s: float = 900.0
    max_worker_bytes: int = 4 * 2**30
    max_worker_items: int = 1000
    # Where pictures are resized and cut into patches: by the threads that decode, or on the tower's device, which gets
    # whole pixels then. None: on the tower where that is a GPU. Both give the same patches, so it is in no key.
    preprocess: Literal["cpu", "tower"] | None = None
    # One batch takes at most this much; a larger medium is a batch of its own.
    max_batch_patches: int = 32_768
    max_batch_mel_frames: int = 24_000
    max_batch_jobs: int = 64
    # What arrives while the tower works is the next batch anyway; waiting longer fills tiles at the price of latency.
    max_batch_wait_s: float = 0.0
    # Requests admitted and not yet replied to; one more is refused with 503.
    max_pending: int = 256
    # Content that waits to be decoded; the first medium is always taken.
    max_pending_bytes: int = 2**30
    retry_after_s: float = 1.0
    # A batch that is in the tower for longer than this counts as stuck: the replica gets nothing new while others can
    # take it, and with no other left the deployment says that it is not healthy.
    wedged_after_s: float = 60.0
    arena_bytes: int = 256 * 2**20
    page_bytes: int = 4096
    # How long a medium waits for leases to end when the arena is full of them; then it is refused with 503.
    arena_wait_s: float = 10.0
    # A lease lasts until its request's deadline, and never longer than this.
    max_lease_s: float = 900.0
    # Where embeddings outlive the arena: a directory (absolute path) or redis://HOST:PORT/DB; "" for nowhere. What does
    # not answer within the timeout is a miss. The size bounds a directory, the time to live (None: no end) is Redis's.
    embedding_store: str = ""
    embedding_store_timeout_s: float = 0.5
    embedding_store_bytes: int = 10 * 2**30
    embedding_store_ttl_s: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise _refuse("dtype", self.dtype, "'float32' or 'bfloat16'")
        if self.preprocess not in (None, "cpu", "tower"):
            raise _refuse("preprocess", self.preprocess, "'cpu' or 'tower'")
        at_least_one = ("tower_threads", "decode_threads", "max_batch_patches", "max_batch_mel_frames")
        for name in (*at_least_one, "max_batch_jobs", "max_pending", "max_pending_bytes"):
            if getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "1 or more")
        for name in ("max_batch_wait_s", "retry_after_s", "arena_wait_s", "max_lease_s"):
            if getattr(self, name) < 0:
                raise _refuse(name, getattr(self, name), "0 or more")
        check_store_url(self.embedding_store)
        for name in ("embedding_store_timeout_s", "embedding_store_bytes", "embedding_store_ttl_s"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise _refuse(name, getattr(self, name), "more than 0")
        if self.wedged_after_s <= 0:
            raise _refuse("wedged_after_s", self.wedged_after_s, "above 0")
        if self.page_bytes < 64 or self.page_bytes % 64:
            raise _refuse("page_bytes", self.page_bytes, "a multiple of 64")
        if self.arena_bytes < self.page_bytes:
            raise _refuse("arena_bytes", self.arena_bytes, f"at least page_bytes, {self.page_bytes}")
        check_video_backend(self.video_backend)
        # Refuses what it does not allow.
        _ = self.decode_settings

    @property
    def decode_settings(self) -> DecodeSettings:
        """Of the decode pool."""
        return DecodeSettings(
            num_threads=self.decode_threads,
            isolation=self.isolation,
            video_threads=self.video_threads,
            max_item_s=self.max_item_s,
            max_worker_bytes=self.max_worker_bytes,
            max_worker_items=self.max_worker_items,
        )

    @property
    def sends_pixels(self) -> bool:
        """Whether the tower gets pixels, to be resized and cut on its device."""
        return self.device.startswith("cuda") if self.preprocess is None else self.preprocess == "tower"
