"""The backend "flex": `flex_attention` over the pages where they are, by a block mask made of the page tables.

Keys and values are not gathered: a block of the mask is a page, and a mask function turns places in the pool back into
positions. Sinks come in afterwards, through the log-sum-exp that the kernel returns. On CUDA the kernel is compiled;
on a CPU it runs uncompiled, over copies of the pages, which is for checking and not for speed. Written for CUDA; so far
it has run on CPUs alone, uncompiled.

Shape letters: T new tokens; B sequences; M pages of the pool; C chunks of a read; Q queries of a chunk; N query heads;
K KV heads; H query/key width; V value width; P tokens per page; J pages that a chunk sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from epd.kernels.base import AttentionSpec, KvStorage, PagedSequence
from epd.kernels.cuda_decode import DecodeRow, DecodeTables, StaticDecode
from epd.kernels.cuda_plan import DecodePlan, ForwardPlan, PageTables, Plan, Read, ReadLimits, store

# Queries of a block of the mask. Where the kernel is compiled, chunks of more than one query are padded to it: it meets
# two query counts and no others.
_QUERY_BLOCK = 128
# What Triton's matrix product takes.
_MIN_PAGE = 16
# Forms of the kernel: with a window or without, one query or a block, geometries, and one row or page apart from more.
_MAX_FORMS = 64

Kernel = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernel is run: compiled or not, over the whole pool in place or over copies of the pages it reads."""

    is_compiled: bool
    is_in_place: bool
    limits: ReadLimits


COMPILED = Form(True, True, ReadLimits(max_queries=_QUERY_BLOCK, max_scores=1 << 26, pads_queries=True))
PLAIN = Form(False, False, ReadLimits(max_queries=_QUERY_BLOCK, max_scores=1 << 20))


@torch.inference_mode()
def compile_obstacle(storage: KvStorage, *, page_size: int) -> str | None:
    """Why the compiled kernel cannot serve this storage, None where it can: tries it once for each kind of layer."""
    if page_size < _MIN_PAGE or page_size & (page_size - 1):
        return f"pages of {page_size} tokens; the compiled kernel takes powers of two from {_MIN_PAGE} on"
    for keys, values in _kinds(storage):
        num_kv_heads, qk_dim, v_dim = keys.shape[2], keys.shape[3], values.shape[3]
        spec = AttentionSpec(0, None, num_kv_heads, num_kv_heads, qk_dim, v_dim, 1.0)
        page = torch.zeros(1, dtype=torch.int64, device=keys.device)
        backend = FlexBackend(_OneLayer(torch.zeros_like(keys[:1]), torch.zeros_like(values[:1])), page_size=page_size)
        q_TNH, v_TKV = keys.new_zeros(1, num_kv_heads, qk_dim), keys.new_zeros(1, num_kv_heads, v_dim)
        try:
            backend.context([PagedSequence(1, 0, page, page)]).attend(spec, q_TNH, q_TNH, v_TKV, None)
        except (RuntimeError, NotImplementedError, ImportError) as error:
            return f"flex_attention does not compile here: {' '.join(str(error).split())[:300]}"
    return None


class FlexBackend:
    """See the module. One per worker."""

    name = "flex"

    def __init__(self, storage: KvStorage, *, page_size: int) -> None:
        self._storage = storage
        self._page_size = page_size
        self.form = COMPILED if storage.keys(0).device.type == "cuda" else PLAIN
        self._kernel = _compiled() if self.form.is_compiled else _uncompiled

    def context(self, sequences: Sequence[PagedSequence]) -> FlexContext:
        """See `AttentionBackend`."""
        plan = ForwardPlan(sequences, page_size=self._page_size, limits=self.form.limits)
        return FlexContext(plan, self._storage, self._kernel, self.form, page_size=self._page_size)

    def static_decode(self, tables: DecodeTables) -> StaticDecode:
        """See `StaticDecodeBackend`: all of the plan is tensors, there is nothing to prepare on the host."""
        return _FlexDecode(self._storage, self._kernel, self.form, tables, page_size=self._page_size)


