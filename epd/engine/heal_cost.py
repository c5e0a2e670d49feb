"""What computing a prefix again costs and what healing it costs, in FLOPs from the model's geometry.

A row costs its projections and its feed-forward in every layer it passes (of routed experts those that are chosen), and
two products for every key it sees: all earlier tokens in a full layer, at most the reach in a window layer. Computing
[R, N) again takes all layers for all its rows. Healing to N takes a trapezoid (heal_rows.py): few rows, though some may
lie in front of R. Both end in the same state before token N, so the cheaper one is taken, and healing only when it
saves more than a page of tokens: it is a forward of its own, and computing leaves windows for others on its way.
"""

from dataclasses import dataclass

from epd.cache.prefix import PrefixHit
from epd.engine.heal_rows import first_rows
from epd.model.config import LayerConfig, TextConfig


@dataclass(frozen=True, slots=True)
class LayerCost:
    """FLOPs of one layer: `per_token` for each row, `per_key` for each key a row sees. `reach` None: sees all."""

    reach: int | None
    per_token: int
    per_key: int

    def of(self, start: int, stop: int) -> int:
        """Rows `[start, stop)` of a sequence."""
        return (stop - start) * self.per_token + (self._keys_before(stop) - self._keys_before(start)) * self.per_key

    def _keys_before(self, num_rows: int) -> int:
        """Keys that the first `num_rows` rows see together, each itself included."""
        most = num_rows if self.reach is None else min(num_rows, self.reach + 1)
        return most * (most + 1) // 2 + (num_rows - most) * most


@dataclass(frozen=True, slots=True)
class Resume:
    """Compute from `start` on; up to `heal_stop` only windows are restored. Equal when there is nothing to heal."""

    start: int
    heal_stop: int

    @property
    def heals(self) -> bool:
        return self.start < self.heal_stop


@dataclass(frozen=True, slots=True)
class HealCost:
    """The model as healing sees it."""

    layers: tuple[LayerCost, ...]
    page_size: int

    @property
    def reaches(self) -> tuple[int | None, ...]:
        return tuple(layer.reach for layer in self.layers)

    def compute(self, start: int, stop: int) -> int:
        """FLOPs of tokens `[start, stop)` through the whole trunk."""
        return sum(layer.of(start, stop) for layer in self.layers)

    def heal(self, stop: int) -> int:
        """FLOPs of making the windows before token `stop` whole."""
        rows = first_rows(self.reaches, stop, page_size=self.page_size)
        return sum(layer.of(first, stop) for layer, first in zip(self.layers, rows, strict=False))

    def resume(self, hit: PrefixHit) -> tuple[Resume, int]:
        """The way with less to compute, and what it costs up to where full pages reach, in tokens computed afresh."""
        usable, stop = hit.num_tokens, hit.num_full_only_tokens
        num_missing = stop - usable
        if num_missing > self.page_size:
            computing, healing = self.compute(usable, stop), self.heal(stop)
            num_tokens = -(-num_missing * healing // computing) + self.page_size
            rows = first_rows(self.reaches, stop, page_size=self.page_size)
            if rows and num_tokens < num_missing:
                return Resume(rows[0], stop), num_tokens
        return Resume(usable, usable), num_missing


def heal_cost(config: TextConfig, *, page_size: int) -> HealCost:
    """Geometry to FLOPs: two per weight and token, and per channel of a query-key or probability-value product."""
    return HealCost(tuple(_layer_cost(config, layer) for layer in config.layers), page_size)


def _layer_cost(config: TextConfig, layer: LayerConfig) -> LayerCost:
    width = config.hidden_size
    weights = width * sum(layer.qkv_rows) + width * layer.num_heads * layer.v_dim
    if layer.is_moe and config.moe is not None:
        moe = config.moe
        weights += 3 * width * moe.intermediate_size * moe.num_experts_per_token + width * moe.num_experts
    else:
        weights += 3 * width * config.intermediate_size
    return LayerCost(layer.window_left, 2 * weights, 2 * layer.num_heads * (layer.qk_dim + layer.v_dim))
