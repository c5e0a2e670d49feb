"""Where one forward writes its keys and values and what its queries read, as tensors made once and used by every layer.

Two plans give the same three answers: `ForwardPlan` for any mix of chunks and single tokens, planned on the host from
numbers it has there anyway, and `DecodePlan` for one token per sequence, computed on the device from tensors of fixed
shape, so that a CUDA graph can hold it. Neither reads anything back from the device.

Shape letters: T new tokens; B sequences; F, W pages of a row of the full and the window table; C chunks of a read; Q
queries of a chunk; S keys of a read; P tokens per page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from epd.kernels.base import PagedSequence, first_key

# Key counts of a read are rounded up to this many, which fused kernels like.
KEY_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PageTables:
    """Page numbers on the device: int64 [B, F] and [B, W], and the logical page [B] that a window row begins with."""

    full: Tensor
    window: Tensor
    window_start: Tensor

    def pages(self, sequence: Tensor, logical: Tensor, *, is_window: bool) -> Tensor:
        """Return the pages that hold these logical pages of these sequences (broadcast). They must be in the table."""
        if is_window:
            return self.window[sequence, logical - self.window_start[sequence]]
        return self.full[sequence, logical]

    def slots(self, sequence: Tensor, position: Tensor, *, is_window: bool, page_size: int) -> Tensor:
        """Return the places of these positions in their pool, counted in tokens."""
        page = self.pages(sequence, position // page_size, is_window=is_window)
        return page * page_size + position % page_size


@dataclass(frozen=True, slots=True)
class Write:
    """Where new tokens go in one pool: `slots`, and the `rows` of T that go there, None for all of them."""

    rows: Tensor | None
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Read:
    """Chunks of queries that are answered together.

    `sequence` [C]; `rows` [C, Q] are the queries' rows in T, None when they are all of T in order; a chunk of fewer
    queries repeats its last one. `position` [C, Q]; `key_start` [C] is the first position a chunk sees, and `num_keys`
    bounds the positions from there to its last query. `num_chunks`, `num_queries` are C and Q.
    """

    sequence: Tensor
    rows: Tensor | None
    position: Tensor
    key_start: Tensor
    num_keys: int
    num_chunks: int
    num_queries: int


class Plan(Protocol):
    """What a context needs to know of its forward."""

    @property
    def num_rows(self) -> int:
        """T."""
        ...

    @property
    def tables(self) -> PageTables:
        """All page numbers."""
        ...

    def last_position(self) -> Tensor:
        """Return the position of each sequence's newest token, int64 [B]."""
        ...

    def write(self, *, is_window: bool) -> Write:
        """Return where the new tokens of one pool go."""
        ...

    def reads(self, window_left: int | None) -> Sequence[Read]:
        """Return the reads of all layers with this reach; together they hold every row of T."""
        ...


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How queries are cut into chunks: at most `max_queries` in one, `max_scores` query-key pairs in one read (a
    single chunk of the smallest size may hold more). `pads_queries`: short chunks are padded to `max_queries`."""

    max_queries: int
    max_scores: int
    pads_queries: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    sequence: int
    row: int
    num_queries: int
    query_start: int
    key_start: int

    @property
    def num_keys(self) -> int:
        return self.query_start + self.num_queries - self.key_start


class ForwardPlan:
    """The plan of any forward over paged sequences."""

    def __init__(self, sequences: Sequence[PagedSequence], *, page_size: int, limits: ReadLimits) -> None:
        self._sequences = list(sequences)
        self._page_size = page_size
        self._limits = limits
        self._device = self._sequences[0].full_pages.device
        self._reads: dict[int | None, list[Read]] = {}
        self._writes: dict[bool, Write] = {}
        self.num_rows = sum(sequence.num_new for sequence in self._sequences)
        self.tables = self._make_tables()
        self._last_position = self.tensor([s.num_context + s.num_new - 1 for s in self._sequences])

    def last_position(self) -> Tensor:
        """See `Plan`."""
        return self._last_position

    def write(self, *, is_window: bool) -> Write:
        """See `Plan`. Sequences that leave their full pages alone have no rows among those of the full pool."""
        if is_window not in self._writes:
            writers = [(i, s) for i, s in enumerate(self._sequences) if is_window or s.write_full]
            sequence = [i for i, s in writers for _ in range(s.num_new)]
            position = [p for _, s in writers for p in range(s.num_context, s.num_context + s.num_new)]
            rows = None if len(writers) == len(self._sequences) else self.tensor(self._rows_of([i for i, _ in writers]))
            slots = self.tables.slots(
                self.tensor(sequence), self.tensor(position), is_window=is_window, page_size=self._page_size
            )
            self._writes[is_window] = Write(rows, slots)
        return self._writes[is_window]

    def reads(self, window_left: int | None) -> Sequence[Read]:
        """See `Plan`. Raises ValueError when a query would see a window page that is gone."""
        if window_left not in self._reads:
            self._reads[window_left] = self._plan_reads(window_left)
        return self._reads[window_left]

    def tensor(self, values: Sequence[object]) -> Tensor:
        """int64 on the device, without waiting for it."""
        host = torch.tensor(values, dtype=torch.int64)
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)

    def _make_tables(self) -> PageTables:
        """Tables end with the page of the newest token: what a row holds beyond it is not of this forward."""
        ends = [-(-(s.num_context + s.num_new) // self._page_size) for s in self._sequences]
        full = [s.full_pages[:end] for s, end in zip(self._sequences, ends, strict=True)]
        window = [s.window_pages[: end - s.window_start_page] for s, end in zip(self._sequences, ends, strict=True)]
        return PageTables(
            pad_sequence(full, batch_first=True),
            pad_sequence(window, batch_first=True),
            self.tensor([s.window_start_page for s in self._sequences]),
        )

    def _rows_of(self, indices: Sequence[int]) -> list[int]:
        wanted, row = set(indices), 0
        rows: list[int] = []
        for index, sequence in enumerate(self._sequences):
            if index in wanted:
                rows += range(row, row + sequence.num_new)
            row += sequence.num_new
        return rows

    def _plan_reads(self, window_left: int | None) -> list[Read]:
        """Cut the queries into reads of like shape: equal query counts, key counts within a factor of two."""
        alike: dict[tuple[int, int], list[_Chunk]] = defaultdict(list)
        row = 0
        for index, sequence in enumerate(self._sequences):
            for chunk in self._chunks(index, sequence, row, window_left):
                width = chunk.num_queries
                if self._limits.pads_queries and width > 1:
                    width = self._limits.max_queries
                alike[width, (chunk.num_keys - 1).bit_length()].append(chunk)
            row += sequence.num_new
        reads = []
        for (num_queries, length_class), chunks in alike.items():
            step = max(1, self._limits.max_scores // (num_queries << length_class))
            reads += [self._read(chunks[i : i + step], num_queries) for i in range(0, len(chunks), step)]
        return reads

    def _chunks(self, index: int, sequence: PagedSequence, row: int, window_left: int | None) -> list[_Chunk]:
        num_keys = sequence.num_context + sequence.num_new
        if window_left is not None:
            num_keys = min(num_keys, window_left + self._limits.max_queries)
        size = max(16, min(self._limits.max_queries, self._limits.max_scores // num_keys))
        if self._limits.pads_queries:
            size = self._limits.max_queries
        chunks = []
        for start in range(0, sequence.num_new, size):
            query_start = sequence.num_context + start
            key_start = first_key(sequence, window_left, page_size=self._page_size, query_start=query_start)
            chunks.append(_Chunk(index, row + start, min(size, sequence.num_new - start), query_start, key_start))
        return chunks

    def _read(self, chunks: Sequence[_Chunk], num_queries: int) -> Read:
        numbers = self.tensor([(c.sequence, c.row, c.num_queries, c.query_start, c.key_start) for c in chunks])
        sequence_C, row_C, count_C, query_start_C, key_start_C = numbers.unbind(1)
        query_CQ = torch.minimum(torch.arange(num_queries, device=self._device), count_C[:, None] - 1)
        is_all = sum(chunk.num_queries for chunk in chunks) == self.num_rows == len(chunks) * num_queries
        return Read(
            sequence=sequence_C,
            rows=None if is_all else row_C[:, None] + query_CQ,
            position=query_start_C[:, None] + query_CQ,
            key_start=key_start_C,
            num_keys=max(chunk.num_keys for chunk in chunks),
            num_chunks=len(chunks),
            num_queries=num_queries,
        )


class DecodePlan:
    """One new token per sequence, at `position` [B]; all tensors may be overwritten between runs of a CUDA graph.

    A row's tables hold every page that its token sees, and what follows in the row may be anything; window rows begin
    where the window does. Everything here is computed when asked for, so it must be asked for inside the graph.
    """

    def __init__(self, tables: PageTables, position_B: Tensor, *, page_size: int) -> None:
        self.num_rows = position_B.shape[0]
        self.tables = tables
        self._position_B = position_B
        self._page_size = page_size
        self._sequence_B = torch.arange(self.num_rows, device=position_B.device)
        self._reads: dict[int | None, list[Read]] = {}
        self._writes: dict[bool, Write] = {}

    def last_position(self) -> Tensor:
        """See `Plan`."""
        return self._position_B

    def write(self, *, is_window: bool) -> Write:
        """See `Plan`."""
        if is_window not in self._writes:
            slots = self.tables.slots(
                self._sequence_B, self._position_B, is_window=is_window, page_size=self._page_size
            )
            self._writes[is_window] = Write(None, slots)
        return self._writes[is_window]

    def reads(self, window_left: int | None) -> Sequence[Read]:
        """See `Plan`: one read of all rows, over as many keys as the table has room for."""
        if window_left not in self._reads:
            if window_left is None:
                key_start_B = torch.zeros_like(self._position_B)
                num_keys = self.tables.full.shape[1] * self._page_size
            else:
                key_start_B = (self._position_B - window_left).clamp(min=0)
                num_keys = min(window_left + 1, self.tables.window.shape[1] * self._page_size)
            read = Read(self._sequence_B, None, self._position_B[:, None], key_start_B, num_keys, self.num_rows, 1)
            self._reads[window_left] = [read]
        return self._reads[window_left]


def store(pages: Tensor, new: Tensor, write: Write) -> None:
    """Put rows of `new` [T, K, D] into `pages` [num_pages, P, K, D]."""
    rows = new if write.rows is None else new.index_select(0, write.rows)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, write.slots, rows.to(pages.dtype))
