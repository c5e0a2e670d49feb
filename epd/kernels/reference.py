"""Attention in plain torch: the oracle, the training path and the paged path.

`DenseAttention` is the definition, one sequence at a time and nothing cached. `BatchedDenseAttention` is the same
function for equal lengths at a cost that training can bear. Both are differentiable, the sink included.
`PagedAttention` is the same function again, over keys and values kept in pages between forwards.

Shape letters: T tokens over all sequences; B sequences; L tokens per sequence; N query heads; K KV heads; G query heads
per KV head; H query/key width; V value width; C tokens per window block; M blocks; Q queries and S keys of a read;
P tokens per page.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epd.kernels.base import AttentionSpec, KvStorage, PagedSequence

# Queries of one sequence that are read together, and how many scores per head one read may hold.
_MAX_QUERIES = 128
_MAX_SCORES = 1 << 22


class DenseAttention:
    """Causal attention over whole sequences laid end to end, without a cache."""

    def __init__(self, seq_lens: Sequence[int]) -> None:
        self._seq_lens = list(seq_lens)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V]; T must be the sum of the sequence lengths."""
        rows = zip(*(torch.split(x, self._seq_lens) for x in (q_TNH, k_TKH, v_TKV)), strict=True)
        return torch.cat([self._one(spec, q, k, v, sink_N) for q, k, v in rows])

    @staticmethod
    def _one(spec: AttentionSpec, q_LNH: Tensor, k_LKH: Tensor, v_LKV: Tensor, sink_N: Tensor | None) -> Tensor:
        position_L = torch.arange(q_LNH.shape[0], device=q_LNH.device)
        visible_LL = visible_keys(position_L, position_L, spec.window_left)
        return softmax_attention(spec, q_LNH[None], k_LKH[None], v_LKV[None], visible_LL[None], sink_N)[0]


