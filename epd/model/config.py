"""The text model's configuration, read once from a Hugging Face `config.json`.

Two families share the engine: MiMo (full and window layers, experts, sinks) and Llama (every layer full and dense).
Everything comes from the file; a value this model does not implement is refused by name. Free of torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from epd.kernels.base import AttentionSpec
from epd.model.config_keys import ConfigError, ConfigKeys
from epd.model.config_ranges import MAX_EXPERTS_IN_ALL, TEXT_RANGES
from preprocess.ranges import Whole, shown_value

__all__ = ["ConfigError", "LayerConfig", "MoeConfig", "TextConfig"]

ProjectionLayout = Literal["split", "fused_qkv"]
RouterDtype = Literal["float32", "bfloat16"]
Family = Literal["mimo", "llama"]

# By `model_type` and by `architectures`; a file need not name both, one that names neither is taken for MiMo.
_MODEL_TYPES: Mapping[str, Family] = {"mimo_v2": "mimo", "mimo_v2_flash": "mimo", "llama": "llama"}
_ARCHITECTURES: Mapping[str, Family] = {
    "MiMoV2ForCausalLM": "mimo",
    "MiMoV2FlashForCausalLM": "mimo",
    "LlamaForCausalLM": "llama",
}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. `window_left` is None exactly when the layer is full."""

    index: int
    is_window: bool
    window_left: int | None
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    rope_theta: float
    rotary_dim: int
    has_sink: bool
    is_moe: bool

    @property
    def attention(self) -> AttentionSpec:
        """The part of the layer that attention backends see."""
        return AttentionSpec(
            index=self.index,
            window_left=self.window_left,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            scale=self.qk_dim**-0.5,
        )

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections."""
        return self.num_heads * self.qk_dim, self.num_kv_heads * self.qk_dim, self.num_kv_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts. Scores are sigmoids; the correction bias takes part in the choice alone."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    num_groups: int
    num_groups_per_token: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    router_dtype: RouterDtype


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The whole text model.

    `window_layer` is the geometry every draft head copies, None in a family without draft heads; `moe` is None in a
    family without experts. Tied, the vocabulary projection is the embedding table itself.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    value_scale: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    window_layer: LayerConfig | None
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    projection_layout: ProjectionLayout
    num_qkv_shards: int
    quant_block: tuple[int, int] | None
    initializer_range: float
    tie_word_embeddings: bool = False
    # Columns that share an exponent where the files hold 4-bit matrices.
    mxfp4_block: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the trunk, draft heads not counted."""
        return len(self.layers)

    def mtp_layer(self, k: int) -> LayerConfig:
        """Return draft head k's layer: window geometry, dense feed-forward, numbered after the trunk."""
        if self.window_layer is None:
            raise ConfigError(f"draft head {k}: this family of models has none")
        return replace(self.window_layer, index=self.num_layers + k)

    @classmethod
    def from_hf(cls, config: Mapping[str, object], window_left: int | None = None) -> "TextConfig":
        """Read `config.json`. `window_left` overrides the reach of window layers (default: sliding window - 1).

        Published engines disagree by one token on the reach: 127 for a configured 128 is what the checkpoint's own code
        and vLLM use, 128 is what SGLang uses. Raises ConfigError naming the key.
        """
        keys = ConfigKeys(config)
        if _family(keys) == "mimo":
            return cls._from_mimo(keys, window_left)
        if window_left is not None:
            raise ConfigError(f"window_left: {window_left} is set, but this model has no window layers")
        return cls._from_llama(keys)

    @classmethod
    def _from_mimo(cls, keys: ConfigKeys, window_left: int | None) -> "TextConfig":
        _refuse_unimplemented(keys)
        keys.one_of("tie_word_embeddings", (None, False))
        num_layers = keys.integer("num_hidden_layers")
        pattern = keys.integers("hybrid_layer_pattern", length=num_layers, allowed=(0, 1))
        is_moe = keys.integers("moe_layer_freq", length=num_layers, allowed=(0, 1))
        reach = _window_left(keys) if window_left is None else window_left
        if reach < 0:
            raise ConfigError(f"window_left: {reach} is negative")
        full = _layer(keys, "", window_left=None)
        window = _layer(keys, "swa_", window_left=reach)
        layout = _projection_layout(keys)
        if layout == "fused_qkv" and (window.num_heads % full.num_kv_heads or window.num_kv_heads % full.num_kv_heads):
            raise ConfigError(
                f"swa_num_key_value_heads: {window.num_kv_heads} KV and {window.num_heads} query heads do not divide "
                f"into the {full.num_kv_heads} shards of fused_qkv"
            )
        layers = tuple(
            replace(window if pattern[i] else full, index=i, is_moe=bool(is_moe[i])) for i in range(num_layers)
        )
        return cls(
            vocab_size=(vocab_size := keys.integer("vocab_size")),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            rms_norm_eps=keys.number("layernorm_epsilon"),
            value_scale=keys.number("attention_value_scale"),
            max_position_embeddings=keys.integer("max_position_embeddings"),
            layers=layers,
            window_layer=window,
            moe=_moe(keys, num_layers=sum(is_moe)),
            eos_token_ids=_eos_token_ids(keys, vocab_size),
            pad_token_id=_pad_token_id(keys, vocab_size),
            projection_layout=layout,
            num_qkv_shards=full.num_kv_heads,
            quant_block=_quant_block(keys),
            mxfp4_block=_mxfp4_block(keys),
            initializer_range=keys.number("initializer_range", default=0.02),
        )

    @classmethod
    def _from_llama(cls, keys: ConfigKeys) -> "TextConfig":
        for key in ("mlp_bias", "attention_bias"):
            keys.one_of(key, (None, False))
        keys.one_of("hidden_act", ("silu",))
        keys.one_of("pretraining_tp", (None, 1))
        keys.one_of("sliding_window", (None,))
        _refuse_rope_scaling(keys)
        layer = _llama_layer(keys)
        return cls(
            vocab_size=(vocab_size := keys.integer("vocab_size")),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            rms_norm_eps=keys.number("rms_norm_eps"),
            value_scale=1.0,
            max_position_embeddings=keys.integer("max_position_embeddings"),
            layers=tuple(replace(layer, index=i) for i in range(keys.integer("num_hidden_layers"))),
            window_layer=None,
            moe=None,
            eos_token_ids=_eos_token_ids(keys, vocab_size),
            pad_token_id=_pad_token_id(keys, vocab_size),
            projection_layout="split",
            num_qkv_shards=layer.num_kv_heads,
            quant_block=_quant_block(keys),
            mxfp4_block=_mxfp4_block(keys),
            initializer_range=keys.number("initializer_range", default=0.02),
            tie_word_embeddings=keys.one_of("tie_word_embeddings", (None, False, True)) is True,
        )


