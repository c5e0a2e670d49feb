"""The backend "sdpa": keys and values gathered from their pages, then `scaled_dot_product_attention`.

Runs on any device and needs nothing but torch. Within `attend` nothing waits for the device, and decode can be held in
a CUDA graph. Written for CUDA; so far it has run on CPUs alone.

Shape letters: T new tokens; C chunks of a read; Q queries of a chunk; S keys of a read; N query heads; K KV heads; G
query heads per KV head; H query/key width; V value width; D either width; R = G x Q.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from epd.kernels.base import AttentionSpec, KvStorage, PagedSequence
from epd.kernels.cuda_decode import DecodeRow, DecodeTables, StaticDecode
from epd.kernels.cuda_plan import KEY_MULTIPLE, DecodePlan, ForwardPlan, Plan, Read, ReadLimits, store

_LIMITS = ReadLimits(max_queries=256, max_scores=1 << 22)


class SdpaBackend:
    """See the module. One per worker."""

    name = "sdpa"

    def __init__(self, storage: KvStorage, *, page_size: int) -> None:
        self._storage = storage
        self._page_size = page_size

    def context(self, sequences: Sequence[PagedSequence]) -> SdpaContext:
        """See `AttentionBackend`."""
        plan = ForwardPlan(sequences, page_size=self._page_size, limits=_LIMITS)
        return SdpaContext(plan, self._storage, page_size=self._page_size)

    def static_decode(self, tables: DecodeTables) -> StaticDecode:
        """See `StaticDecodeBackend`: all of the plan is tensors, there is nothing to prepare on the host."""
        return _SdpaDecode(self._storage, tables, page_size=self._page_size)


class _SdpaDecode:
    def __init__(self, storage: KvStorage, tables: DecodeTables, *, page_size: int) -> None:
        self._storage, self._tables, self._page_size = storage, tables, page_size

    def prepare(self, rows_B: Sequence[DecodeRow]) -> None:
        pass

    def context(self) -> SdpaContext:
        plan = DecodePlan(self._tables.pages, self._tables.position, page_size=self._page_size)
        return SdpaContext(plan, self._storage, page_size=self._page_size)


class SdpaContext:
    """One forward's attention; see `AttentionContext`."""

    def __init__(self, plan: Plan, storage: KvStorage, *, page_size: int) -> None:
        self._plan = plan
        self._storage = storage
        self._page_size = page_size
        # By the window's reach and whether there is room for a sink.
        self._keys: dict[tuple[int | None, bool], list[tuple[Tensor, Tensor]]] = {}

    @torch.no_grad()
    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`; T must be the sum of the sequences' new tokens."""
        if q_TNH.shape[0] != self._plan.num_rows:
            raise ValueError(f"{q_TNH.shape[0]} query rows for sequences of {self._plan.num_rows} new tokens together")
        keys, values = self._storage.keys(spec.index), self._storage.values(spec.index)
        write = self._plan.write(is_window=spec.is_window)
        store(keys, k_TKH, write)
        store(values, v_TKV, write)
        reads = self._plan.reads(spec.window_left)
        places = self._places(spec.window_left, has_sink=sink_N is not None)
        out_TNV = None
        for read, (slots_CS, visible_CQS) in zip(reads, places, strict=True):
            q_CQNH = (q_TNH if read.rows is None else q_TNH[read.rows]).view(
                read.num_chunks, read.num_queries, *q_TNH.shape[1:]
            )
            k_CSKH, v_CSKV = _gather(keys, slots_CS).to(q_TNH.dtype), _gather(values, slots_CS).to(q_TNH.dtype)
            out_CQNV = _attend(spec, q_CQNH, k_CSKH, v_CSKV, visible_CQS, sink_N)
            if read.rows is None:
                return out_CQNV.flatten(0, 1)
            if out_TNV is None:
                out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], spec.v_dim))
            # A repeated query writes what it wrote before.
            out_TNV[read.rows] = out_CQNV
        assert out_TNV is not None, "a forward of no tokens"
        return out_TNV

    def _places(self, window_left: int | None, *, has_sink: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the key slots [C, S] and what is visible, [C, Q, S], of each read."""
        key = window_left, has_sink
        if key not in self._keys:
            self._keys[key] = [self._place(read, window_left, has_sink) for read in self._plan.reads(window_left)]
        return self._keys[key]

    def _place(self, read: Read, window_left: int | None, has_sink: bool) -> tuple[Tensor, Tensor]:
        num_keys = -(-(read.num_keys + has_sink) // KEY_MULTIPLE) * KEY_MULTIPLE
        key_S = torch.arange(num_keys, device=read.position.device)
        position_CS = read.key_start[:, None] + key_S
        # Places beyond the newest key hold that key once more: what lies there may be anything, and zero times NaN
        # would still be NaN.
        slots_CS = self._plan.tables.slots(
            read.sequence[:, None],
            torch.minimum(position_CS, read.position[:, -1:]),
            is_window=window_left is not None,
            page_size=self._page_size,
        )
        distance_CQS = read.position[:, :, None] - position_CS[:, None, :]
        visible_CQS = distance_CQS >= 0
        if window_left is not None:
            visible_CQS &= distance_CQS <= window_left
        if has_sink:
            visible_CQS[..., -1] = True
        return slots_CS, visible_CQS


def _gather(pages: Tensor, slots_CS: Tensor) -> Tensor:
    rows = pages.view(-1, *pages.shape[2:]).index_select(0, slots_CS.flatten())
    return rows.view(*slots_CS.shape, *pages.shape[2:])


def _attend(
    spec: AttentionSpec, q_CQNH: Tensor, k_CSKH: Tensor, v_CSKV: Tensor, visible_CQS: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [C, Q, N, V].

    A sink takes the last key's place: that key becomes zero but for one extra channel of one, in which queries hold the
    sink, and its value becomes zero. Query heads of one KV head are rows of one product, since the kernels that take
    a mask do not know of groups.
    """
    num_queries, groups = q_CQNH.shape[1], spec.num_heads // spec.num_kv_heads
    q_CQNH = q_CQNH * spec.scale
    if sink_N is not None:
        sink_CQN1 = sink_N.to(q_CQNH.dtype)[:, None].expand(*q_CQNH.shape[:-1], 1)
        q_CQNH = torch.cat([q_CQNH, sink_CQN1], dim=-1)
        k_CSKH = F.pad(k_CSKH, (0, 1))
        k_CSKH[:, -1] = 0
        k_CSKH[:, -1, :, -1] = 1
        v_CSKV[:, -1] = 0
    q_CKGQH = torch.unflatten(q_CQNH, 2, (spec.num_kv_heads, groups)).permute(0, 2, 3, 1, 4)
    out_CKRV = F.scaled_dot_product_attention(
        _multiple_of_8(q_CKGQH.flatten(2, 3)),
        _multiple_of_8(k_CSKH.transpose(1, 2)),
        _multiple_of_8(v_CSKV.transpose(1, 2)),
        attn_mask=visible_CQS.repeat(1, groups, 1)[:, None],
        scale=1.0,
    )
    out_CKGQV = torch.unflatten(out_CKRV[..., : spec.v_dim], 2, (groups, num_queries))
    return out_CKGQV.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _multiple_of_8(x: Tensor) -> Tensor:
    """Widths that the fused kernels take; without them all scores of all heads are stored."""
    return F.pad(x, (0, -x.shape[-1] % 8))