class BatchedDenseAttention:
    """Causal attention over `batch` sequences of `length` tokens each; window layers cost length x window."""

    def __init__(self, batch: int, length: int) -> None:
        self._batch = batch
        self._length = length

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V]; T must be batch x length."""
        q_BLNH, k_BLKH, v_BLKV = (torch.unflatten(x, 0, (self._batch, self._length)) for x in (q_TNH, k_TKH, v_TKV))
        if spec.window_left is not None and spec.window_left + 1 < self._length:
            out_BLNV = _block_window_attention(spec, q_BLNH, k_BLKH, v_BLKV, sink_N)
        elif sink_N is None:
            out_BLNV = fused_attention(q_BLNH, k_BLKH, v_BLKV, None, scale=spec.scale)
        else:
            position_L = torch.arange(self._length, device=q_TNH.device)
            visible_LL = visible_keys(position_L, position_L, spec.window_left)
            out_BLNV = softmax_attention(spec, q_BLNH, k_BLKH, v_BLKV, visible_LL[None], sink_N)
        return out_BLNV.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Read:
    """Queries that are answered together: their rows in T and their positions, [B, Q], and the pages they see.

    `pages` [B, num_pages] begins at position `key_start` [B]; its padding comes after every query, so is never visible.
    """

    rows: Tensor
    query_position: Tensor
    pages: Tensor
    key_start: Tensor


class PagedAttention:
    """Causal attention of each sequence's new tokens over its pages, where they are stored first. Not differentiable.

    T lays out the sequences' new tokens one sequence after the other. A sequence's result does not depend on its batch
    mates, but for the rounding of sums of different padded lengths. Page entries and slots that hold nothing yet may
    have any content, NaN included.
    """

    def __init__(self, sequences: Sequence[PagedSequence], storage: KvStorage, *, page_size: int) -> None:
        self._sequences = list(sequences)
        self._storage = storage
        self._page_size = page_size
        self._reads: dict[int | None, list[_Read]] = {}
        rows, full, window = [], [], []
        first_row = 0
        for sequence in self._sequences:
            device = sequence.full_pages.device
            position = torch.arange(sequence.num_new, device=device) + sequence.num_context
            page, offset = position // page_size, position % page_size
            window.append(torch.stack([sequence.window_pages[page - sequence.window_start_page], offset]))
            if sequence.write_full:
                rows.append(torch.arange(sequence.num_new, device=device) + first_row)
                full.append(torch.stack([sequence.full_pages[page], offset]))
            first_row += sequence.num_new
        self._num_rows = first_row
        # Where the new tokens go: their rows in T (None for all), their pages and their offsets in them.
        self._window_write = None, torch.cat(window, dim=1)
        self._full_write = (torch.cat(rows), torch.cat(full, dim=1)) if rows else None

    @torch.no_grad()
    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`; T must be the sum of the sequences' new tokens."""
        if q_TNH.shape[0] != self._num_rows:
            raise ValueError(f"{q_TNH.shape[0]} query rows for sequences of {self._num_rows} new tokens together")
        keys, values = self._storage.keys(spec.index), self._storage.values(spec.index)
        write = self._window_write if spec.is_window else self._full_write
        if write is not None:
            rows, (page, offset) = write
            keys[page, offset] = (k_TKH if rows is None else k_TKH[rows]).to(keys.dtype)
            values[page, offset] = (v_TKV if rows is None else v_TKV[rows]).to(values.dtype)
        out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], spec.v_dim))
        for read in self._reads_of(spec.window_left):
            k_BSKH = keys[read.pages].flatten(1, 2).to(q_TNH.dtype)
            v_BSKV = values[read.pages].flatten(1, 2).to(q_TNH.dtype)
            key_position_BS = read.key_start[:, None] + torch.arange(k_BSKH.shape[1], device=q_TNH.device)
            visible_BQS = visible_keys(read.query_position, key_position_BS, spec.window_left)
            # What lies beyond the sequence has probability zero, but zero times NaN would still be NaN.
            is_unseen = ~visible_BQS.any(dim=1)[..., None, None]
            k_BSKH.masked_fill_(is_unseen, 0.0)
            v_BSKV.masked_fill_(is_unseen, 0.0)
            q_BQNH = q_TNH[read.rows]
            if sink_N is None and q_BQNH.shape[1] > 1:
                out_BQNV = fused_attention(q_BQNH, k_BSKH, v_BSKV, visible_BQS, scale=spec.scale)
            else:
                out_BQNV = softmax_attention(spec, q_BQNH, k_BSKH, v_BSKV, visible_BQS, sink_N)
            out_TNV[read.rows] = out_BQNV
        return out_TNV

    def _reads_of(self, window_left: int | None) -> list[_Read]:
        """Return the reads of all layers with this reach; made once per forward."""
        if window_left not in self._reads:
            self._reads[window_left] = self._plan_reads(window_left)
        return self._reads[window_left]

    def _plan_reads(self, window_left: int | None) -> list[_Read]:
        """Cut the queries into reads of like shape: equal query counts, page counts within a factor of two."""
        alike: dict[tuple[int, int], list[tuple[int, int, int, Tensor]]] = defaultdict(list)
        first_row = 0
        for sequence in self._sequences:
            for start in range(0, sequence.num_new, _MAX_QUERIES):
                num_queries = min(_MAX_QUERIES, sequence.num_new - start)
                query_start = sequence.num_context + start
                first_page, pages = self._visible_pages(sequence, window_left, query_start, query_start + num_queries)
                key = num_queries, pages.shape[0].bit_length()
                alike[key].append((first_row + start, query_start, first_page * self._page_size, pages))
            first_row += sequence.num_new
        reads = []
        for (num_queries, length_class), items in alike.items():
            scores_each = num_queries * (self._page_size << length_class)
            step = max(1, _MAX_SCORES // scores_each)
            reads += [_read(items[i : i + step], num_queries) for i in range(0, len(items), step)]
        return reads

    def _visible_pages(
        self, sequence: PagedSequence, window_left: int | None, query_start: int, query_stop: int
    ) -> tuple[int, Tensor]:
        """Return the first logical page that queries [query_start, query_stop) see, and the pages from it on."""
        stop = -(-query_stop // self._page_size)
        if window_left is None:
            return 0, sequence.full_pages[:stop]
        needed = max(0, query_start - window_left) // self._page_size
        held = sequence.window_start_page
        if needed < held and sequence.write_full:
            raise ValueError(f"position {query_start} sees window page {needed}, the sequence holds {held} and later")
        first = max(needed, held)
        return first, sequence.window_pages[first - held : stop - held]


def _read(items: Sequence[tuple[int, int, int, Tensor]], num_queries: int) -> _Read:
    """Join (first row, first query position, first key position, pages) of reads of like shape."""
    pages_BM = torch.nn.utils.rnn.pad_sequence([pages for *_, pages in items], batch_first=True)
    starts_B3 = torch.tensor([item[:3] for item in items], device=pages_BM.device)
    query_Q = torch.arange(num_queries, device=pages_BM.device)
    return _Read(
        rows=starts_B3[:, :1] + query_Q,
        query_position=starts_B3[:, 1:2] + query_Q,
        pages=pages_BM,
        key_start=starts_B3[:, 2],
    )


def visible_keys(query_position: Tensor, key_position: Tensor, window_left: int | None) -> Tensor:
    """Return which keys each query sees: positions [..., Q] and [..., S] give bool [..., Q, S]."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    seen = distance >= 0
    return seen if window_left is None else seen & (distance <= window_left)


def softmax_attention(
    spec: AttentionSpec, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, visible_BQS: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [B, Q, N, V]: the definition, with the sink as one more column that has no value.

    The softmax runs in fp32. A query that sees nothing gives zeros where there is a sink and NaN where there is none.
    """
    groups = spec.num_heads // spec.num_kv_heads
    q_BQKGH = torch.unflatten(q_BQNH, 2, (spec.num_kv_heads, groups))
    score_BKGQS = torch.einsum("bqkgh,bskh->bkgqs", q_BQKGH * spec.scale, k_BSKH).float()
    score_BKGQS = score_BKGQS.masked_fill(~visible_BQS[:, None, None], float("-inf"))
    if sink_N is None:
        prob_BKGQS = score_BKGQS.softmax(dim=-1)
    else:
        sink_KG = sink_N.float().view(1, spec.num_kv_heads, groups, 1, 1)
        sink_BKGQ1 = sink_KG.expand(*score_BKGQS.shape[:-1], 1)
        prob_BKGQS = torch.cat([score_BKGQS, sink_BKGQ1], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("bkgqs,bskv->bqkgv", prob_BKGQS.to(v_BSKV.dtype), v_BSKV).flatten(2, 3)


def fused_attention(
    q_BQNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, visible_BQS: Tensor | None, *, scale: float
) -> Tensor:
    """Return [B, Q, N, V] by torch's own kernels, which need not store the scores.

    `visible_BQS` None means causal, with Q = S. Keys and values that no query sees must be finite.
    """
    # The fused kernels ask for one width of a multiple of eight; without them all scores of all heads are stored.
    width = -(-max(q_BQNH.shape[-1], v_BSKV.shape[-1]) // 8) * 8
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(1, 2) for x in (q_BQNH, k_BSKH, v_BSKV))
    out_BNQV = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if visible_BQS is None else visible_BQS[:, None],
        is_causal=visible_BQS is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out_BNQV.transpose(1, 2)[..., : v_BSKV.shape[-1]]


def _block_window_attention(
    spec: AttentionSpec, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKV: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [B, L, N, V]: blocks of window_left + 1 queries, each against its own and the previous block of keys.

    With that block size a query reaches back into the previous block and never beyond it, and never sees the first of
    the 2C keys. The sink takes that place: its key is zero but for one extra channel of one, in which the query holds
    the sink, and its value is zero. So the fused kernels do it all, and the sink's gradient comes through the query.
    """
    assert spec.window_left is not None
    batch, length = q_BLNH.shape[:2]
    block = spec.window_left + 1
    num_blocks = -(-length // block)
    tail = num_blocks * block - length
    query_C = torch.arange(block, device=q_BLNH.device) + block
    key_S = torch.arange(2 * block, device=q_BLNH.device)
    visible_MCS = visible_keys(query_C, key_S, spec.window_left).repeat(num_blocks, 1, 1)
    # Before the first block there is padding only.
    visible_MCS[0, :, :block] = False
    k_BMSKH, v_BMSKV = (_own_and_previous(x, num_blocks, block, tail) for x in (k_BLKH, v_BLKV))
    q_BLNH = q_BLNH * spec.scale
    if sink_N is not None:
        visible_MCS[..., 0] = True
        is_first_S = (key_S == 0).to(k_BMSKH.dtype)[:, None, None]
        one_BMSK1 = is_first_S.expand(*k_BMSKH.shape[:-1], 1)
        k_BMSKH = torch.cat([k_BMSKH * (1 - is_first_S), one_BMSK1], dim=-1)
        v_BMSKV = v_BMSKV * (1 - is_first_S)
        q_BLNH = torch.cat([q_BLNH, sink_N.to(q_BLNH.dtype)[:, None].expand(*q_BLNH.shape[:-1], 1)], dim=-1)
    q_BMCNH = torch.unflatten(F.pad(q_BLNH, (0, 0, 0, 0, 0, tail)), 1, (num_blocks, block))
    out_BCNV = fused_attention(
        q_BMCNH.flatten(0, 1), k_BMSKH.flatten(0, 1), v_BMSKV.flatten(0, 1), visible_MCS.repeat(batch, 1, 1), scale=1.0
    )
    return torch.unflatten(out_BCNV, 0, (batch, num_blocks)).flatten(1, 2)[:, :length]


def _own_and_previous(x_BLKD: Tensor, num_blocks: int, block: int, tail: int) -> Tensor:
    """Return [B, M, 2C, K, D]: for each block the previous block's rows (zeros before the first) and its own."""
    padded = torch.unflatten(F.pad(x_BLKD, (0, 0, 0, 0, block, tail)), 1, (num_blocks + 1, block))
    return torch.cat([padded[:, :-1], padded[:, 1:]], dim=2)