def _family(keys: ConfigKeys) -> Family:
    """Raises ConfigError for a model type or architecture that is not implemented, or two that disagree."""
    named: set[Family] = set()
    model_type = keys.one_of("model_type", (None, *_MODEL_TYPES))
    if isinstance(model_type, str):
        named.add(_MODEL_TYPES[model_type])
    architectures = [] if (found := keys.get("architectures")) is None else found
    if not isinstance(architectures, (list, tuple)) or any(name not in tuple(_ARCHITECTURES) for name in architectures):
        raise ConfigError(
            f"architectures: {shown_value(found)} is not implemented, allowed are {tuple(_ARCHITECTURES)}"
        )
    named.update(_ARCHITECTURES[name] for name in architectures)
    if len(named) > 1:
        raise ConfigError(f"architectures: {architectures!r} does not belong to model_type {model_type!r}")
    return named.pop() if named else "mimo"


def _refuse_unimplemented(keys: ConfigKeys) -> None:
    keys.one_of("attention_bias", (None, False))
    keys.one_of("n_shared_experts", (None, 0))
    keys.one_of("scoring_func", ("sigmoid",))
    keys.one_of("topk_method", ("noaux_tc",))
    keys.one_of("hidden_act", ("silu",))
    _refuse_rope_scaling(keys)


def _refuse_rope_scaling(keys: ConfigKeys) -> None:
    scaling = keys.get("rope_scaling")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "default":
            raise ConfigError(
                f"rope_scaling: type {shown_value(kind)} is not implemented, allowed are ('default', None)"
            )
    elif scaling is not None:
        raise keys.refusal("rope_scaling", scaling, "an object or null")


def _window_left(keys: ConfigKeys) -> int:
    sizes = {key: keys.integer(key) for key in ("sliding_window", "sliding_window_size") if keys.get(key) is not None}
    if not sizes:
        raise keys.refusal("sliding_window", None, TEXT_RANGES["sliding_window"])
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"sliding_window: disagrees with its duplicate, {sizes}")
    return next(iter(sizes.values())) - 1


