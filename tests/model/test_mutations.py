"""The golden comparison has teeth: each of these mistakes, made in the real code, breaks it.

Every entry of `MUTATIONS` is one mistake a reader of the published model could make and no shape would betray. It is
made in the configuration, in the code or in the loaded model, and the comparison with the golden logits (tolerance and
greedy tokens) must then fail on a case named beside it. Nothing changed, the same harness agrees for all layouts.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epd.config import QkvLayout
from epd.kernels import reference
from epd.kernels.base import AttentionSpec
from epd.kernels.reference import DenseAttention
from epd.model import attention, mtp, weights
from epd.model.config import LayerConfig, TextConfig
from epd.model.hybrid import HybridModel
from epd.model.moe import DenseMlp, Moe
from epd.model.mtp import MtpHead
from epd.model.rope import Rotation
from epd.model.slots import FileSlot
from epd.model.weights import load_text_model
from tests.model.test_golden_mtp import expected_of as expected_of_head
from tests.oracles.golden_text import GOLDEN, TOLERANCE, compare

EXPECTED = {"split": "hf_bf16_wl127", "fused": "hf_bf16_wl127", "fp8": "hf_fp8_wl127"}
# Case 0 has 5 tokens and 16 answered ones; case 1 has 129, just past the window.
SHORT, PAST_WINDOW = 0, 1


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake: keys of `config.json`, a patch made before loading, or a change of the loaded model."""

    name: str
    config: Mapping[str, object] = field(default_factory=dict)
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    change: Callable[[HybridModel], None] | None = None
    qkv_layout: QkvLayout = "auto"
    folder: str = "fused"
    case: int = SHORT


def load(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HybridModel:
    """Load a golden checkpoint with the mistake made: the files themselves are the golden ones."""
    source = GOLDEN / mutation.folder
    for path in source.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | mutation.config))
    if mutation.patch is not None:
        mutation.patch(monkeypatch)
    model = load_text_model(tmp_path, qkv_layout=mutation.qkv_layout)
    if mutation.change is not None:
        with torch.no_grad():
            mutation.change(model)
    return model


# --- attention: rotation, window, sink, scale, head order


