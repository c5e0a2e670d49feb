"""Decode through padded steps at fixed addresses: the same path as with CUDA graphs, computed instead of replayed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from epd.engine import graphs, worker
from epd.engine.graphs import Decoded, DecodeGraphs, GraphShapes, PlainRecorder, ScratchPages, graph_obstacle
from epd.engine.plan import DraftInput, MediaSlice, PageTable, SequenceStep
from epd.engine.sampler import SampleRow
from epd.kernels import cuda_experts, flex
from epd.kernels.backends import ReferenceBackend
from epd.kernels.cuda_decode import DecodeTables
from epd.kernels.cuda_plan import PageTables
from epd.kernels.cuda_sdpa import SdpaBackend
from epd.kernels.flex import FlexBackend
from epd.model import rope
from epd.model.hybrid import HybridModel
from epd.types import SamplingParams
from tests.engine.conftest import Checkpoint, MakeBench, make_request
from tests.fakes.guessing_model import guessing_model
from tests.fakes.pages import PagedCache
from tests.fakes.tiny_checkpoint import CHANGES, write_checkpoint
from tests.fakes.tiny_text import tiny_config
from tests.oracles.plain_generate import plain_generate

PAGE = 4
SAMPLE = SampleRow(SamplingParams(max_tokens=1), 0)


def decode_step(name: str, start: int, pages: PageTable, *, token_id: int = 7) -> SequenceStep:
    return SequenceStep(name, start, (token_id,), pages, sample=SAMPLE)


def page_table(cache: PagedCache, name: str) -> PageTable:
    sequence = cache.sequence(name, num_new=1, num_context=0)
    full, window = sequence.full_pages.tolist(), sequence.window_pages.tolist()
    return PageTable(tuple(full), tuple(window), sequence.window_start_page)


def make_cache(model: HybridModel, prompts: Sequence[int]) -> tuple[PagedCache, int]:
    """Sequences "0", "1", ... of these lengths, computed; and a page that belongs to none of them."""
    cache = PagedCache(list(model.config.layers), page_size=PAGE, num_pages=60)
    scratch = cache.spare_page()
    for i, length in enumerate(prompts):
        cache.admit(str(i))
        ids = torch.arange(length) % 100
        with torch.inference_mode():
            model(model.embed(ids), torch.arange(length), cache.attention(cache.extend(str(i), length)))
    return cache, scratch


def make_decode_graphs(model: HybridModel, cache: PagedCache, scratch: int, recorder: PlainRecorder) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        SdpaBackend(cache, page_size=PAGE),
        GraphShapes((1, 2, 4), (4, 8, 16)),
        ScratchPages(scratch, scratch),
        recorder,
        page_size=PAGE,
        device=torch.device("cpu"),
    )


def test_shapes() -> None:
    shapes = GraphShapes.up_to(12, 100)
    assert shapes == GraphShapes((1, 2, 4, 8, 12), (32, 64, 128))
    assert shapes.fit(3, 33) == (4, 64)
    assert shapes.fit(12, 128) == (12, 128)
    assert shapes.fit(13, 1) is None
    assert shapes.fit(1, 129) is None
    assert GraphShapes.up_to(1, 3) == GraphShapes((1,), (32,))
    assert GraphShapes.up_to(16, 10**6) == GraphShapes((1, 2, 4, 8, 16), (32, 64, 128, 256, 512, 1024, 2048, 4096))


@torch.inference_mode()
def test_padded_rows_change_nothing_but_the_scratch_page(checkpoint: Checkpoint) -> None:
    """Four rows, then three in the same shape with others before them, then two, while tables grow: logits are those
    of the ordinary way, and so is every page."""
    model = checkpoint.model
    prompts = [21, 23, 40, 10]
    plain, _ = make_cache(model, prompts)
    padded, scratch = make_cache(model, prompts)
    graphs = make_decode_graphs(model, padded, scratch, PlainRecorder())
    lengths = dict(enumerate(prompts))
    for turn in range(12):
        if turn in (4, 8):
            del lengths[0 if turn == 4 else 2]
        ids = {i: (13 * turn + i) % 100 for i in lengths}
        attention = plain.attention(*(plain.extend(str(i), 1) for i in lengths))
        positions = torch.tensor(list(lengths.values()))
        expected = model.logits(model(model.embed(torch.tensor(list(ids.values()))), positions, attention))
        steps = []
        for i, length in lengths.items():
            padded.extend(str(i), 1)
            steps.append(decode_step(str(i), length, page_table(padded, str(i)), token_id=ids[i]))
        decoded = graphs.run(steps)
        assert decoded is not None
        torch.testing.assert_close(decoded.logits, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(decoded.embed, model.embed(torch.tensor(list(ids.values()))))
        lengths = {i: length + 1 for i, length in lengths.items()}
    for layer in model.config.layers:
        for of_plain, of_padded in ((plain.keys, padded.keys), (plain.values, padded.values)):
            kept = of_padded(layer.index).clone()
            assert not bool(kept[scratch, 0].isnan().any())
            kept[scratch] = torch.nan
            torch.testing.assert_close(kept, of_plain(layer.index), atol=2e-5, rtol=1e-4, equal_nan=True)
    # Four rows of up to 16 pages, then two of up to 8 and of up to 16.
    assert graphs.num_recorded == 3


def test_other_steps_go_the_ordinary_way(checkpoint: Checkpoint) -> None:
    cache, scratch = make_cache(checkpoint.model, [5])
    graphs = make_decode_graphs(checkpoint.model, cache, scratch, PlainRecorder())
    pages = page_table(cache, "0")
    step = decode_step("0", 5, pages)
    media = MediaSlice(0, 1, 0, ref=None)  # type: ignore[arg-type]
    others = [
        SequenceStep("0", 5, (7, 8), pages, sample=SAMPLE),
        SequenceStep("0", 5, (7,), pages),
        SequenceStep("0", 5, (7,), pages, sample=SAMPLE, media=(media,)),
        SequenceStep("0", 5, (7,), pages, sample=SAMPLE, heal_stop=8),
        SequenceStep("0", 5, (7,), pages, sample=SAMPLE, draft=DraftInput(ahead=(3,))),
        decode_step("0", 16 * PAGE, PageTable(pages.full_pages * 20, pages.window_pages, 0)),
    ]
    for other in others:
        assert graphs.run([step, other]) is None
    assert graphs.run([step] * 5) is None
    assert graphs.num_recorded == 0


def test_what_cannot_be_recorded_is_said_once(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(PlainRecorder):
        def record(self, compute: Callable[[], Decoded]) -> Callable[[], Decoded]:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    cache, scratch = make_cache(checkpoint.model, [5])
    graphs = make_decode_graphs(checkpoint.model, cache, scratch, Refusing())
    step = decode_step("0", 5, page_table(cache, "0"))
    assert graphs.run([step]) is None
    assert graphs.run([step]) is None
    assert caplog.messages == [
        "CUDA graphs are off from here on: a step of 1 rows cannot be recorded: operation not permitted when stream is "
        "capturing"
    ]


def test_obstacles(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache(list(checkpoint.model.config.layers), page_size=PAGE, num_pages=2)
    sdpa = SdpaBackend(cache, page_size=PAGE)
    assert graph_obstacle(checkpoint.model, sdpa, max_rows=16) is None
    reference = ReferenceBackend(cache, page_size=PAGE)
    assert '"reference" has no decode of fixed shapes' in str(graph_obstacle(checkpoint.model, reference, max_rows=1))
    monkeypatch.setattr(cuda_experts, "_MAX_GATHERED_BYTES", 10)
    assert "32 token-expert pairs would copy" in str(graph_obstacle(checkpoint.model, sdpa, max_rows=16))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model whose draft heads are often right."""
    folder = tmp_path_factory.mktemp("drafting")
    return Checkpoint(folder, write_checkpoint(folder, guessing_model()))


