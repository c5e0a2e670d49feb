"""Attention in plain torch: the oracle, the training path and the paged path.

`DenseAttention` is the definition, one sequence at a time and nothing cached. `BatchedDenseAttention` is the same
function for equal lengths at a cost that training can bear. Both are differentiable, the sink included.
`PagedAttention` is the same function again, over keys and values kept in pages between forwards.

Shape letters: T tokens over all sequences; B sequences; L tokens per sequence; N query heads; K KV heads; G query heads
per KV head; H query/key width; V value width; C tokens per window block; M blocks; Q queries and S keys of a read; R
queries of all heads of a group; P tokens per page; D either width.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from epd.kernels.base import AttentionSpec, KvStorage, PagedSequence, first_key

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
class _Chunk:
    """Queries of one sequence that are read together: `num_queries` rows from `row` on, at positions from
    `query_start` on, over the keys [key_start, query_start + num_queries)."""

    sequence: int
    row: int
    num_queries: int
    query_start: int
    key_start: int

    @property
    def num_keys(self) -> int:
        return self.query_start + self.num_queries - self.key_start


class _Read:
    """Chunks that are answered together.

    `rows` are the queries' rows in T, [B, Q], None when they are all of T in order. `slots` [B, S] are the places of
    the keys in the pool, counted in tokens. `visible` [B, Q, S] is None where every query sees every key.
    """

    def __init__(self, slots: Tensor, num_queries: int, *, rows: Tensor | None, visible: Tensor | None) -> None:
        self.shape = slots.shape[0], num_queries
        self.rows = rows
        self.visible = visible
        self.hidden = None if visible is None else ~visible[:, None, None]
        self._slots = slots
        self._index: dict[int, Tensor] = {}

    def gather(self, pages: Tensor) -> Tensor:
        """Return [B, K, S, D] of a layer's pages [num_pages, P, K, D]."""
        num_heads, width = pages.shape[2:]
        if num_heads not in self._index:
            head_K1 = torch.arange(num_heads, device=self._slots.device)[:, None]
            self._index[num_heads] = (self._slots[:, None] * num_heads + head_K1).flatten()
        rows = pages.view(-1, width).index_select(0, self._index[num_heads])
        return rows.view(self._slots.shape[0], num_heads, -1, width)


