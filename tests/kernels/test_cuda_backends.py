"""The backends written for CUDA, on a CPU: each gives what attention over whole sequences gives, from pages that are
NaN wherever nothing was written. Of FlashInfer a stand-in is run; flex_attention is not compiled, and its other form,
for CPUs, is in the suite of all backends."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epd.kernels import flashinfer, flex
from epd.kernels.backends import make_backend
from epd.kernels.base import AttentionBackend, AttentionSpec
from epd.kernels.cuda_decode import DecodeRow, DecodeTables, StaticDecodeBackend
from epd.kernels.cuda_plan import PageTables
from epd.kernels.cuda_sdpa import SdpaBackend
from epd.kernels.reference import DenseAttention
from epd.model.config import LayerConfig
from tests.fakes import flashinfer as stand_in
from tests.fakes.pages import PagedCache

REACH, PAGE = 21, 16
NUM_HEADS, NUM_KV_HEADS = 4, 2
FULL = LayerConfig(
    index=0,
    is_window=False,
    window_left=None,
    num_heads=NUM_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    qk_dim=128,
    v_dim=64,
    rope_theta=1e4,
    rotary_dim=4,
    has_sink=False,
    is_moe=False,
)
# A second window layer of other heads: geometries must not be taken for each other.
LAYERS = [
    FULL,
    replace(FULL, index=1, is_window=True, window_left=REACH, has_sink=True),
    replace(FULL, index=2, is_window=True, window_left=5, num_kv_heads=4, has_sink=True),
]
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
MakeBackend = Callable[[PagedCache], AttentionBackend]


@pytest.fixture
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in.module())
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 64)


def _flex_as_on_cuda(cache: PagedCache) -> AttentionBackend:
    """All that the compiled form does but the compiling: blocks of queries, over the whole pool in place."""
    # The uncompiled kernel multiplies by pages that the compiled one skips.
    cache.junk = 7.0
    for layer in LAYERS:
        cache.keys(layer.index).nan_to_num_(7.0)
        cache.values(layer.index).nan_to_num_(7.0)
    backend = flex.FlexBackend(cache, page_size=cache.page_size)
    backend.form = replace(flex.COMPILED, is_compiled=False)
    return backend


BACKENDS: dict[str, MakeBackend] = {
    "sdpa": lambda cache: SdpaBackend(cache, page_size=cache.page_size),
    "flex": _flex_as_on_cuda,
    "flashinfer": lambda cache: flashinfer.FlashInferBackend(cache, page_size=cache.page_size),
}
each_backend = pytest.mark.parametrize("name", list(BACKENDS))


def random_qkv(spec: AttentionSpec, num_tokens: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (spec.num_heads, spec.qk_dim), (spec.num_kv_heads, spec.qk_dim), (spec.num_kv_heads, spec.v_dim)
    q, k, v = (torch.randn(num_tokens, *shape, generator=generator).bfloat16() for shape in shapes)
    return q, k, v


def sink_of(layer: LayerConfig) -> Tensor | None:
    return SINK if layer.has_sink else None


def assert_like(actual: Tensor, expected: Tensor) -> None:
    """To bf16 rounding of sums of a few dozen terms."""
    torch.testing.assert_close(actual.float(), expected.float(), atol=2e-2, rtol=2e-2)


def expected_of(data: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]], name: int, layer: LayerConfig) -> Tensor:
    q, k, v = (x.float() for x in data[name, layer.index])
    return DenseAttention([q.shape[0]]).attend(layer.attention, q, k, v, sink_of(layer))


@each_backend
@pytest.mark.usefixtures("_flashinfer")
def test_sequences_that_grow_side_by_side(name: str) -> None:
    """Chunks and single tokens in one forward, in every layer what they give alone and without pages."""
    steps_of = [[40, 1, 1, 9], [3, 1, 30], [1, 1, 1, 1], [17, 2]]
    cache = PagedCache(LAYERS, page_size=PAGE, num_pages=24, dtype=torch.bfloat16)
    backend = BACKENDS[name](cache)
    data = {
        (i, layer.index): random_qkv(layer.attention, sum(steps), seed=10 * i + layer.index)
        for i, steps in enumerate(steps_of)
        for layer in LAYERS
    }
    for i in range(len(steps_of)):
        cache.admit(str(i))
    for turn in range(4):
        active = [i for i, steps in enumerate(steps_of) if turn < len(steps)]
        ranges = [(i, cache.num_tokens[str(i)], cache.num_tokens[str(i)] + steps_of[i][turn]) for i in active]
        attention = backend.context([cache.extend(str(i), stop - start) for i, start, stop in ranges])
        for layer in LAYERS:
            q, k, v = (torch.cat([data[i, layer.index][x][a:b] for i, a, b in ranges]) for x in range(3))
            out = attention.attend(layer.attention, q, k, v, sink_of(layer))
            assert out.dtype == torch.bfloat16
            expected = torch.cat([expected_of(data, i, layer)[a:b] for i, a, b in ranges])
            assert_like(out, expected)


@each_backend
@pytest.mark.usefixtures("_flashinfer")
def test_decode_of_a_fixed_shape(name: str) -> None:
    """The same tables overwritten between runs, rows of a scratch page among them, give what contexts give."""
    prompts, num_rows, num_pages = [37, 5, 16], 4, 6
    cache = PagedCache(LAYERS, page_size=PAGE, num_pages=20, dtype=torch.bfloat16)
    backend = BACKENDS[name](cache)
    assert isinstance(backend, StaticDecodeBackend)
    scratch = cache.spare_page()
    data = {
        (i, layer.index): random_qkv(layer.attention, prompt + 3, seed=10 * i + layer.index)
        for i, prompt in enumerate(prompts)
        for layer in LAYERS
    }
    for i in range(len(prompts)):
        cache.admit(str(i))
    attention = backend.context([cache.extend(str(i), prompt) for i, prompt in enumerate(prompts)])
    for layer in LAYERS:
        q, k, v = (torch.cat([data[i, layer.index][x][:p] for i, p in enumerate(prompts)]) for x in range(3))
        attention.attend(layer.attention, q, k, v, sink_of(layer))
    tables = DecodeTables(
        PageTables(
            torch.full((num_rows, num_pages), scratch),
            torch.full((num_rows, REACH // PAGE + 2), scratch),
            torch.zeros(num_rows, dtype=torch.int64),
        ),
        position=torch.zeros(num_rows, dtype=torch.int64),
    )
    decode = backend.static_decode(tables)
    for turn in range(3):
        rows = []
        for i, prompt in enumerate(prompts):
            sequence = cache.extend(str(i), 1)
            tables.position[i] = prompt + turn
            tables.pages.full[i, : len(sequence.full_pages)] = sequence.full_pages
            tables.pages.window[i, : len(sequence.window_pages)] = sequence.window_pages
            tables.pages.window_start[i] = sequence.window_start_page
            rows.append(DecodeRow(prompt + turn + 1, sequence.window_start_page))
        decode.prepare([*rows, DecodeRow(1, 0)])
        attention = decode.context()
        for layer in LAYERS:
            token = [[data[i, layer.index][x][p + turn] for i, p in enumerate(prompts)] for x in range(3)]
            q, k, v = (torch.stack([*part, part[0]]) for part in token)
            out = attention.attend(layer.attention, q, k, v, sink_of(layer))
            expected = torch.stack([expected_of(data, i, layer)[p + turn] for i, p in enumerate(prompts)])
            assert_like(out[:3], expected)
            assert bool(out.isfinite().all())


@each_backend
@pytest.mark.usefixtures("_flashinfer")
def test_refusals(name: str) -> None:
    cache = PagedCache(LAYERS, page_size=PAGE, num_pages=10, dtype=torch.bfloat16)
    backend = BACKENDS[name](cache)
    cache.admit("a")
    q, k, v = random_qkv(LAYERS[1].attention, 40, seed=0)
    attention = backend.context([cache.extend("a", 40)])
    with pytest.raises(ValueError, match="39 query rows for sequences of 40 new tokens together"):
        attention.attend(LAYERS[1].attention, q[1:], k[1:], v[1:], SINK)
    cache.drop_window("a", fresh_from_page=2)
    attention = backend.context([cache.sequence("a", num_new=8, num_context=32)])
    with pytest.raises(ValueError, match="position 32 sees window page 0, the sequence holds 2 and later"):
        attention.attend(LAYERS[1].attention, q[:8], k[:8], v[:8], SINK)


@each_backend
@pytest.mark.usefixtures("_flashinfer")
def test_full_pages_are_left_alone_when_told(name: str) -> None:
    cache = PagedCache(LAYERS, page_size=PAGE, num_pages=10, dtype=torch.bfloat16)
    backend = BACKENDS[name](cache)
    cache.admit("a")
    full, window = LAYERS[:2]
    qkv = {layer.index: random_qkv(layer.attention, 40, seed=layer.index) for layer in LAYERS}
    first = backend.context([cache.extend("a", 40)])
    for layer in (full, window):
        first.attend(layer.attention, *qkv[layer.index], sink_of(layer))
    kept = cache.keys(0).clone()
    cache.drop_window("a", fresh_from_page=1)
    again = backend.context([cache.sequence("a", num_new=24, num_context=16, write_full=False)])
    q, k, v = (x[16:] for x in qkv[0])
    out = again.attend(full.attention, q, torch.full_like(k, 9), torch.full_like(v, 9), None)
    assert_like(out, expected_of({(0, 0): qkv[0]}, 0, full)[16:])
    torch.testing.assert_close(cache.keys(0), kept, equal_nan=True)
    # Windows begin anew: the first tokens see a shorter one, as if the sequence began there.
    q, k, v = (x[16:] for x in qkv[1])
    out = again.attend(window.attention, q, k, v, SINK)
    assert_like(out, expected_of({(0, 1): (q, k, v)}, 0, window))


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_flex_lists_the_pages_that_are_seen_and_no_others(layer: LayerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel looks nowhere else; the uncompiled one does not look at the lists."""
    masks: list[flex.flex.BlockMask] = []

    def spy(*operands: Tensor, block_mask: flex.flex.BlockMask, **options: object) -> object:
        masks.append(block_mask)
        return flex._uncompiled(*operands, block_mask=block_mask, **options)

    cache = PagedCache(LAYERS, page_size=PAGE, num_pages=40, dtype=torch.bfloat16)
    backend = _flex_as_on_cuda(cache)
    monkeypatch.setattr(backend, "_kernel", spy)
    for name, lengths in {"a": (40, 1), "b": (150, 70), "c": (16, 1), "d": (15, 1)}.items():
        cache.admit(name)
        cache.extend(name, lengths[0])
    attention = backend.context(
        [cache.extend(name, num_new) for name, num_new in zip("abcd", (1, 70, 1, 1), strict=True)]
    )
    attention.attend(layer.attention, *random_qkv(layer.attention, 73, seed=0), None)
    assert [mask.seq_lengths[0] for mask in masks].count(1) >= 1
    for mask in masks:
        chunks, queries, places = (torch.arange(n) for n in (mask.kv_num_blocks.shape[0], *mask.seq_lengths))
        none = torch.zeros(1, dtype=torch.int64)
        seen = mask.mask_mod(chunks[:, None, None], none, queries[:, None], places)
        pages = [set(row.nonzero().flatten().tolist()) for row in torch.unflatten(seen, 2, (-1, PAGE)).any(-1).any(1)]
        counts = mask.kv_num_blocks[:, 0, 0].tolist()
        listed = [row[:count] for row, count in zip(mask.kv_indices[:, 0, 0].tolist(), counts, strict=True)]
        assert [set(row) for row in listed] == pages
        assert counts == [len(row) for row in pages]


