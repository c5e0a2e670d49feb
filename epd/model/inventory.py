"""Every tensor of a checkpoint, from its configuration alone: name, shape, file dtype and part. Free of torch.

The rules are those of the published files. Without headers they say what such a checkpoint holds; given the dtypes of
actual files (`stored`) each matrix is taken as it lies there, because the tensors decide which of them are quantised.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from encoder import Part, StoredDtype, TensorSpec, audio_encoder_tensors, audio_tokenizer_tensors, vision_tensors
from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from epd.model.config import ConfigError, LayerConfig, MoeConfig, TextConfig
from epd.model.config_keys import ConfigKeys
from epd.model.config_ranges import MAX_MTP_LAYERS
from preprocess.ranges import shown_value

QkvRows = Literal["interleaved", "plain"]

MTP_PREFIX = "model.mtp.layers."
# Of our own: published configurations do not say how many draft heads their files hold.
MTP_KEY = "num_mtp_layers"
_FAMILY = ("mimo_v2", "mimo_v2_flash")
_FAMILY_MTP_LAYERS = 3
_ALWAYS_ACTIVE: tuple[Part, ...] = (
    "embedding",
    "full_attention",
    "window_attention",
    "dense_mlp",
    "router",
    "norms",
    "lm_head",
)
_PLAIN: tuple[StoredDtype, ...] = ("F32", "BF16", "F16")
_EXPONENTS: tuple[StoredDtype, ...] = ("U8", "F8_E8M0")
_TORCH_DTYPES: Mapping[object, StoredDtype] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Storage:
    """How a checkpoint stores its tensors.

    `plain` is the dtype of what is not quantised. `block` is the fp8 block, None where nothing is quantised;
    `mxfp4_block`, the columns that share an exponent, is set where the experts are 4-bit. `ignored` names modules that
    stay plain. `interleaved`: fused rows lie shard by shard. `stored` is the dtype of every tensor found.
    """

    plain: StoredDtype
    block: tuple[int, int] | None
    mxfp4_block: int | None
    ignored: frozenset[str]
    interleaved: bool = True
    stored: Mapping[str, str] = field(default_factory=dict)

    def vector(self, name: str, part: Part, *shape: int, published: StoredDtype | None = None) -> TensorSpec:
        """Return a tensor that is never quantised. `published` is its dtype by the rules, headers may say otherwise."""
        return TensorSpec(name, shape, self._found(name, _PLAIN, published or self.plain), part)

    def matrix(
        self,
        name: str,
        part: Part,
        rows: int,
        columns: int,
        *,
        published: StoredDtype | None = None,
        num_shards: int = 1,
    ) -> Iterator[TensorSpec]:
        """Yield a matrix and its scales; blocks of scales start anew at each shard."""
        is_quantised = published is not None and published not in _PLAIN
        if published is None or (is_quantised and name.removesuffix(".weight") in self.ignored):
            published = self.plain
        loadable = [*_PLAIN, *(["F8_E4M3"] if self.block else ()), *(["U8"] if self.mxfp4_block else ())]
        dtype = self._found(name, loadable, published)
        if dtype == "U8" and self.mxfp4_block:
            yield TensorSpec(name, (rows, columns // 2), dtype, part, params_per_element=2)
            exponents = self._found(f"{name}_scale", _EXPONENTS, "U8")
            shape = rows, -(-columns // self.mxfp4_block)
            yield TensorSpec(f"{name}_scale", shape, exponents, part, params_per_element=0)
            return
        yield TensorSpec(name, (rows, columns), dtype, part)
        if dtype == "F8_E4M3" and self.block:
            scale_rows = num_shards * -(-(rows // num_shards) // self.block[0])
            scales = self._found(f"{name}_scale_inv", _PLAIN, "F32")
            shape = scale_rows, -(-columns // self.block[1])
            yield TensorSpec(f"{name}_scale_inv", shape, scales, part, params_per_element=0)

    def _found(self, name: str, loadable: Sequence[str], published: StoredDtype) -> StoredDtype:
        found = self.stored.get(name)
        return cast("StoredDtype", found) if found in loadable else published

    @property
    def linear(self) -> StoredDtype:
        """The published dtype of projections and dense feed-forward matrices."""
        return "F8_E4M3" if self.block else self.plain

    @property
    def expert(self) -> StoredDtype:
        """The published dtype of expert matrices."""
        return "U8" if self.mxfp4_block else self.linear


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors of a checkpoint: of the main files, and what is used of the audio tokenizer's own file."""

    config: TextConfig
    num_mtp_layers: int
    main: tuple[TensorSpec, ...]
    audio_tokenizer: tuple[TensorSpec, ...]

    @property
    def num_params(self) -> int:
        """Parameters of the main files, scales not counted."""
        return sum(spec.num_params for spec in self.main)

    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one text token, counted as model cards do.

        The trunk with its embedding table and vocabulary projection; of the experts, those a token is given. Draft
        heads and towers are not counted.
        """
        by_part: dict[Part, int] = {}
        for spec in self.main:
            by_part[spec.part] = by_part.get(spec.part, 0) + spec.num_params
        always = sum(by_part.get(part, 0) for part in _ALWAYS_ACTIVE)
        # A tied table is used twice and is the same parameters.
        moe = self.config.moe
        chosen = 0 if moe is None else by_part.get("experts", 0) * moe.num_experts_per_token // moe.num_experts
        return always + chosen


def take_inventory(
    config_hf: Mapping[str, object],
    *,
    num_mtp_layers: int | None = None,
    audio_tokenizer_hf: Mapping[str, object] | None = None,
    qkv_layout: QkvRows = "interleaved",
    stored: Mapping[str, str] | None = None,
    stored_audio_tokenizer: Mapping[str, str] | None = None,
) -> Inventory:
    """Return the inventory of a `config.json`.

    `num_mtp_layers` None means `mtp_layers_of(config_hf)`. `qkv_layout` is how fused rows, and so their scales, lie;
    it is never guessed. Raises ConfigError or ValueError naming the key.
    """
    config = TextConfig.from_hf(config_hf)
    num_mtp_layers = mtp_layers_of(config_hf) if num_mtp_layers is None else num_mtp_layers
    if num_mtp_layers > MAX_MTP_LAYERS:
        raise ConfigError(f"{MTP_KEY}: {num_mtp_layers:,} draft heads, expected at most {MAX_MTP_LAYERS}")
    storage = replace(_storage(config_hf, config), interleaved=qkv_layout == "interleaved", stored=stored or {})
    tokenizer: list[TensorSpec] = []
    if audio_tokenizer_hf is not None:
        own = replace(storage, stored=stored_audio_tokenizer or {})
        specs = audio_tokenizer_tensors(AudioTokenizerConfig.from_hf(audio_tokenizer_hf))
        tokenizer = [own.vector(spec.name, spec.part, *spec.shape) for spec in specs]
    main = (*_text_tensors(config, storage, num_mtp_layers), *_tower_tensors(config_hf, storage, config.hidden_size))
    return Inventory(config, num_mtp_layers, main, tuple(tokenizer))


def mtp_layers_of(config_hf: Mapping[str, object]) -> int:
    """Return the number of draft heads: `num_mtp_layers` where a configuration has it, else what the family has."""
    given = ConfigKeys(config_hf).optional_integer(MTP_KEY)
    if given is None:
        return _FAMILY_MTP_LAYERS if config_hf.get("model_type") in _FAMILY else 0
    return given


def stored_mtp_layers(names: Iterable[str]) -> int:
    """Count the draft heads among tensor names. They are counted, not numbered: a name with a large number in it costs
    nothing, and a number left out shows as tensors missing."""
    return len({name.removeprefix(MTP_PREFIX).split(".")[0] for name in names if name.startswith(MTP_PREFIX)})


def _storage(config_hf: Mapping[str, object], config: TextConfig) -> Storage:
    keys = ConfigKeys(config_hf)
    named = [keys.one_of(key, (None, *_TORCH_DTYPES)) for key in ("torch_dtype", "dtype")]
    quantization = keys.section("quantization_config")
    ignored = (None if quantization is None else quantization.get("ignored_layers")) or ()
    if not isinstance(ignored, (list, tuple)) or not all(isinstance(name, str) for name in ignored):
        raise ConfigError(f"quantization_config.ignored_layers: expected a list of names, got {shown_value(ignored)}")
    return Storage(
        plain=_TORCH_DTYPES[named[0] or named[1] or "bfloat16"],
        block=config.quant_block,
        mxfp4_block=config.mxfp4_block,
        ignored=frozenset(ignored),
    )


def _text_tensors(config: TextConfig, storage: Storage, num_mtp_layers: int) -> Iterator[TensorSpec]:
    width = config.hidden_size
    yield from storage.matrix("model.embed_tokens.weight", "embedding", config.vocab_size, width)
    for layer in config.layers:
        prefix = f"model.layers.{layer.index}"
        attention: Part = "window_attention" if layer.is_window else "full_attention"
        yield storage.vector(f"{prefix}.input_layernorm.weight", "norms", width)
        yield from _attention(f"{prefix}.self_attn", attention, config, layer, storage)
        yield storage.vector(f"{prefix}.post_attention_layernorm.weight", "norms", width)
        if layer.is_moe and config.moe is not None:
            yield from _moe(f"{prefix}.mlp", width, config.moe, storage)
        else:
            sizes = config.intermediate_size, width
            yield from _swiglu(f"{prefix}.mlp", "dense_mlp", *sizes, storage=storage, published=storage.linear)
    yield storage.vector("model.norm.weight", "norms", width)
    if not config.tie_word_embeddings:
        yield from storage.matrix("lm_head.weight", "lm_head", config.vocab_size, width)
    for k in range(num_mtp_layers):
        prefix = f"{MTP_PREFIX}{k}"
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            yield storage.vector(f"{prefix}.{norm}.weight", "mtp", width)
        yield from storage.matrix(f"{prefix}.eh_proj.weight", "mtp", width, 2 * width)
        yield from _attention(f"{prefix}.self_attn", "mtp", config, config.mtp_layer(k), storage)
        sizes = config.intermediate_size, width
        yield from _swiglu(f"{prefix}.mlp", "mtp", *sizes, storage=storage, published=storage.linear)


def _attention(
    prefix: str, part: Part, config: TextConfig, layer: LayerConfig, storage: Storage
) -> Iterator[TensorSpec]:
    width = config.hidden_size
    if config.projection_layout == "fused_qkv":
        # Every kind of layer is stored in as many shards as full layers have KV heads.
        shards = config.num_qkv_shards if storage.interleaved else 1
        name, rows = f"{prefix}.qkv_proj.weight", sum(layer.qkv_rows)
        yield from storage.matrix(name, part, rows, width, published=storage.linear, num_shards=shards)
    else:
        for kind, rows in zip("qkv", layer.qkv_rows, strict=True):
            yield from storage.matrix(f"{prefix}.{kind}_proj.weight", part, rows, width, published=storage.linear)
    out_width = layer.num_heads * layer.v_dim
    yield from storage.matrix(f"{prefix}.o_proj.weight", part, width, out_width)
    if layer.has_sink:
        yield storage.vector(f"{prefix}.attention_sink_bias", part, layer.num_heads)


def _moe(prefix: str, width: int, moe: MoeConfig, storage: Storage) -> Iterator[TensorSpec]:
    # fp32 whatever the rest is: a rounded router chooses other experts.
    yield from storage.matrix(f"{prefix}.gate.weight", "router", moe.num_experts, width, published="F32")
    yield storage.vector(f"{prefix}.gate.e_score_correction_bias", "router", moe.num_experts, published="F32")
    for expert in range(moe.num_experts):
        name, sizes = f"{prefix}.experts.{expert}", (moe.intermediate_size, width)
        yield from _swiglu(name, "experts", *sizes, storage=storage, published=storage.expert)


def _swiglu(
    prefix: str, part: Part, inner: int, width: int, *, storage: Storage, published: StoredDtype
) -> Iterator[TensorSpec]:
    for kind, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
        yield from storage.matrix(f"{prefix}.{kind}_proj.weight", part, rows, columns, published=published)


def _tower_tensors(config_hf: Mapping[str, object], storage: Storage, width: int) -> Iterator[TensorSpec]:
    """`width` is that of the text model, which every tower's rows must have."""
    specs: list[TensorSpec] = []
    if vision := _section(config_hf, "vision_config"):
        merger_bias = "visual.merger.mlp.0.bias" in storage.stored
        tower = replace(VisionConfig.from_hf(vision), merger_bias=merger_bias)
        _require_width("vision_config", tower.out_hidden_size, width)
        specs += vision_tensors(tower, storage.plain)
    if audio := _section(config_hf, "audio_config"):
        encoder = AudioConfig.from_hf(audio)
        _require_width("audio_config", encoder.out_hidden_size, width)
        specs += audio_encoder_tensors(encoder, storage.plain)
    for spec in specs:
        yield storage.vector(spec.name, spec.part, *spec.shape)


def _require_width(section: str, found: int, width: int) -> None:
    if found != width:
        raise ConfigError(f"{section}.out_hidden_size: expected {width}, the hidden_size of the model, got {found}")


def _section(config_hf: Mapping[str, object], key: str) -> Mapping[str, object] | None:
    section = config_hf.get(key)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"{key}: expected an object or null, got {shown_value(section)}")
    return section or None