def rotate_interleaved(x_TNH: Tensor, table: Rotation) -> Tensor:
    """Pair channel 2j with 2j + 1."""
    cos, sin = table[0][:, None], table[1][:, None]
    turned, rest = torch.split(x_TNH, [2 * cos.shape[-1], x_TNH.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([pairs.flatten(-2), rest], dim=-1)


def rotate_across_the_head(x_TNH: Tensor, table: Rotation) -> Tensor:
    """Pair channel j with j + half the head, not with j + half the rotary width."""
    cos, sin = table[0][:, None], table[1][:, None]
    half, middle = cos.shape[-1], x_TNH.shape[-1] // 2
    out = x_TNH.clone()
    low, high = x_TNH[..., :half], x_TNH[..., middle : middle + half]
    out[..., :half] = low * cos - high * sin
    out[..., middle : middle + half] = high * cos + low * sin
    return out


def patch_rotate(rotate: Callable[[Tensor, Rotation], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(attention, "rotate", rotate)


def patch_scale_of_value_width(monkeypatch: pytest.MonkeyPatch) -> None:
    published = LayerConfig.attention.fget
    assert published is not None
    wrong = property(lambda layer: replace(published(layer), scale=layer.v_dim**-0.5))
    monkeypatch.setattr(LayerConfig, "attention", wrong)


def patch_chunked_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take `attention_chunk_size` at its word: a window layer sees its own chunk of 128 positions alone."""
    published = reference.visible_keys

    def visible(query: Tensor, key: Tensor, window_left: int | None) -> Tensor:
        seen = published(query, key, window_left)
        return seen if window_left is None else seen & (query[..., :, None] // 128 == key[..., None, :] // 128)

    monkeypatch.setattr(reference, "visible_keys", visible)


def patch_query_heads_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query head a reads KV head a modulo K, not a divided by the group size."""
    published = reference.softmax_attention

    def dealt(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sink: Tensor | None) -> Tensor:
        order = torch.arange(spec.num_heads).view(-1, spec.num_kv_heads).T.flatten()
        turned = published(spec, q[:, :, order], k, v, visible, None if sink is None else sink[order])
        return turned[:, :, order.argsort()]

    monkeypatch.setattr(reference, "softmax_attention", dealt)


def change_sinks(change: Callable[[Tensor, LayerConfig], Tensor | None]) -> Callable[[HybridModel], None]:
    def apply(model: HybridModel) -> None:
        for module in model.modules():
            if isinstance(module, attention.Attention) and module.sink is not None:
                wrong = change(module.sink, module.layer)
                module.sink = None if wrong is None else torch.nn.Parameter(wrong)

    return apply


# --- experts


def patch_route(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Choose as published; weigh by `change(scores, bias)`, renormalised as ever."""

    def route(self: Moe, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(hidden_TD)
        choice_TA = (scores + self.correction_bias).topk(self._config.num_experts_per_token, dim=-1).indices
        weight_TA = change(scores, self.correction_bias).gather(1, choice_TA)
        return choice_TA, weight_TA / weight_TA.sum(dim=-1, keepdim=True)

    return lambda monkeypatch: monkeypatch.setattr(Moe, "route", route)


def patch_softmax_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(self: Moe, hidden_TD: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden_TD, self.router).softmax(dim=-1)

    monkeypatch.setattr(Moe, "_scores", scores)


def forget_correction_bias(model: HybridModel) -> None:
    for module in model.modules():
        if isinstance(module, Moe):
            module.correction_bias.zero_()


def exchange_gate_and_up(model: HybridModel) -> None:
    for module in model.modules():
        if isinstance(module, DenseMlp | Moe):
            assert isinstance(module.gate_up, Tensor)
            gate, up = module.gate_up.data.chunk(2, dim=-2)
            module.gate_up.data = torch.cat([up, gate], dim=-2)


# --- files


def patch_scales_as_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay scale blocks over the fused matrix as if it were one, not anew at each shard."""

    def scale_rows(self: FileSlot, file_row: int, num_rows: int, *, rows: int, block_rows: int) -> Tensor:
        return torch.arange(file_row, file_row + num_rows) // block_rows

    monkeypatch.setattr(FileSlot, "scale_rows", scale_rows)


def patch_scales_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    published = weights.dequantize_fp8

    def dequantize(weight: Tensor, scale: Tensor, *, block_columns: int) -> Tensor:
        return published(weight, 1 / scale, block_columns=block_columns)

    monkeypatch.setattr(weights, "dequantize_fp8", dequantize)


def patch_shards_of_window_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take as many shards as window layers have KV heads, not as full layers have."""
    published = TextConfig.from_hf

    def from_hf(config: Mapping[str, object], window_left: int | None = None) -> TextConfig:
        read = published(config, window_left)
        return replace(read, num_qkv_shards=read.window_layer.num_kv_heads)

    monkeypatch.setattr(TextConfig, "from_hf", from_hf)


def tie_head(model: HybridModel) -> None:
    model.lm_head = model.embed_tokens


def norms_plus_one(model: HybridModel) -> None:
    for module in model.modules():
        if isinstance(module, attention.RMSNorm):
            module.weight += 1.0


MUTATIONS = [
    # files
    Mutation("shards read as plain rows", qkv_layout="plain"),
    Mutation("shards counted by window layers", patch=patch_shards_of_window_layers),
    Mutation("scales laid over one matrix", patch=patch_scales_as_one_matrix, folder="fp8"),
    Mutation("scales divide", patch=patch_scales_divide, folder="fp8"),
    Mutation("vocabulary head tied to the embedding", change=tie_head),
    # window
    Mutation("window one shorter", config={"sliding_window": 127, "sliding_window_size": 127}, case=PAST_WINDOW),
    Mutation("window one longer", config={"sliding_window": 129, "sliding_window_size": 129}, case=PAST_WINDOW),
    Mutation(
        "window one shorter, split",
        config={"sliding_window": 127, "sliding_window_size": 127},
        folder="split",
        case=PAST_WINDOW,
    ),
    Mutation(
        "window one longer, fp8",
        config={"sliding_window": 129, "sliding_window_size": 129},
        folder="fp8",
        case=PAST_WINDOW,
    ),
    Mutation("window in chunks", patch=patch_chunked_window, case=PAST_WINDOW),
    # sink
    Mutation("sink dropped", change=change_sinks(lambda sink, layer: None)),
    Mutation("sink scaled like a score", change=change_sinks(lambda sink, layer: sink * layer.qk_dim**-0.5)),
    Mutation("sink counted twice", change=change_sinks(lambda sink, layer: sink + math.log(2.0))),
    Mutation("sinks of other heads", change=change_sinks(lambda sink, layer: sink.roll(1))),
    # value scale
    Mutation("value scale dropped", config={"attention_value_scale": 1.0}),
    Mutation("value scale applied twice", config={"attention_value_scale": 0.707**2}),
    Mutation("value scale computed, not read", config={"attention_value_scale": (160 / (4 * 32)) ** 0.5}),
    # rotation
    Mutation("rotary width rounded up to the next even", config={"partial_rotary_factor": 18 / 48}),
    Mutation("rotary width rounded down to a multiple of four", config={"partial_rotary_factor": 12 / 48}),
    Mutation("all channels rotated", config={"partial_rotary_factor": 1.0}),
    Mutation("neighbouring channels paired", patch=patch_rotate(rotate_interleaved)),
    Mutation("channels paired across the head", patch=patch_rotate(rotate_across_the_head)),
    Mutation("no rotation", patch=patch_rotate(lambda x_TNH, table: x_TNH)),
    Mutation("bases of the layer kinds exchanged", config={"rope_theta": 10000, "swa_rope_theta": 10000000}),
    Mutation("one base for both kinds", config={"swa_rope_theta": 10000000}),
    Mutation("the other published full base", config={"rope_theta": 5000000}),
    # scores
    Mutation("scores scaled by the value width", patch=patch_scale_of_value_width),
    Mutation("query heads dealt out over KV heads", patch=patch_query_heads_dealt_out),
    # experts
    Mutation("correction bias in the weights", patch=patch_route(lambda scores, bias: scores + bias)),
    Mutation("experts weighed alike", patch=patch_route(lambda scores, bias: torch.ones_like(scores))),
    Mutation("correction bias forgotten", change=forget_correction_bias),
    Mutation("router in bf16", config={"moe_router_dtype": "bfloat16"}),
    Mutation("router scores by softmax", patch=patch_softmax_scores),
    Mutation("weights not renormalised", config={"norm_topk_prob": False}),
    Mutation("routed part scaled", config={"routed_scaling_factor": 0.5}),
    Mutation("one expert per token", config={"num_experts_per_tok": 1}),
    Mutation("gate and up exchanged", change=exchange_gate_and_up),
    # norms
    Mutation("norm weights count from one", change=norms_plus_one),
]

TOWER_EPSILON = Mutation("norm epsilon of the towers", config={"layernorm_epsilon": 1e-6})


@pytest.mark.parametrize("folder", EXPECTED)
@pytest.mark.parametrize("case", [SHORT, PAST_WINDOW])
def test_unchanged_code_agrees(folder: str, case: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = load(Mutation("nothing", folder=folder), monkeypatch, tmp_path)
    comparison = compare(model, EXPECTED[folder], case)
    assert comparison.agrees, comparison


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    comparison = compare(load(mutation, monkeypatch, tmp_path), EXPECTED[mutation.folder], mutation.case)
    assert math.isfinite(comparison.max_difference), "a mistake that crashes is none that this test is about"
    assert not comparison.agrees, comparison


@pytest.mark.parametrize(("mutation", "is_right"), [(Mutation("nothing"), True), (TOWER_EPSILON, False)])
def test_the_norm_epsilon_shows_in_small_activations(
    mutation: Mutation, is_right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In golden activations, which are large, an epsilon of 1e-6 moves logits by 1e-4 alone, inside the tolerance."""
    norm = load(mutation, monkeypatch, tmp_path).norm
    x = torch.randn(4, norm.weight.shape[0], generator=torch.Generator().manual_seed(0)) * 1e-3
    wanted = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    assert torch.allclose(norm(x), wanted, atol=1e-6, rtol=1e-4) == is_right


# --- draft heads


def patch_hidden_first(monkeypatch: pytest.MonkeyPatch) -> None:
    published = MtpHead.forward

    def forward(self: MtpHead, token: Tensor, hidden: Tensor, table: Rotation, context: DenseAttention) -> Tensor:
        width = token.shape[-1]
        rolled = torch.nn.Parameter(self.eh_proj.roll(width, dims=1))
        monkeypatch.setattr(self, "eh_proj", rolled)
        return published(self, token, hidden, table, context)

    monkeypatch.setattr(mtp.MtpHead, "forward", forward)


def exchange_input_norms(model: HybridModel) -> None:
    for head in model.mtp:
        assert isinstance(head, MtpHead)
        head.enorm, head.hnorm = head.hnorm, head.enorm


def no_final_norm(model: HybridModel) -> None:
    for head in model.mtp:
        assert isinstance(head, MtpHead)
        head.final_layernorm.weight.fill_(1.0)


HEAD_MUTATIONS = [
    Mutation("hidden state before the embedding", patch=patch_hidden_first),
    Mutation("norms of embedding and hidden state exchanged", change=exchange_input_norms),
    Mutation("final norm without its weight", change=no_final_norm),
    Mutation("sink dropped", change=change_sinks(lambda sink, layer: None)),
    Mutation("value scale dropped", config={"attention_value_scale": 1.0}),
    Mutation("rotated like a full layer", config={"swa_rope_theta": 10000000}),
    Mutation("shards read as plain rows", qkv_layout="plain"),
]


@torch.no_grad()
def head_difference(model: HybridModel, k: int, case: int) -> float:
    """The largest absolute difference of head k's golden logits, in one pass."""
    golden, cases = expected_of_head(k)
    ids, positions = golden[f"case{case}.token_ids"].long(), golden[f"case{case}.positions"].long()
    hidden = expected_of_head(0)[0][f"case{case}.hidden"]
    out = model.draft(k, model.embed(ids), hidden, positions, DenseAttention([len(ids)]))
    rows = golden[f"case{case}.logit_positions"].long() - cases[case]["first_row"]
    return float((model.logits(out[rows]) - golden[f"case{case}.logits"]).abs().max())


@pytest.mark.parametrize("mutation", [Mutation("nothing"), *HEAD_MUTATIONS], ids=lambda mutation: mutation.name)
def test_a_mistake_in_draft_heads_is_noticed(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load(mutation, monkeypatch, tmp_path)
    differences = [head_difference(model, k, SHORT) for k in range(3)]
    assert all(math.isfinite(difference) for difference in differences)
    assert all((difference <= TOLERANCE) == (mutation.name == "nothing") for difference in differences), differences
