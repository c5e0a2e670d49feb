"""The CPU backends: keys and values are read where they lie, or gathered page by page where that is cheap.

"cpu" gives sequences with few new tokens to a compiled kernel, which reads each key and value once and copies none.
"cpu-torch" is the same without a compiler. Chunks of many tokens go through torch's fused attention in both: there the
arithmetic costs so much that gathering the earlier tokens' pages once per layer does not show.

What depends on the step alone is found once per forward and reach, in time and memory proportional to the pages.

A sequence's result depends on its batch mates in no bit in "cpu", and but for rounding in "cpu-torch".

Shape letters: T new tokens of the forward; F those of sequences with few; C of one chunk; R its keys; L sequences with
one new token that are answered together, and S their keys; N query heads; K KV heads; H query/key width; V value width;
P tokens per page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epd.kernels.base import AttentionSpec, KvStorage, PagedSequence, first_key
from epd.kernels.paged_chunks import attend_full, attend_single, attend_singles, attend_window, window_mask
from epd.kernels.paged_native import DecodeRun, DecodeRuns, PagedDecode, load_native

# Without the kernel, single queries with so many keys at most are answered together: one by one, calls of torch would
# cost more than the arithmetic, and with more keys the padding would.
_MAX_GROUPED_KEYS = 1024
# Sequences with so many new tokens at most are decoded: one token, or one and its drafts.
_MAX_FEW_TOKENS = 8


class CpuBackend:
    """See the module. `native` None does without the compiled kernel."""

    def __init__(self, storage: KvStorage, *, page_size: int, native: PagedDecode | None) -> None:
        self._storage = storage
        self._page_size = page_size
        self._native = native

    @property
    def name(self) -> str:
        """See `AttentionBackend`."""
        return "cpu-torch" if self._native is None else "cpu"

    def context(self, sequences: Sequence[PagedSequence]) -> PagedCpuAttention:
        """See `AttentionBackend`."""
        return PagedCpuAttention(sequences, self._storage, page_size=self._page_size, native=self._native)


def make_cpu(storage: KvStorage, *, page_size: int) -> CpuBackend:
    """The backend "cpu"."""
    return CpuBackend(storage, page_size=page_size, native=load_native())


def make_cpu_torch(storage: KvStorage, *, page_size: int) -> CpuBackend:
    """The backend "cpu-torch"."""
    return CpuBackend(storage, page_size=page_size, native=None)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence and the rows of T that are its new tokens."""

    sequence: PagedSequence
    rows: slice


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    """The keys that one chunk sees, its own being the last: `num_keys` of them in `pages`, after `skip` others.

    `mask` is that of a window layer."""

    pages: Tensor
    skip: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _GroupRead:
    """Single queries that are answered together: their rows in T; the slots [L, S] of the keys, the newest repeated as
    padding; and which of the keys are not seen."""

    rows: Tensor
    slots: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Reads:
    groups: Sequence[_GroupRead]
    chunks: Sequence[tuple[_Chunk, _ChunkRead]]