@pytest.fixture
def _graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_has_graphs", lambda config, device: config.cuda_graphs)
    monkeypatch.setattr(graphs, "CudaRecorder", lambda device: PlainRecorder())


@pytest.mark.usefixtures("_graphs_on_cpu")
@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_an_engine_answers_alike(make_bench: MakeBench, drafting: Checkpoint, draft_tokens: int) -> None:
    """Requests that come and end at different times, sampled ones among them; then the same without graphs."""
    prompts = [[(5 * i * i + 31 * j) % 120 for i in range(3 + 14 * j)] for j in range(4)]

    def run(*, cuda_graphs: bool) -> tuple[dict[str, list[int]], int]:
        bench = make_bench(
            checkpoint=drafting,
            attention="sdpa",
            cuda_graphs=cuda_graphs,
            draft_tokens=draft_tokens,
            draft_max_batch_tokens=1000,
        )
        for j, prompt in enumerate(prompts):
            sampling: dict[str, object] = {"temperature": 0.8, "seed": j} if j % 2 else {}
            bench.submit(make_request(str(j), prompt, max_tokens=6 + 5 * j, ignore_eos=True, **sampling))
            bench.step()
        bench.run()
        bench.assert_nothing_leased()
        assert (bench.engine.scheduler.counters.accepted_tokens_1 > 0) == (draft_tokens > 0)
        recorded = bench.engine.loop._runner._graphs
        return bench.answers, 0 if recorded is None else recorded.num_recorded

    answers, num_recorded = run(cuda_graphs=True)
    assert num_recorded > 1
    assert run(cuda_graphs=False) == (answers, 0)
    for j in (0, 2):
        truth = plain_generate(drafting.model, prompts[j], SamplingParams(max_tokens=6 + 5 * j, ignore_eos=True))
        assert answers[str(j)] == truth


