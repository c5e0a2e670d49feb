"""What every number of the towers' configurations may be, and reads that refuse the rest by name.

The limits are far beyond any published tower and keep what follows from a number (layers, tensors, bytes) countable.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from preprocess.ranges import Range, Real, Whole, shown_value

_WIDTH = Whole(1, 2**20)
_INNER = Whole(1, 2**24)
_HEADS = Whole(1, 2**14)
_HEAD_WIDTH = Whole(1, 2**16)
_LAYERS = Whole(1, 1000)
_VOCABULARY = Whole(1, 2**24)
_KERNEL = Whole(1, 255)
_THETA = Real(0, 1e15, above=True)
_SHARE = Real(0, 1, above=True)

VISION_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "depth": _LAYERS,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "qk_channels": _HEAD_WIDTH,
        "kv_channels": _HEAD_WIDTH,
        "out_hidden_size": _WIDTH,
        "visual_token_window_size": Whole(0, 2**20),
        "in_chans": _KERNEL,
        "in_channels": _KERNEL,
        "patch_size": _KERNEL,
        "temporal_patch_size": _KERNEL,
        "spatial_merge_size": Whole(2, 2),
        "vit_window_attn_types": Whole(-1, 1),
        "fullatt_block_indexes": Whole(0, 999),
    }
)
AUDIO_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "audio_channels": Whole(1, 1024),
        "group_size": Whole(1, 1024),
        "audio_segment_size": Whole(1, 10**7),
        "input_local_dim": _WIDTH,
        "input_local_layers": _LAYERS,
        "input_local_attn_heads": _HEADS,
        "input_local_head_dim": _HEAD_WIDTH,
        "input_local_intermediate_size": _INNER,
        "input_local_hidden_dropout": Real(0, 0),
        "out_hidden_size": _WIDTH,
        "speech_vocab_size": _VOCABULARY,
        "speech_zeroemb_idx": _VOCABULARY,
        "rope_theta": _THETA,
        "partial_rotary_factor": _SHARE,
        "projection_layers": Whole(1, 2),
    }
)
TOKENIZER_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "d_model": _WIDTH,
        "encoder_layers": _LAYERS,
        "encoder_attention_heads": _HEADS,
        "encoder_ffn_dim": _INNER,
        "encoder_skip_layer_id": _LAYERS,
        "encoder_attn_window_size": Whole(-1, 2**30),
        "swa_per_block": _LAYERS,
        "kernel_size": _KERNEL,
        "stride_size": _KERNEL,
        "avg_pooler": _KERNEL,
        "n_mels": Whole(1, 4096),
        "num_quantizers": Whole(1, 1024),
        "codebook_size": _VOCABULARY,
        "rope_theta": _THETA,
    }
)


class SectionKeys:
    """Typed reads of one tower's configuration. JSON null counts as absent. Failures are ValueErrors naming the key."""

    def __init__(self, config: Mapping[str, Any], ranges: Mapping[str, Range], owner: str) -> None:
        """`owner` is put before the key in messages."""
        self._config = config
        self._ranges = ranges
        self._owner = owner

    def integer(self, key: str, default: int | None = None) -> int:
        return cast("int", self._number(key, default))

    def number(self, key: str, default: float) -> float:
        return float(self._number(key, default))

    def optional_integer(self, key: str) -> int | None:
        return None if self._config.get(key) is None else self.integer(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def one_of(self, key: str, allowed: str) -> None:
        """Absent, or the one value that is implemented."""
        value = self._config.get(key)
        if value is not None and value != allowed:
            raise self.refusal(key, value, repr(allowed))

    def integers(self, key: str, default: list[int] | None = None, *, length: int | None = None) -> list[int]:
        value = default if self._config.get(key) is None else self._config[key]
        if value is None:
            raise ValueError(f"config lacks {self._owner}{key}")
        allowed = self._ranges[key]
        is_list = isinstance(value, (list, tuple)) and length in (None, len(value))
        if not is_list or any(entry not in allowed for entry in value):
            raise self.refusal(key, value, f"a list of {'' if length is None else f'{length}, each '}{allowed}")
        return list(value)

    def per_channel(self, key: str, count: int) -> tuple[int, ...]:
        """Sizes of `count` channels from an integer, text of them with dashes between, or a list; one stands for all.

        More than `count` are cut off.
        """
        value = self._config.get(key)
        if value is None:
            raise ValueError(f"config lacks {self._owner}{key}")
        if isinstance(value, str):
            entries: Any = [int(part) if part.isdecimal() and len(part) < 20 else part for part in value.split("-")]
        else:
            entries = value if isinstance(value, (list, tuple)) else [value]
        allowed = self._ranges[key]
        if not entries or any(entry not in allowed for entry in entries):
            raise self.refusal(key, value, f"{allowed}, or such numbers for {count} channels")
        sizes = tuple(entries) * (count if len(entries) == 1 else 1)
        if len(sizes) < count:
            raise ValueError(f"{self._owner}{key} lists {len(sizes)} sizes for {count} channels")
        return sizes[:count]

    def _number(self, key: str, default: float | None) -> float:
        value = self._config.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"config lacks {self._owner}{key}")
            return default
        if not isinstance(value, (int, float)) or value not in self._ranges[key]:
            raise self.refusal(key, value, self._ranges[key])
        return value

    def refusal(self, key: str, value: object, allowed: Range | str) -> ValueError:
        """What to raise about a value."""
        return ValueError(f"{self._owner}{key} is {shown_value(value)}; supported: {allowed}")