class PagedCpuAttention:
    """One forward: see `AttentionContext`. Not differentiable. Slots that hold nothing yet are never read."""

    def __init__(
        self, sequences: Sequence[PagedSequence], storage: KvStorage, *, page_size: int, native: PagedDecode | None
    ) -> None:
        self._sequences = list(sequences)
        self._storage = storage
        self._page_size = page_size
        self._native = native
        self._few: list[_Chunk] = []
        self._many: list[_Chunk] = []
        row = 0
        for sequence in self._sequences:
            chunk = _Chunk(sequence, slice(row, row + sequence.num_new))
            is_few = native is not None and sequence.num_new <= _MAX_FEW_TOKENS
            (self._few if is_few else self._many).append(chunk)
            row += sequence.num_new
        self._num_rows = row
        # None when they are all of T.
        self._few_rows: Tensor | None = None
        if self._many and self._few:
            few_rows = [np.arange(chunk.rows.start, chunk.rows.stop) for chunk in self._few]
            self._few_rows = torch.from_numpy(np.concatenate(few_rows))
        self._writes: dict[bool, tuple[Tensor | None, Tensor]] = {}
        self._runs: dict[int | None, DecodeRuns] = {}
        self._reads: dict[int | None, _Reads] = {}

    @torch.no_grad()
    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`; T must be the sum of the sequences' new tokens."""
        if q_TNH.shape[0] != self._num_rows:
            raise ValueError(f"{q_TNH.shape[0]} query rows for sequences of {self._num_rows} new tokens together")
        pages = self._storage.keys(spec.index), self._storage.values(spec.index)
        rows, slots = self._write_of(is_window=spec.is_window)
        for pool, new in zip(pages, (k_TKH, v_TKV), strict=True):
            new = (new if rows is None else new[rows]).to(pool.dtype)
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, new)
        few_FNV = self._attend_few(spec, q_TNH, pages, sink_N) if self._few else None
        if few_FNV is not None and not self._many:
            return few_FNV
        out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], spec.v_dim))
        if few_FNV is not None:
            out_TNV[self._few_rows] = few_FNV
        reads = self._reads_of(spec.window_left, q_TNH.dtype)
        for group in reads.groups:
            k_LKSH, v_LKSV = (_gather_heads(pool, group.slots).to(q_TNH.dtype) for pool in pages)
            out_TNV[group.rows] = attend_singles(spec, q_TNH[group.rows], k_LKSH, v_LKSV, group.hidden, sink_N)
        for chunk, read in reads.chunks:
            rows_kv = (k_TKH[chunk.rows], v_TKV[chunk.rows])
            out_TNV[chunk.rows] = self._attend_chunk(spec, chunk, read, q_TNH[chunk.rows], pages, rows_kv, sink_N)
        return out_TNV

    def _attend_few(
        self, spec: AttentionSpec, q_TNH: Tensor, pages: tuple[Tensor, Tensor], sink_N: Tensor | None
    ) -> Tensor:
        assert self._native is not None
        q_FNH = q_TNH if self._few_rows is None else q_TNH[self._few_rows]
        return self._native.attend(spec, q_FNH, pages, self._runs_of(spec.window_left), sink_N).to(q_TNH.dtype)

    def _attend_chunk(
        self,
        spec: AttentionSpec,
        chunk: _Chunk,
        read: _ChunkRead,
        q_CNH: Tensor,
        pages: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
        sink_N: Tensor | None,
    ) -> Tensor:
        is_written = spec.is_window or chunk.sequence.write_full
        if is_written and read.num_keys == chunk.sequence.num_new:
            # Nothing before them: no need to read back what was just written, but rounded as it was.
            k_RKH, v_RKV = (x.to(pool.dtype).to(q_CNH.dtype) for x, pool in zip(new, pages, strict=True))
        else:
            k_RKH, v_RKV = (_gather(pool, read).to(q_CNH.dtype) for pool in pages)
        if chunk.sequence.num_new == 1:
            return attend_single(spec, q_CNH[0], k_RKH, v_RKV, sink_N)[None]
        if read.mask is None:
            return attend_full(spec, q_CNH, k_RKH, v_RKV, sink_N)
        return attend_window(spec, q_CNH, k_RKH, v_RKV, read.mask.to(q_CNH.dtype), sink_N)

    def _write_of(self, *, is_window: bool) -> tuple[Tensor | None, Tensor]:
        """Return where the new tokens go in one pool: their rows in T (None for all) and their slots.

        Made when a layer asks: a model without window layers has no window pages to look up.
        """
        if is_window not in self._writes:
            self._writes[is_window] = self._plan_write(is_window=is_window)
        return self._writes[is_window]

    def _plan_write(self, *, is_window: bool) -> tuple[Tensor | None, Tensor]:
        slots, rows = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for chunk in (*self._few, *self._many):
            sequence = chunk.sequence
            if not is_window and not sequence.write_full:
                continue
            pages, start_page = _pages_of(sequence, is_window=is_window)
            position = np.arange(sequence.num_context, sequence.num_context + sequence.num_new)
            number = pages.numpy()[position // self._page_size - start_page]
            slots.append(number * self._page_size + position % self._page_size)
            rows.append(np.arange(chunk.rows.start, chunk.rows.stop))
        row_F, slot_F = np.concatenate(rows), np.concatenate(slots)
        if len(row_F) == self._num_rows and not (self._few and self._many):
            return None, torch.from_numpy(slot_F)
        return torch.from_numpy(row_F), torch.from_numpy(slot_F)

    def _runs_of(self, window_left: int | None) -> DecodeRuns:
        if window_left not in self._runs:
            runs, tables, row, num_pages = [], [], 0, 0
            for sequence in (chunk.sequence for chunk in self._few):
                pages, start_page = _pages_of(sequence, is_window=window_left is not None)
                first = first_key(sequence, window_left, page_size=self._page_size)
                runs.append(DecodeRun(row, sequence.num_new, sequence.num_context, first, num_pages, start_page))
                tables.append(pages)
                row += sequence.num_new
                num_pages += len(pages)
            self._runs[window_left] = DecodeRuns(runs, torch.cat(tables))
        return self._runs[window_left]

    def _reads_of(self, window_left: int | None, dtype: torch.dtype) -> _Reads:
        if window_left not in self._reads:
            alike: dict[int, list[tuple[_Chunk, _ChunkRead]]] = defaultdict(list)
            chunks = []
            for chunk in self._many:
                read = self._plan_read(chunk.sequence, window_left, dtype)
                if chunk.sequence.num_new == 1 and read.num_keys <= _MAX_GROUPED_KEYS:
                    alike[read.num_keys.bit_length()].append((chunk, read))
                else:
                    chunks.append((chunk, read))
            self._reads[window_left] = _Reads([self._plan_group(members) for members in alike.values()], chunks)
        return self._reads[window_left]

    def _plan_group(self, members: Sequence[tuple[_Chunk, _ChunkRead]]) -> _GroupRead:
        num_keys_L = np.array([read.num_keys for _, read in members])
        key_S = np.arange(num_keys_L.max())
        slots_LS = np.empty((len(members), len(key_S)), dtype=np.int64)
        for slots_S, (_, read) in zip(slots_LS, members, strict=True):
            # Padding reads the newest key again: what lies beyond may be anything, and zero times NaN would still be
            # NaN.
            place = read.skip + np.minimum(key_S, read.num_keys - 1)
            slots_S[:] = read.pages.numpy()[place // self._page_size] * self._page_size + place % self._page_size
        return _GroupRead(
            rows=torch.tensor([chunk.rows.start for chunk, _ in members]),
            slots=torch.from_numpy(slots_LS),
            hidden=torch.from_numpy(key_S >= num_keys_L[:, None]),
        )

    def _plan_read(self, sequence: PagedSequence, window_left: int | None, dtype: torch.dtype) -> _ChunkRead:
        pages, start_page = _pages_of(sequence, is_window=window_left is not None)
        first = first_key(sequence, window_left, page_size=self._page_size)
        mask = None
        if window_left is not None and sequence.num_new > 1:
            mask = window_mask(sequence.num_new, sequence.num_context - first, window_left, dtype)
        return _ChunkRead(
            pages=pages[first // self._page_size - start_page :],
            skip=first % self._page_size,
            num_keys=sequence.num_context + sequence.num_new - first,
            mask=mask,
        )


def _pages_of(sequence: PagedSequence, *, is_window: bool) -> tuple[Tensor, int]:
    """Return a sequence's pages in one pool and the logical number of the first."""
    return (sequence.window_pages, sequence.window_start_page) if is_window else (sequence.full_pages, 0)


def _gather(pool: Tensor, read: _ChunkRead) -> Tensor:
    """Return [num_keys, K, D]. Whole pages are copied: that is several times as fast as single tokens or heads."""
    return pool.index_select(0, read.pages).flatten(0, 1)[read.skip : read.skip + read.num_keys]


def _gather_heads(pool: Tensor, slots_LS: Tensor) -> Tensor:
    """Return [L, K, S, D]: head by head, as the products of a batch want them."""
    num_heads, width = pool.shape[2:]
    index_LKS = slots_LS[:, None] * num_heads + torch.arange(num_heads)[:, None]
    return pool.view(-1, width).index_select(0, index_LKS.flatten()).view(*index_LKS.shape, width)