class _OnDevice(TorchDispatchMode):
    """Refuses operations on tensors of the host: in a recording they would be copies that it cannot hold."""

    supports_higher_order_operators = True

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, function, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_host = [each for each in tensors if each.device.type == "cpu" and each.dim() > 0]
        assert not on_host, f"{function} takes a tensor of the host"
        return function(*args, **kwargs)


class _Storage:
    """Pages of every layer."""

    def __init__(self, model: HybridModel, dtype: torch.dtype, device: torch.device) -> None:
        layers = [layer.attention for layer in model.config.layers]
        shapes = [
            ((40, 16, spec.num_kv_heads, spec.qk_dim), (40, 16, spec.num_kv_heads, spec.v_dim)) for spec in layers
        ]
        self._pages = [[torch.empty(shape, dtype=dtype, device=device) for shape in pair] for pair in shapes]

    def keys(self, layer_index: int) -> Tensor:
        return self._pages[layer_index][0]

    def values(self, layer_index: int) -> Tensor:
        return self._pages[layer_index][1]


@pytest.fixture
def _no_kept_rotations() -> Iterator[None]:
    rope._inverse_frequencies.cache_clear()
    yield
    rope._inverse_frequencies.cache_clear()


@pytest.mark.usefixtures("_no_kept_rotations")
@pytest.mark.parametrize(
    ("attention", "dtype", "capability"), [("sdpa", torch.bfloat16, (9, 0)), ("flex", torch.float32, (8, 0))]
)
def test_a_recorded_step_waits_for_nothing(
    attention: str, dtype: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors that only pretend to be on a GPU: to read one back, or a shape that depends on values, raises."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rope.rotation(torch.zeros(1, dtype=torch.int64), theta=1.0, rotary_dim=2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        device = torch.device("cuda")
        model = HybridModel(tiny_config(**CHANGES), dtype=dtype, device=device)
        ids, positions, starts = torch.zeros(3, 4, dtype=torch.int64, device=device)
        full, window = (torch.zeros(4, width, dtype=torch.int64, device=device) for width in (32, 3))
        storage = _Storage(model, dtype, device)
        backend: SdpaBackend | FlexBackend = SdpaBackend(storage, page_size=16)
        if attention == "flex":
            backend = FlexBackend(storage, page_size=16)
            backend.form = replace(flex.COMPILED, is_compiled=False)
            monkeypatch.setattr(backend, "_kernel", flex._uncompiled)
        decode = backend.static_decode(DecodeTables(PageTables(full, window, starts), positions))
        with torch.inference_mode():
            # Tables of the rotation are made once, before anything is recorded.
            model(model.embed(ids), positions, decode.context())
            with _OnDevice():
                hidden = model(model.embed(ids), positions, decode.context())
                logits = model.logits(hidden)
    assert tuple(logits.shape) == (4, 128)
