"""Every attention backend that can be made here gives what the definition gives, over ragged batches of all kinds.

A batch is laid out in pages by hand: shuffled and not consecutive, whatever holds nothing is NaN, window pages begin
where the window of the first new token does, or later in a run that restores windows. `DenseAttention` over whole
sequences in fp32 is the truth. Afterwards the pages must hold the new tokens, and all else what it held before.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.config import Attention
from epd.kernels import paged_native
from epd.kernels.backends import AUTO, BACKENDS, make_backend
from epd.kernels.base import AttentionBackend, AttentionSpec, PagedSequence
from epd.kernels.reference import DenseAttention

# Largest difference from the fp32 truth of values of about one. With bf16 in and out, and scores that may be rounded
# to bf16 as well, one part in 256 of a score of four is the least one can ask.
TOLERANCE = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (4e-2, 4e-2)}
FULL, WINDOW = 0, 1


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of a batch: `num_new` tokens after `num_context`. `heals`: only windows are written, and earlier
    window pages are gone; its context is then rounded down to whole pages."""

    num_context: int
    num_new: int
    heals: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    items: Sequence[Item]
    page_size: int = 16
    window_left: int = 127
    num_heads: int = 4
    num_kv_heads: Mapping[int, int] = field(default_factory=lambda: {FULL: 2, WINDOW: 4})
    qk_dim: int = 48
    v_dim: int = 32
    has_sink: bool = True
    seed: int = 0

    def spec(self, index: int) -> AttentionSpec:
        return AttentionSpec(
            index=index,
            window_left=self.window_left if index == WINDOW else None,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads[index],
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            scale=self.qk_dim**-0.5,
        )


