"""The three plain attentions agree, in values and gradients, and each rule of the definition holds by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.kernels.base import AttentionSpec
from epd.kernels.reference import BatchedDenseAttention, DenseAttention, PagedAttention
from epd.model.config import LayerConfig
from tests.fakes.pages import PagedCache

NUM_HEADS, NUM_KV_HEADS, QK_DIM, V_DIM = 4, 2, 12, 8


def layer_of(window_left: int | None, *, index: int = 0) -> LayerConfig:
    return LayerConfig(
        index=index,
        is_window=window_left is not None,
        window_left=window_left,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        qk_dim=QK_DIM,
        v_dim=V_DIM,
        rope_theta=1e4,
        rotary_dim=4,
        has_sink=True,
        is_moe=False,
    )


def spec_of(window_left: int | None) -> AttentionSpec:
    return layer_of(window_left).attention


def random_qkv(num_tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (NUM_HEADS, QK_DIM), (NUM_KV_HEADS, QK_DIM), (NUM_KV_HEADS, V_DIM)
    q, k, v = (torch.randn(num_tokens, *shape, generator=generator) for shape in shapes)
    return q, k, v


SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])


def by_loops(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
    """The definition of one sequence's attention, one query and head at a time."""
    out = torch.zeros(q.shape[0], spec.num_heads, spec.v_dim)
    for i in range(q.shape[0]):
        first = 0 if spec.window_left is None else max(0, i - spec.window_left)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            weights = (k[first : i + 1, kv_head] @ q[i, head] * spec.scale).exp()
            total = weights.sum() + (0.0 if sink is None else sink[head].exp())
            out[i, head] = weights @ v[first : i + 1, kv_head] / total
    return out


@pytest.mark.parametrize("window_left", [None, 0, 3, 50])
@pytest.mark.parametrize("sink", [None, SINK])
def test_dense_is_the_definition(window_left: int | None, sink: Tensor | None) -> None:
    spec = spec_of(window_left)
    first, second = random_qkv(9), random_qkv(5, seed=1)
    joined = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    out = DenseAttention([9, 5]).attend(spec, joined[0], joined[1], joined[2], sink)
    expected = torch.cat([by_loops(spec, *first, sink), by_loops(spec, *second, sink)])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 37])
@pytest.mark.parametrize("window_left", [None, 0, 7])
@pytest.mark.parametrize("with_sink", [False, True])
def test_batched_equals_dense_with_gradients(length: int, window_left: int | None, with_sink: bool) -> None:
    spec = spec_of(window_left)
    results = []
    for attention in (DenseAttention([length] * 3), BatchedDenseAttention(3, length)):
        leaves = [x.requires_grad_() for x in random_qkv(3 * length)]
        sink = SINK.clone().requires_grad_() if with_sink else None
        out = attention.attend(spec, leaves[0], leaves[1], leaves[2], sink)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, *(x.grad for x in leaves), None if sink is None else sink.grad])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window_left", [0, 3, 6])
def test_window_edge(window_left: int) -> None:
    """A query depends on the key `window_left` before it and not on the one before that."""
    spec, i = spec_of(window_left), 9
    q, k, v = random_qkv(12)
    base = DenseAttention([12]).attend(spec, q, k, v, SINK)
    for distance, is_seen in ((window_left, True), (window_left + 1, False), (-1, False)):
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[i - distance] += 1
        changed_v[i - distance] += 1
        out = DenseAttention([12]).attend(spec, q, changed_k, changed_v, SINK)
        assert bool((out[i] != base[i]).any()) == is_seen


def test_sink_limits() -> None:
    q, k, v = random_qkv(12)
    spec = spec_of(4)
    plain = DenseAttention([12]).attend(spec, q, k, v, None)
    no_sink = DenseAttention([12]).attend(spec, q, k, v, torch.full((NUM_HEADS,), float("-inf")))
    large_sink = DenseAttention([12]).attend(spec, q, k, v, torch.full((NUM_HEADS,), 1e4))
    torch.testing.assert_close(no_sink, plain)
    assert float(large_sink.abs().max()) == 0.0