def _layer(keys: ConfigKeys, prefix: str, *, window_left: int | None) -> LayerConfig:
    """Read the geometry of one kind of layer; `prefix` is "swa_" for the window kind."""
    qk_dim = keys.integer(f"{prefix}head_dim")
    num_heads = keys.integer(f"{prefix}num_attention_heads")
    num_kv_heads = keys.integer(f"{prefix}num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ConfigError(f"{prefix}num_key_value_heads: {num_kv_heads} does not divide {num_heads} query heads")
    is_window = window_left is not None
    # A truncation by definition: 192 * 0.334 = 64.128 means 64.
    rotary_dim = int(qk_dim * keys.number("partial_rotary_factor", default=1.0))
    if rotary_dim % 2 or rotary_dim < 2:
        raise ConfigError(
            f"partial_rotary_factor: makes {rotary_dim} of {qk_dim} channels rotary, expected a positive even number"
        )
    return LayerConfig(
        index=0,
        is_window=is_window,
        window_left=window_left,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qk_dim=qk_dim,
        v_dim=keys.integer(f"{prefix}v_head_dim"),
        rope_theta=keys.number(f"{prefix}rope_theta"),
        rotary_dim=rotary_dim,
        has_sink=keys.flag("add_swa_attention_sink_bias" if is_window else "add_full_attention_sink_bias"),
        is_moe=False,
    )


def _llama_layer(keys: ConfigKeys) -> LayerConfig:
    """Every layer alike: full attention, one width for keys and values, rotary over the whole head."""
    num_heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    num_kv_heads = _given(keys.optional_integer("num_key_value_heads"), num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_key_value_heads: {num_kv_heads} does not divide {num_heads} query heads")
    head_dim = _given(keys.optional_integer("head_dim"), width // num_heads)
    if head_dim % 2 or head_dim < 2:
        raise ConfigError(
            f"head_dim: {head_dim} (of hidden_size {width} in {num_heads} heads), expected an even number: rotary "
            "embedding takes channels in pairs"
        )
    keys.one_of("partial_rotary_factor", (None, 1.0))
    # Newer files keep theta and kind together under another name.
    rope = keys.section("rope_parameters")
    if rope is not None:
        rope.one_of("rope_type", (None, "default"))
    return LayerConfig(
        index=0,
        is_window=False,
        window_left=None,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        rope_theta=(keys if rope is None else rope).number("rope_theta"),
        rotary_dim=head_dim,
        has_sink=False,
        is_moe=False,
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _moe(keys: ConfigKeys, *, num_layers: int) -> MoeConfig:
    num_experts = keys.integer("n_routed_experts")
    if num_experts * num_layers > MAX_EXPERTS_IN_ALL:
        raise ConfigError(
            f"n_routed_experts: expected at most {MAX_EXPERTS_IN_ALL // num_layers:,} in each of {num_layers} layers, "
            f"got {num_experts}"
        )
    num_experts_per_token = keys.integer("num_experts_per_tok")
    num_groups = _given(keys.optional_integer("n_group"), 1)
    num_groups_per_token = _given(keys.optional_integer("topk_group"), 1)
    if num_experts % num_groups or num_groups_per_token > num_groups:
        raise ConfigError(f"n_group: {num_experts} experts in {num_groups} groups, {num_groups_per_token} per token")
    if num_experts_per_token > num_experts // num_groups * num_groups_per_token:
        raise ConfigError(f"num_experts_per_tok: {num_experts_per_token} is more than the experts a token may choose")
    router_dtype = keys.one_of("moe_router_dtype", (None, "float32", "bfloat16"))
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        num_groups=num_groups,
        num_groups_per_token=num_groups_per_token,
        norm_topk_prob=keys.flag("norm_topk_prob"),
        routed_scaling_factor=keys.number("routed_scaling_factor", default=1.0),
        router_dtype="bfloat16" if router_dtype == "bfloat16" else "float32",
    )


def _projection_layout(keys: ConfigKeys) -> ProjectionLayout:
    layout = keys.one_of("attention_projection_layout", (None, "split", "fused_qkv"))
    return "fused_qkv" if layout == "fused_qkv" else "split"


def _mxfp4_block(keys: ConfigKeys) -> int | None:
    quantization = keys.section("quantization_config")
    if quantization is None or quantization.get("store_dtype") != "mxfp4":
        return None
    block = _given(quantization.optional_integer("mxfp4_block_size"), 32)
    if block % 2:
        raise quantization.refusal("mxfp4_block_size", block, "an even number")
    return block


def _quant_block(keys: ConfigKeys) -> tuple[int, int] | None:
    quantization = keys.section("quantization_config")
    if quantization is None:
        return None
    quantization.one_of("quant_method", ("fp8",))
    quantization.one_of("store_dtype", (None, "fp8", "mxfp4"))
    quantization.one_of("fmt", (None, "e4m3"))
    block, allowed = quantization.get("weight_block_size"), TEXT_RANGES["weight_block_size"]
    if not isinstance(block, (list, tuple)) or len(block) != 2 or any(size not in allowed for size in block):
        raise quantization.refusal("weight_block_size", block, f"a list of two, each {allowed}")
    return block[0], block[1]


def _eos_token_ids(keys: ConfigKeys, vocab_size: int) -> tuple[int, ...]:
    value = keys.get("eos_token_id")
    if value is None:
        return ()
    values, allowed = value if isinstance(value, (list, tuple)) else [value], Whole(0, vocab_size - 1)
    if any(v not in allowed for v in values):
        raise keys.refusal("eos_token_id", value, f"{allowed} (vocab_size is {vocab_size:,}), or a list of such")
    return tuple(values)


def _pad_token_id(keys: ConfigKeys, vocab_size: int) -> int | None:
    """Some files say -1 for none."""
    value = keys.get("pad_token_id")
    if value is None or value == -1:
        return None
    allowed = Whole(0, vocab_size - 1)
    if not isinstance(value, int) or value not in allowed:
        raise keys.refusal("pad_token_id", value, f"{allowed} (vocab_size is {vocab_size:,}), -1 or null")
    return value