class Batch:
    """The pages, the new tokens and the true results of a case; also the storage that a backend reads."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        page_size = case.page_size
        self.contexts = [
            item.num_context // page_size * page_size if item.heals else item.num_context for item in case.items
        ]
        self.num_tokens = [context + item.num_new for context, item in zip(self.contexts, case.items, strict=True)]
        self.sink = torch.randn(case.num_heads, generator=self.generator) if case.has_sink else None
        self.specs = [case.spec(index) for index in (FULL, WINDOW)]
        self.data = [[self._qkv(spec, num, dtype) for num in self.num_tokens] for spec in self.specs]
        num_pages = sum(-(-num // page_size) for num in self.num_tokens)
        self._pages = [
            tuple(
                torch.full((num_pages + 3, page_size, spec.num_kv_heads, width), torch.nan, dtype=dtype)
                for width in (case.qk_dim, case.v_dim)
            )
            for spec in self.specs
        ]
        self._tables: dict[int, tuple[list[int], list[int]]] = {}
        self._window_start: dict[int, int] = {}
        free = [torch.randperm(num_pages + 3, generator=self.generator).tolist() for _ in self.specs]
        self.sequences = [self._place(i, free) for i in range(len(case.items))]
        self.expected_pages = [tuple(x.clone() for x in pools) for pools in self._pages]
        for i, item in enumerate(case.items):
            for index in (FULL, WINDOW):
                if index == WINDOW or not item.heals:
                    self._fill(self.expected_pages[index], index, i, self.contexts[i], self.num_tokens[i])

    def keys(self, layer_index: int) -> Tensor:
        return self._pages[layer_index][0]

    def values(self, layer_index: int) -> Tensor:
        return self._pages[layer_index][1]

    def new_tokens(self, index: int) -> list[Tensor]:
        """Queries, keys and values of the new tokens; those that must not be stored are junk."""
        parts: list[list[Tensor]] = [[], [], []]
        for i, item in enumerate(self.case.items):
            for j, part in enumerate(self.data[index][i]):
                is_junk = j > 0 and index == FULL and item.heals
                new = part[self.contexts[i] :]
                parts[j].append(torch.full_like(new, 7.0) if is_junk else new)
        return [torch.cat(part) for part in parts]

    def truth(self, index: int) -> Tensor:
        rows = []
        for i, item in enumerate(self.case.items):
            begin = self.contexts[i] if item.heals and index == WINDOW else 0
            q, k, v = (x[begin:].float() for x in self.data[index][i])
            out = DenseAttention([q.shape[0]]).attend(self.specs[index], q, k, v, self.sink)
            rows.append(out[-item.num_new :])
        return torch.cat(rows)

    def _qkv(self, spec: AttentionSpec, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = (spec.num_heads, spec.qk_dim), (spec.num_kv_heads, spec.qk_dim), (spec.num_kv_heads, spec.v_dim)
        return [torch.randn(num_tokens, *shape, generator=self.generator).to(dtype) for shape in shapes]

    def _place(self, i: int, free: list[list[int]]) -> PagedSequence:
        case, page_size, context = self.case, self.case.page_size, self.contexts[i]
        num_pages = -(-self.num_tokens[i] // page_size)
        heals = case.items[i].heals
        window_start = (context if heals else max(0, context - case.window_left)) // page_size
        self._tables[i] = tables = (
            [free[FULL].pop() for _ in range(num_pages)],
            [free[WINDOW].pop() for _ in range(num_pages - window_start)],
        )
        self._window_start[i] = window_start
        self._fill(self._pages[FULL], FULL, i, 0, self.num_tokens[i] if heals else context)
        self._fill(self._pages[WINDOW], WINDOW, i, window_start * page_size, context)
        return PagedSequence(
            num_new=case.items[i].num_new,
            num_context=context,
            full_pages=torch.tensor(tables[FULL]),
            window_pages=torch.tensor(tables[WINDOW]),
            window_start_page=window_start,
            write_full=not heals,
        )

    def _fill(self, pools: Sequence[Tensor], index: int, i: int, start: int, stop: int) -> None:
        """Write a sequence's tokens [start, stop) to where its pages hold them."""
        skipped = self._window_start[i] if index == WINDOW else 0
        position = torch.arange(start, stop)
        table = torch.tensor(self._tables[i][index])
        slots = table[position // self.case.page_size - skipped] * self.case.page_size + position % self.case.page_size
        for pool, part in zip(pools, self.data[index][i][1:], strict=True):
            pool.view(-1, *pool.shape[2:])[slots] = part[start:stop]


def backend_for(name: str, batch: Batch) -> AttentionBackend:
    try:
        return make_backend(name, batch, page_size=batch.case.page_size, device_type="cpu")
    except ValueError as error:
        pytest.skip(str(error))


def check(name: str, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Compare one forward with the truth; return what it gave."""
    batch = Batch(case, dtype)
    attention = backend_for(name, batch).context(batch.sequences)
    atol, rtol = TOLERANCE[dtype]
    outputs = []
    for index, spec in enumerate(batch.specs):
        sink = None if batch.sink is None else batch.sink.to(dtype)
        out = attention.attend(spec, *batch.new_tokens(index), sink)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), batch.truth(index), atol=atol, rtol=rtol)
        for pool, expected in zip((batch.keys(index), batch.values(index)), batch.expected_pages[index], strict=True):
            assert torch.equal(pool.nan_to_num(1e30), expected.nan_to_num(1e30))
        outputs.append(out)
    return outputs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from([1, 4, 16]))
    window_left = max(0, draw(st.integers(0, 4)) * page_size + draw(st.sampled_from([-1, 0, 1])))
    items = st.builds(
        Item,
        num_context=st.one_of(st.just(0), st.integers(0, 90), st.integers(250, 530)),
        num_new=st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 70)),
        heals=st.booleans(),
    )
    num_heads = draw(st.sampled_from([1, 2, 6, 8]))
    ratios = [ratio for ratio in (1, 2, 3, 8) if num_heads % ratio == 0]
    return Case(
        items=draw(st.lists(items, min_size=1, max_size=4)),
        page_size=page_size,
        window_left=window_left,
        num_heads=num_heads,
        num_kv_heads={index: num_heads // draw(st.sampled_from(ratios)) for index in (FULL, WINDOW)},
        qk_dim=draw(st.sampled_from([8, 24, 48, 64])),
        v_dim=draw(st.sampled_from([8, 32, 40])),
        has_sink=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
def test_ragged_batches(name: str, case: Case, dtype: torch.dtype) -> None:
    check(name, case, dtype)


DECODE = [Item(num_context, 1) for num_context in (0, 1, 126, 127, 128, 255, 256, 800)]
BATCHES = {
    "decode": DECODE,
    "drafts": [Item(256, 4), Item(1023, 3), Item(0, 8), Item(40, 2)],
    "prefill": [Item(0, 391)],
    "continued": [Item(51, 340), Item(512, 64)],
    "mixed": [Item(700, 1), Item(0, 130), Item(127, 1), Item(300, 65), Item(9, 3)],
    "healing": [Item(256, 128, heals=True), Item(600, 1), Item(512, 16, heals=True), Item(16, 5, heals=True)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", BACKENDS)
def test_batches_of_real_widths(name: str, batch: str, dtype: torch.dtype) -> None:
    check(name, Case(BATCHES[batch], num_kv_heads={FULL: 1, WINDOW: 2}, qk_dim=192, v_dim=128), dtype)


@pytest.mark.parametrize("batch", ["decode", "drafts", "mixed", "healing"])
def test_bits_do_not_depend_on_batch_mates_or_threads(batch: str) -> None:
    together = Batch(Case(BATCHES[batch]), torch.float32)
    backend = backend_for("cpu", together)
    threads = torch.get_num_threads()
    attention = backend.context(together.sequences)
    outputs = [attention.attend(spec, *together.new_tokens(spec.index), together.sink) for spec in together.specs]
    counts = [item.num_new for item in BATCHES[batch]]
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        for i, sequence in enumerate(together.sequences):
            alone = backend.context([sequence])
            for spec, out in zip(together.specs, outputs, strict=True):
                mine = [torch.split(x, counts)[i] for x in together.new_tokens(spec.index)]
                assert torch.equal(alone.attend(spec, *mine, together.sink), torch.split(out, counts)[i])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_may_be_wider_than_what_is_stored(name: str) -> None:
    batch = Batch(Case(BATCHES["mixed"]), torch.bfloat16)
    attention = backend_for(name, batch).context(batch.sequences)
    for spec in batch.specs:
        out = attention.attend(spec, *(x.float() for x in batch.new_tokens(spec.index)), batch.sink)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, batch.truth(spec.index), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_new", [1, 20])
def test_what_is_not_finite_shows(name: str, num_new: int) -> None:
    """A key or value that is not finite makes the result so: the engine tells a broken model by it."""
    for part in range(1, 3):
        batch = Batch(Case([Item(40, num_new), Item(33, 1)]), torch.float32)
        attention = backend_for(name, batch).context(batch.sequences)
        for spec in batch.specs:
            new = batch.new_tokens(spec.index)
            new[part][0] = torch.nan
            out = attention.attend(spec, *new, batch.sink)
            assert bool(out[:num_new].isnan().all())
            assert bool(out[num_new:].isfinite().all())


@pytest.mark.parametrize("name", BACKENDS)
def test_scores_far_below_zero(name: str) -> None:
    """Equal scores, however low, give the mean of the values, also with parts of the keys that a row does not see."""
    batch = Batch(Case([Item(254, 5), Item(510, 2), Item(256, 200)], window_left=300, has_sink=False), torch.float32)
    attention = backend_for(name, batch).context(batch.sequences)
    for spec in batch.specs:
        batch.keys(spec.index).fill_(-20.0)
        for q, k, _ in batch.data[spec.index]:
            q.fill_(1.0)
            k.fill_(-20.0)
        out = attention.attend(spec, *batch.new_tokens(spec.index), None)
        torch.testing.assert_close(out, batch.truth(spec.index), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", BACKENDS)
def test_refusals(name: str) -> None:
    batch = Batch(Case([Item(40, 3)], window_left=8, page_size=4), torch.float32)
    backend = backend_for(name, batch)
    with pytest.raises(ValueError, match="2 query rows for sequences of 3 new tokens"):
        backend.context(batch.sequences).attend(batch.specs[FULL], *(x[:2] for x in batch.new_tokens(FULL)), None)
    (sequence,) = batch.sequences
    gone = dataclasses.replace(sequence, window_pages=sequence.window_pages[1:], window_start_page=9)
    with pytest.raises(ValueError, match="position 40 sees window page 8, the sequence holds 9 and later"):
        backend.context([gone]).attend(batch.specs[WINDOW], *batch.new_tokens(WINDOW), None)


def test_auto_says_why_it_takes_less(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a compiler "auto" is plain torch, in the log with the reason, and "cpu" is refused with the same."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(paged_native, "_load", paged_native._load.__wrapped__)
    batch = Batch(Case([Item(0, 1)]), torch.float32)
    with caplog.at_level("INFO"):
        assert make_backend("auto", batch, page_size=16, device_type="cpu").name == "cpu-torch"
    assert "there is no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match=r"'cpu' cannot run on cpu here: there is no C\+\+ compiler"):
        make_backend("cpu", batch, page_size=16, device_type="cpu")


def test_auto_takes_the_kernel_for_pages_that_it_reads() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = Batch(Case([Item(0, 1)]), dtype)
        backend_for("cpu", batch)
        assert make_backend("auto", batch, page_size=16, device_type="cpu").name == "cpu"
    half = Batch(Case([Item(0, 1)]), torch.float16)
    assert make_backend("auto", half, page_size=16, device_type="cpu").name == "cpu-torch"


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    batch = Batch(Case([Item(0, 1)]), torch.float32)
    with pytest.raises(ValueError, match="'fast'; allowed: auto, reference, cpu, cpu-torch"):
        make_backend("fast", batch, page_size=16, device_type="cpu")


def test_the_settings_know_every_backend() -> None:
    assert set(get_args(Attention)) == {AUTO, *BACKENDS}