def test_sink_belongs_to_its_query_head_and_is_not_scaled() -> None:
    q, k, v = random_qkv(1)
    spec = spec_of(4)
    out = DenseAttention([1]).attend(spec, q, k, v, SINK)[0]
    for head in range(NUM_HEADS):
        score = (q[0, head] @ k[0, head // 2]) * spec.scale
        torch.testing.assert_close(out[head], v[0, head // 2] * (score - SINK[head]).sigmoid())


LAYERS = [layer_of(None), layer_of(5, index=1)]
LENGTHS = st.lists(st.lists(st.sampled_from([1, 1, 2, 4, 9, 30]), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(steps_of=LENGTHS, page_size=st.sampled_from([1, 4, 16]))
def test_paged_equals_dense_whatever_the_batch(steps_of: list[list[int]], page_size: int) -> None:
    """Sequences that grow by uneven steps, side by side, each give what they give alone and without a cache."""
    cache = PagedCache(LAYERS, page_size=page_size, num_pages=600)
    data = [random_qkv(sum(steps), seed=i) for i, steps in enumerate(steps_of)]
    for i in range(len(steps_of)):
        cache.admit(str(i))
    outputs: dict[tuple[int, int], list[Tensor]] = {(i, j): [] for i in range(len(steps_of)) for j in range(2)}
    for turn in range(max(len(steps) for steps in steps_of)):
        active = [i for i, steps in enumerate(steps_of) if turn < len(steps)]
        starts = [cache.num_tokens[str(i)] for i in active]
        counts = [steps_of[i][turn] for i in active]
        attention = cache.attention(*(cache.extend(str(i), n) for i, n in zip(active, counts, strict=True)))
        ranges = list(zip(active, starts, counts, strict=True))
        q, k, v = (torch.cat([data[i][part][s : s + n] for i, s, n in ranges]) for part in range(3))
        for j, layer in enumerate(LAYERS):
            out = attention.attend(layer.attention, q, k, v, SINK if j else None)
            for i, rows in zip(active, torch.split(out, counts), strict=True):
                outputs[i, j].append(rows)
    for (i, j), rows in outputs.items():
        expected = DenseAttention([sum(steps_of[i])]).attend(LAYERS[j].attention, *data[i], SINK if j else None)
        torch.testing.assert_close(torch.cat(rows), expected, atol=1e-5, rtol=1e-4)


def test_paged_long_prompt_in_query_blocks() -> None:
    """A chunk of more queries than are read together, after a context that is no multiple of anything."""
    cache = PagedCache(LAYERS, page_size=16, num_pages=40)
    q, k, v = random_qkv(391)
    cache.admit("a")
    parts: dict[int, list[Tensor]] = {0: [], 1: []}
    for start, stop in ((0, 51), (51, 391)):
        attention = cache.attention(cache.extend("a", stop - start))
        for j, layer in enumerate(LAYERS):
            parts[j].append(attention.attend(layer.attention, q[start:stop], k[start:stop], v[start:stop], SINK))
    for j, layer in enumerate(LAYERS):
        expected = DenseAttention([391]).attend(layer.attention, q, k, v, SINK)
        torch.testing.assert_close(torch.cat(parts[j]), expected, atol=1e-5, rtol=1e-4)


def test_paged_rounds_what_it_stores_and_nothing_else() -> None:
    cache = PagedCache(LAYERS, page_size=4, num_pages=10, dtype=torch.bfloat16)
    cache.admit("a")
    q, k, v = random_qkv(12)
    out = cache.attention(cache.extend("a", 12)).attend(LAYERS[1].attention, q, k, v, SINK)
    expected = DenseAttention([12]).attend(LAYERS[1].attention, q, k.bfloat16().float(), v.bfloat16().float(), SINK)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected)


def test_paged_leaves_full_pages_alone_when_told() -> None:
    cache = PagedCache(LAYERS, page_size=4, num_pages=10)
    cache.admit("a")
    q, k, v = random_qkv(12)
    first = cache.attention(cache.extend("a", 12))
    expected = [first.attend(layer.attention, q, k, v, None) for layer in LAYERS]
    kept = [cache.keys(0).clone(), cache.values(0).clone()]
    again = cache.sequence("a", num_new=8, num_context=4, write_full=False)
    attention = cache.attention(again)
    junk = torch.full_like(k[4:], 7.0)
    full = attention.attend(LAYERS[0].attention, q[4:], junk, torch.full_like(v[4:], 7.0), None)
    window = attention.attend(LAYERS[1].attention, q[4:], k[4:], v[4:], None)
    torch.testing.assert_close(full, expected[0][4:])
    torch.testing.assert_close(window, expected[1][4:])
    torch.testing.assert_close([cache.keys(0), cache.values(0)], kept, equal_nan=True)


def test_paged_refuses_a_window_that_is_gone() -> None:
    cache = PagedCache(LAYERS, page_size=4, num_pages=10)
    cache.admit("a")
    q, k, v = random_qkv(12)
    cache.extend("a", 12)
    cache.drop_window("a", fresh_from_page=2)
    attention = cache.attention(cache.sequence("a", num_new=4, num_context=8))
    with pytest.raises(ValueError, match="position 8 sees window page 0, the sequence holds 2 and later"):
        attention.attend(LAYERS[1].attention, q[8:], k[8:], v[8:], None)


def test_paged_refuses_other_row_counts() -> None:
    cache = PagedCache(LAYERS, page_size=4, num_pages=10)
    cache.admit("a")
    attention = PagedAttention([cache.extend("a", 3)], cache, page_size=4)
    with pytest.raises(ValueError, match="4 query rows for sequences of 3 new tokens"):
        attention.attend(LAYERS[0].attention, *random_qkv(4), None)