def test_flex_is_compiled_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for CUDA, though run without a compiler: other batches, lengths and tables are no new form of it."""
    monkeypatch.setattr(torch.fx.experimental._config, "use_duck_shape", torch.fx.experimental._config.use_duck_shape)
    num_traced = 0

    def count(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        nonlocal num_traced
        num_traced += 1
        return graph.forward

    compile_as_on_cuda = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_as_on_cuda(function, backend=count, **how))
    cache = PagedCache([FULL], page_size=PAGE, num_pages=40, dtype=torch.bfloat16)
    for pages in (cache.keys(0), cache.values(0)):
        pages.zero_()
    backend = flex.FlexBackend(cache, page_size=PAGE)
    backend.form = flex.COMPILED
    monkeypatch.setattr(backend, "_kernel", flex._compiled())
    for name, length in {"a": 40, "b": 3, "c": 90, "d": 15}.items():
        cache.admit(name)
        cache.extend(name, length)
    with torch.inference_mode():
        for names in ("ab", "abcd", "bcd", "cd"):
            attention = backend.context([cache.extend(name, 1) for name in names])
            attention.attend(FULL.attention, *random_qkv(FULL.attention, len(names), seed=0), None)
    assert num_traced == 1


@pytest.mark.usefixtures("_flashinfer")
def test_flashinfer_plans_each_geometry_once_per_forward() -> None:
    cache = PagedCache([*LAYERS, replace(FULL, index=3)], page_size=PAGE, num_pages=10, dtype=torch.bfloat16)
    backend = BACKENDS["flashinfer"](cache)
    cache.admit("a")
    before = stand_in.BatchPrefillWithPagedKVCacheWrapper.num_plans
    attention = backend.context([cache.extend("a", 4)])
    for layer in (LAYERS[0], LAYERS[1], LAYERS[2], replace(FULL, index=3)):
        attention.attend(layer.attention, *random_qkv(layer.attention, 4, seed=0), sink_of(layer))
    assert stand_in.BatchPrefillWithPagedKVCacheWrapper.num_plans - before == 3


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.float32, "keys and values are float32, it takes float16 and bfloat16"),
        ({"qk_dim": 48}, torch.bfloat16, "heads are 48 and 64 wide, it takes multiples of 64 up to 256"),
        ({"v_dim": 320}, torch.bfloat16, "heads are 128 and 320 wide"),
    ],
)
@pytest.mark.usefixtures("_flashinfer")
def test_flashinfer_names_what_it_cannot_do(changes: dict[str, int], dtype: torch.dtype, reason: str) -> None:
    cache = PagedCache([FULL, replace(FULL, index=1, **changes)], page_size=PAGE, num_pages=2, dtype=dtype)
    with pytest.raises(ValueError, match=reason):
        flashinfer.FlashInferBackend(cache, page_size=PAGE)


@pytest.mark.usefixtures("_flashinfer")
def test_flashinfer_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache([FULL], page_size=PAGE, num_pages=2, dtype=torch.bfloat16)
    assert flashinfer.obstacle(cache) is None
    monkeypatch.delattr(stand_in.BatchPrefillWithPagedKVCacheWrapper, "prewarm_paged_kv_stride_variant")
    assert "keys are 128 wide and values 64; this version of it" in str(flashinfer.obstacle(cache))
    same = PagedCache([replace(FULL, v_dim=128)], page_size=PAGE, num_pages=2, dtype=torch.bfloat16)
    assert flashinfer.obstacle(same) is None
    monkeypatch.delattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper")
    assert "has no BatchPrefillWithPagedKVCacheWrapper" in str(flashinfer.obstacle(cache))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "the package flashinfer-python does not load" in str(flashinfer.obstacle(cache))


@pytest.mark.usefixtures("_flashinfer")
def test_auto_says_once_what_it_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epd.kernels.backends")
    cache = PagedCache([FULL], page_size=PAGE, num_pages=2, dtype=torch.bfloat16)
    assert make_backend("auto", cache, page_size=PAGE, device_type="cuda").name == "flashinfer"
    assert caplog.messages == []
    narrow = PagedCache([replace(FULL, v_dim=32)], page_size=PAGE, num_pages=2, dtype=torch.bfloat16)
    assert make_backend("auto", narrow, page_size=PAGE, device_type="cuda").name == "flex"
    assert len(caplog.messages) == 1
    assert 'attention: "flex", since "flashinfer" cannot: heads are 128 and 32 wide' in caplog.messages[0]
    with pytest.raises(ValueError, match="cannot run on cuda here: heads are 128 and 32 wide"):
        make_backend("flashinfer", narrow, page_size=PAGE, device_type="cuda")
    with pytest.raises(ValueError, match="cannot run on cpu here: it runs on CUDA devices only"):
        make_backend("flashinfer", cache, page_size=PAGE, device_type="cpu")


def test_flex_tries_every_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache(LAYERS, page_size=PAGE, num_pages=2, dtype=torch.bfloat16)
    assert flex.compile_obstacle(cache, page_size=PAGE) is None
    assert "pages of 12 tokens" in str(flex.compile_obstacle(cache, page_size=12))
    tried = []

    def fails(q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
        tried.append((k.shape[1], k.shape[3], v.shape[3]))
        if k.shape[1] == 4:
            raise RuntimeError("out of\n shared memory")

    monkeypatch.setattr(flex, "_uncompiled", fails)
    with pytest.raises(TypeError):
        flex.compile_obstacle(cache, page_size=PAGE)
    tried.clear()
    only = PagedCache([replace(LAYERS[2], index=0)], page_size=PAGE, num_pages=2, dtype=torch.bfloat16)
    assert flex.compile_obstacle(only, page_size=PAGE) == "flex_attention does not compile here: out of shared memory"
    assert tried == [(4, 128, 64)]