class _FlexDecode:
    def __init__(self, storage: KvStorage, kernel: Kernel, form: Form, tables: DecodeTables, *, page_size: int) -> None:
        self._storage, self._kernel, self._form = storage, kernel, form
        self._tables, self._page_size = tables, page_size

    def prepare(self, rows_B: Sequence[DecodeRow]) -> None:
        pass

    def context(self) -> FlexContext:
        plan = DecodePlan(self._tables.pages, self._tables.position, page_size=self._page_size)
        return FlexContext(plan, self._storage, self._kernel, self._form, page_size=self._page_size)


class _OneLayer:
    """Pages of one layer, for a trial."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def keys(self, layer_index: int) -> Tensor:
        return self._keys

    def values(self, layer_index: int) -> Tensor:
        return self._values


@dataclass(frozen=True, slots=True)
class _View:
    """What the kernel is given for one read: keys [1 or C, K, places, H], values alike, and the mask over places."""

    keys: Tensor
    values: Tensor
    mask: flex.BlockMask


class _InPlace:
    """The pages of the pools where they are: places are the pool's.

    A table of the sequences' logical pages by page of the pool turns places into positions.
    """

    def __init__(self, plan: Plan, page_size: int) -> None:
        self._plan = plan
        self._page_size = page_size
        self._logical_BM: dict[bool, Tensor] = {}
        self._masks: dict[int | None, list[flex.BlockMask]] = {}

    def views(self, spec: AttentionSpec, keys: Tensor, values: Tensor) -> list[_View]:
        """Return a view per read. Makes the ends of the newest pages finite first."""
        self._clean_tails(values, is_window=spec.is_window)
        k_1KSH, v_1KSV = (pages.view(1, -1, *pages.shape[2:]).transpose(1, 2) for pages in (keys, values))
        if spec.window_left not in self._masks:
            reads = self._plan.reads(spec.window_left)
            self._masks[spec.window_left] = [self._mask(read, spec.window_left, keys.shape[0]) for read in reads]
        return [_View(k_1KSH, v_1KSV, mask) for mask in self._masks[spec.window_left]]

    def _clean_tails(self, values: Tensor, *, is_window: bool) -> None:
        """What the newest pages hold beyond the newest tokens may be anything, and the kernel weighs it with zero."""
        last_B = self._plan.last_position()
        sequence_B = torch.arange(last_B.shape[0], device=last_B.device)
        page_B = self._plan.tables.pages(sequence_B, last_B // self._page_size, is_window=is_window)
        is_tail_BP = torch.arange(self._page_size, device=last_B.device) > (last_B % self._page_size)[:, None]
        page_BPKV = values.index_select(0, page_B)
        finite_BPKV = page_BPKV.nan_to_num(posinf=0.0, neginf=0.0)
        values.index_copy_(0, page_B, torch.where(is_tail_BP[:, :, None, None], finite_BPKV, page_BPKV))

    def _mask(self, read: Read, window_left: int | None, num_pages: int) -> flex.BlockMask:
        page_CJ, num_pages_C = _pages_of(read, self._plan.tables, window_left, self._page_size)
        logical_CM = self._logical_pages(num_pages, is_window=window_left is not None)
        sequence_C, page_size = read.sequence, self._page_size

        def position(chunk: Tensor, place: Tensor) -> Tensor:
            return logical_CM[sequence_C[chunk], place // page_size] * page_size + place % page_size

        return _block_mask(read, window_left, page_CJ, num_pages_C, position, num_pages, page_size)

    def _logical_pages(self, num_pages: int, *, is_window: bool) -> Tensor:
        """Return the logical page that each page of the pool is in each sequence, [B, M + 1], negative if in none."""
        if is_window not in self._logical_BM:
            tables, last_page_B = self._plan.tables, self._plan.last_position() // self._page_size
            row_BJ = tables.window if is_window else tables.full
            first_B = tables.window_start if is_window else torch.zeros_like(last_page_B)
            logical_BJ = first_B[:, None] + torch.arange(row_BJ.shape[1], device=row_BJ.device)
            # One column more than there are pages takes what rows hold beyond their end.
            page_BJ = torch.where(logical_BJ <= last_page_B[:, None], row_BJ, num_pages)
            # Two rows at least, as there are two pages at least in `_pages_of`: torch compiles sizes of one apart.
            num_rows = max(2, row_BJ.shape[0])
            nothing_BM = torch.full((num_rows, num_pages + 1), -1, dtype=torch.int64, device=row_BJ.device)
            self._logical_BM[is_window] = nothing_BM.scatter(1, page_BJ, logical_BJ)
        return self._logical_BM[is_window]


class _Copies:
    """Copies of the pages that each chunk sees, in order, since the uncompiled kernel multiplies by all it is given."""

    def __init__(self, plan: Plan, page_size: int) -> None:
        self._plan = plan
        self._page_size = page_size

    def views(self, spec: AttentionSpec, keys: Tensor, values: Tensor) -> list[_View]:
        """Return a view per read."""
        return [self._view(read, spec.window_left, keys, values) for read in self._plan.reads(spec.window_left)]

    def _view(self, read: Read, window_left: int | None, keys: Tensor, values: Tensor) -> _View:
        page_CJ, num_pages_C = _pages_of(read, self._plan.tables, window_left, self._page_size)
        page_size, num_pages = self._page_size, page_CJ.shape[1]
        first_C = read.key_start // page_size * page_size

        def position(chunk: Tensor, place: Tensor) -> Tensor:
            return first_C[chunk] + place

        index_CJ = torch.arange(num_pages, device=page_CJ.device).expand_as(page_CJ)
        mask = _block_mask(read, window_left, index_CJ, num_pages_C, position, num_pages, page_size)
        k_CKSH, v_CKSV = (pages[page_CJ].flatten(1, 2).transpose(1, 2) for pages in (keys, values))
        place_S = torch.arange(num_pages * page_size, device=page_CJ.device)
        is_later_CS = first_C[:, None] + place_S > read.position[:, -1:]
        return _View(k_CKSH, v_CKSV.masked_fill(is_later_CS[:, None, :, None], 0), mask)


class FlexContext:
    """One forward's attention; see `AttentionContext`."""

    def __init__(self, plan: Plan, storage: KvStorage, kernel: Kernel, form: Form, *, page_size: int) -> None:
        self._plan = plan
        self._storage = storage
        self._kernel = kernel
        self._pages = _InPlace(plan, page_size) if form.is_in_place else _Copies(plan, page_size)

    @torch.no_grad()
    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`; T must be the sum of the sequences' new tokens."""
        if q_TNH.shape[0] != self._plan.num_rows:
            raise ValueError(f"{q_TNH.shape[0]} query rows for sequences of {self._plan.num_rows} new tokens together")
        keys, values = self._storage.keys(spec.index), self._storage.values(spec.index)
        reads = self._plan.reads(spec.window_left)
        write = self._plan.write(is_window=spec.is_window)
        store(keys, k_TKH, write)
        store(values, v_TKV, write)
        out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], spec.v_dim))
        for read, view in zip(reads, self._pages.views(spec, keys, values), strict=True):
            rows_CQNH = q_TNH if read.rows is None else q_TNH[read.rows]
            q_CNQH = rows_CQNH.view(read.num_chunks, read.num_queries, *q_TNH.shape[1:]).transpose(1, 2)
            out_CNQV, aux = self._kernel(
                q_CNQH,
                # A worker stores what it computes in; with other dtypes this copies the pages.
                view.keys.to(q_TNH.dtype),
                view.values.to(q_TNH.dtype),
                block_mask=view.mask,
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
                return_aux=flex.AuxRequest(lse=True),
            )
            if sink_N is not None:
                out_CNQV = out_CNQV * sink_share(aux.lse, sink_N[:, None])[..., None]
            out_CQNV = out_CNQV.to(q_TNH.dtype).transpose(1, 2)
            if read.rows is None:
                return out_CQNV.flatten(0, 1)
            # A repeated query writes what it wrote before.
            out_TNV[read.rows] = out_CQNV
        return out_TNV


def _pages_of(read: Read, tables: PageTables, window_left: int | None, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the pages from the one of a chunk's first key to the one of its last query, [C, J], and their number [C];
    beyond it the last page is repeated."""
    first_C, last_C = read.key_start // page_size, read.position[:, -1] // page_size
    # Keys that begin inside a page reach into one page more.
    num_pages = max(2, (read.num_keys - 2) // page_size + 2)
    logical_CJ = first_C[:, None] + torch.arange(num_pages, device=first_C.device)
    page_CJ = tables.pages(
        read.sequence[:, None], torch.minimum(logical_CJ, last_C[:, None]), is_window=window_left is not None
    )
    return page_CJ, last_C - first_C + 1


def _block_mask(
    read: Read,
    window_left: int | None,
    block_CJ: Tensor,
    num_blocks_C: Tensor,
    position: Callable[[Tensor, Tensor], Tensor],
    num_pages: int,
    page_size: int,
) -> flex.BlockMask:
    """One row of blocks per chunk. `position(chunk, place)` is negative where a place is none of the chunk's."""
    position_CQ, key_start_C = read.position, read.key_start

    def is_visible(chunk: Tensor, head: Tensor, query: Tensor, place: Tensor) -> Tensor:
        key = position(chunk, place)
        distance = position_CQ[chunk, query] - key
        seen = (distance >= 0) & (key >= key_start_C[chunk])
        return seen if window_left is None else seen & (distance <= window_left)

    return flex.BlockMask.from_kv_blocks(
        num_blocks_C.to(torch.int32)[:, None, None],
        block_CJ.to(torch.int32)[:, None, None],
        BLOCK_SIZE=(_QUERY_BLOCK, page_size),
        mask_mod=is_visible,
        seq_lengths=(read.num_queries, num_pages * page_size),
        compute_q_blocks=False,
    )


def sink_share(lse: Tensor, sink: Tensor) -> Tensor:
    """Return the share of the softmax that keys have beside a sink, from their natural log-sum-exp (broadcast)."""
    return torch.sigmoid(lse - sink.float())


def _compiled() -> Kernel:
    # Beyond its limit torch would fall back to the uncompiled form, which stores the scores of all pages; with
    # `fullgraph` it raises instead.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_FORMS)
    # Else sizes that are equal by chance, such as rows and heads, are taken to be so always.
    torch.fx.experimental._config.use_duck_shape = False
    return cast(Kernel, torch.compile(flex.flex_attention, dynamic=True, fullgraph=True))


def _uncompiled(*args: object, **kwargs: object) -> tuple[Tensor, Any]:
    with _without_compiler():
        return cast(tuple[Tensor, Any], flex.flex_attention(*args, **kwargs))  # type: ignore[call-overload]


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Torch runs the plain form through its tracer, at seconds per shape, unless told that it is being debugged."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _kinds(storage: KvStorage) -> Iterator[tuple[Tensor, Tensor]]:
    """Pages of one layer of each shape."""
    seen = set()
    for keys, values in layers(storage):
        kind = keys.shape[2:], values.shape[2:]
        if kind not in seen:
            seen.add(kind)
            yield keys, values


def layers(storage: KvStorage) -> Iterator[tuple[Tensor, Tensor]]:
    """Every layer's key and value pages; layers are numbered from 0 without gaps."""
    index = 0
    while True:
        try:
            yield storage.keys(index), storage.values(index)
        except KeyError:
            return
        index += 1