class PagedAttention:
    """Causal attention of each sequence's new tokens over its pages, where they are stored first. Not differentiable.

    T lays out the sequences' new tokens one sequence after the other. A sequence's result does not depend on its batch
    mates, but for the rounding of sums of different padded lengths. Slots that hold nothing yet are never read.
    """

    def __init__(self, sequences: Sequence[PagedSequence], storage: KvStorage, *, page_size: int) -> None:
        self._sequences = list(sequences)
        self._storage = storage
        self._page_size = page_size
        self._reads: dict[int | None, list[_Read]] = {}
        self._device = self._sequences[0].full_pages.device
        self._full_table = pad_sequence([sequence.full_pages for sequence in self._sequences], batch_first=True)
        self._window_table = pad_sequence([sequence.window_pages for sequence in self._sequences], batch_first=True)
        self._window_start_page = self._tensor([sequence.window_start_page for sequence in self._sequences])
        num_new = [sequence.num_new for sequence in self._sequences]
        self._num_rows = sum(num_new)
        sequence_T = torch.repeat_interleave(
            torch.arange(len(num_new), device=self._device), self._tensor(num_new), output_size=self._num_rows
        )
        starts = [s.num_context - row for s, row in zip(self._sequences, _running_sum(num_new), strict=True)]
        position_T = torch.arange(self._num_rows, device=self._device) + self._tensor(starts)[sequence_T]
        self._sequence_T, self._position_T = sequence_T, position_T
        self._writes: dict[bool, tuple[Tensor | None, Tensor]] = {}

    @torch.no_grad()
    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`; T must be the sum of the sequences' new tokens."""
        if q_TNH.shape[0] != self._num_rows:
            raise ValueError(f"{q_TNH.shape[0]} query rows for sequences of {self._num_rows} new tokens together")
        keys, values = self._storage.keys(spec.index), self._storage.values(spec.index)
        rows, slots = self._write_of(is_window=spec.is_window)
        for pages, new in ((keys, k_TKH), (values, v_TKV)):
            new = (new if rows is None else new[rows]).to(pages.dtype)
            pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, new)
        reads = self._reads_of(spec.window_left)
        if len(reads) == 1 and reads[0].rows is None:
            q_BQNH = q_TNH.view(*reads[0].shape, *q_TNH.shape[1:])
            return self._answer(spec, reads[0], q_BQNH, keys, values, sink_N).flatten(0, 1)
        out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], spec.v_dim))
        for read in reads:
            out_TNV[read.rows] = self._answer(spec, read, q_TNH[read.rows], keys, values, sink_N)
        return out_TNV

    @staticmethod
    def _answer(
        spec: AttentionSpec, read: _Read, q_BQNH: Tensor, keys: Tensor, values: Tensor, sink_N: Tensor | None
    ) -> Tensor:
        k_BKSH, v_BKSV = read.gather(keys).to(q_BQNH.dtype), read.gather(values).to(q_BQNH.dtype)
        if sink_N is None and read.visible is not None and q_BQNH.shape[1] > 1:
            k_BSKH, v_BSKV = k_BKSH.transpose(1, 2), v_BKSV.transpose(1, 2)
            return fused_attention(q_BQNH, k_BSKH, v_BSKV, read.visible, scale=spec.scale)
        return _grouped_attention(spec, q_BQNH, k_BKSH, v_BKSV, read.hidden, sink_N)

    def _write_of(self, *, is_window: bool) -> tuple[Tensor | None, Tensor]:
        """Return where the new tokens go in one pool: their rows in T (None for all) and their slots.

        Made when a layer asks: a model without window layers has no window pages to look up.
        """
        if is_window not in self._writes:
            slots = self._slots(self._sequence_T, self._position_T, is_window=is_window)
            rows = None
            if not is_window and not all(sequence.write_full for sequence in self._sequences):
                writes_B = self._tensor([sequence.write_full for sequence in self._sequences])
                rows = writes_B[self._sequence_T].nonzero().flatten()
                slots = slots[rows]
            self._writes[is_window] = rows, slots
        return self._writes[is_window]

    def _reads_of(self, window_left: int | None) -> list[_Read]:
        """Return the reads of all layers with this reach; made once per forward."""
        if window_left not in self._reads:
            self._reads[window_left] = self._plan_reads(window_left)
        return self._reads[window_left]

    def _plan_reads(self, window_left: int | None) -> list[_Read]:
        """Cut the queries into reads of like shape: equal query counts, key counts within a factor of two."""
        alike: dict[tuple[int, int], list[_Chunk]] = defaultdict(list)
        row = 0
        for index, sequence in enumerate(self._sequences):
            for start in range(0, sequence.num_new, _MAX_QUERIES):
                num_queries = min(_MAX_QUERIES, sequence.num_new - start)
                query_start = sequence.num_context + start
                key_start = first_key(sequence, window_left, page_size=self._page_size, query_start=query_start)
                chunk = _Chunk(index, row + start, num_queries, query_start, key_start)
                alike[num_queries, chunk.num_keys.bit_length()].append(chunk)
            row += sequence.num_new
        reads = []
        for (num_queries, length_class), chunks in alike.items():
            step = max(1, _MAX_SCORES // (num_queries << length_class))
            reads += [self._read(chunks[i : i + step], window_left) for i in range(0, len(chunks), step)]
        return reads

    def _read(self, chunks: Sequence[_Chunk], window_left: int | None) -> _Read:
        num_queries = chunks[0].num_queries
        num_keys = max(chunk.num_keys for chunk in chunks)
        if num_queries > 1:
            # Fused kernels like lengths of a multiple of eight.
            num_keys = -(-num_keys // 8) * 8
        all_B4 = self._tensor([(chunk.sequence, chunk.row, chunk.query_start, chunk.key_start) for chunk in chunks])
        sequence_B1, row_B1, query_start_B1, key_start_B1 = torch.split(all_B4, 1, dim=1)
        query_Q = torch.arange(num_queries, device=self._device)
        position_BQ = query_start_B1 + query_Q
        key_position_BS = key_start_B1 + torch.arange(num_keys, device=self._device)
        # Padding reads the newest key again: what lies beyond may be anything, and zero times NaN would still be NaN.
        slots_BS = self._slots(
            sequence_B1, torch.minimum(key_position_BS, position_BQ[:, -1:]), is_window=window_left is not None
        )
        sees_all = num_queries == 1 and all(chunk.num_keys == num_keys for chunk in chunks)
        return _Read(
            slots_BS,
            num_queries,
            rows=None if len(chunks) * num_queries == self._num_rows else row_B1 + query_Q,
            visible=None if sees_all else visible_keys(position_BQ, key_position_BS, window_left),
        )

    def _slots(self, sequence: Tensor, position: Tensor, *, is_window: bool) -> Tensor:
        """Return where the pool of full or window pages keeps these positions of these sequences (broadcast)."""
        page = position // self._page_size
        if is_window:
            number = self._window_table[sequence, page - self._window_start_page[sequence]]
        else:
            number = self._full_table[sequence, page]
        return number * self._page_size + position % self._page_size

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _running_sum(counts: Sequence[int]) -> list[int]:
    """Return the sum of the counts before each."""
    return [0, *accumulate(counts)][: len(counts)]


def _grouped_attention(
    spec: AttentionSpec, q_BQNH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, hidden: Tensor | None, sink_N: Tensor | None
) -> Tensor:
    """`softmax_attention` as two batched matrix products, over keys and values that lie head by head.

    `hidden` [B, 1, 1, Q, S] is true where a query does not see a key, None where every query sees every key.
    """
    batch, num_queries = q_BQNH.shape[:2]
    num_kv_heads, groups = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    q_BKGQH = torch.unflatten(q_BQNH * spec.scale, 2, (num_kv_heads, groups)).permute(0, 2, 3, 1, 4)
    q_BKRH = q_BKGQH.reshape(batch, num_kv_heads, groups * num_queries, spec.qk_dim)
    score_BKRS = torch.matmul(q_BKRH, k_BKSH.transpose(2, 3)).float()
    score_BKGQS = score_BKRS.view(batch, num_kv_heads, groups, num_queries, -1)
    if hidden is not None:
        score_BKGQS = score_BKGQS.masked_fill_(hidden, float("-inf"))
    if sink_N is not None:
        sink_KG = sink_N.float().view(1, num_kv_heads, groups, 1, 1)
        score_BKGQS = torch.cat([score_BKGQS, sink_KG.expand(batch, -1, -1, num_queries, 1)], dim=-1)
    prob_BKGQS = score_BKGQS.softmax(dim=-1).to(v_BKSV.dtype)
    if sink_N is not None:
        prob_BKGQS = prob_BKGQS[..., :-1]
    out_BKRV = torch.matmul(prob_BKGQS.flatten(2, 3), v_BKSV)
    return out_BKRV.view(batch, num_kv_heads, groups, num_queries, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


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
