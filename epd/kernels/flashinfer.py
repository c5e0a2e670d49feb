"""The backend "flashinfer": FlashInfer's paged attention, where the package is installed and knows the geometry.

One wrapper class serves chunks and single tokens, because FlashInfer's decode wrapper takes one width for keys and
values; a single query is a short chunk to it. Sinks come in afterwards, through the log-sum-exp. The calls were written
against the sources of flashinfer-python 0.7.4 and tested against a stand-in of the same signatures; no kernel of it
has run here. Written for CUDA; so far it has run on CPUs alone.

Shape letters: T new tokens; B sequences; N query heads; K KV heads; H query/key width; V value width.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from epd.kernels.base import AttentionSpec, KvStorage, PagedSequence
from epd.kernels.cuda_decode import DecodeRow, DecodeTables, StaticDecode
from epd.kernels.cuda_plan import DecodePlan, ForwardPlan, PageTables, Plan, ReadLimits, store
from epd.kernels.flex import layers, sink_share

_PACKAGE = "flashinfer"
_WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
# Wrappers that have it take keys and values of different strides, hence of different widths.
_OWN_VALUE_STRIDES = "prewarm_paged_kv_stride_variant"
_WORKSPACE_BYTES = 128 << 20
_DTYPES = (torch.float16, torch.bfloat16)
# Widths of its oldest kernels ("fa2"), which exist on every architecture and for every pair of these.
_WIDTH_MULTIPLE, _MAX_WIDTH = 64, 256
_KERNELS = "fa2"
_LIMITS = ReadLimits(max_queries=1 << 30, max_scores=1 << 62)


def obstacle(storage: KvStorage) -> str | None:
    """Why FlashInfer cannot serve this storage, in words for a person; None where it can."""
    try:
        wrapper = getattr(importlib.import_module(_PACKAGE), _WRAPPER)
    except ImportError as error:
        return f"the package flashinfer-python does not load ({error})"
    except AttributeError:
        return f"this version of flashinfer-python has no {_WRAPPER}"
    for keys, values in layers(storage):
        qk_dim, v_dim = keys.shape[3], values.shape[3]
        if keys.dtype not in _DTYPES:
            return f"keys and values are {str(keys.dtype).removeprefix('torch.')}, it takes float16 and bfloat16"
        if any(width % _WIDTH_MULTIPLE or width > _MAX_WIDTH for width in (qk_dim, v_dim)):
            return f"heads are {qk_dim} and {v_dim} wide, it takes multiples of {_WIDTH_MULTIPLE} up to {_MAX_WIDTH}"
        if qk_dim != v_dim and not hasattr(wrapper, _OWN_VALUE_STRIDES):
            return f"keys are {qk_dim} wide and values {v_dim}; this version of it takes pages of one width only"
    return None


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Lengths of a step's rows: new tokens, and tokens from the first page of the row's table on."""

    num_new: tuple[int, ...]
    num_keys: tuple[int, ...]


class FlashInferBackend:
    """See the module. One per worker."""

    name = "flashinfer"

    def __init__(self, storage: KvStorage, *, page_size: int) -> None:
        """Raises ValueError where FlashInfer cannot serve this storage, saying why."""
        reason = obstacle(storage)
        if reason is not None:
            raise ValueError(f'engine.attention = "flashinfer" cannot serve this model here: {reason}')
        self._storage = storage
        self._page_size = page_size
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=storage.keys(0).device)
        self._wrappers: dict[AttentionSpec, Any] = {}

    def context(self, sequences: Sequence[PagedSequence]) -> FlashInferContext:
        """See `AttentionBackend`."""
        plan = ForwardPlan(sequences, page_size=self._page_size, limits=_LIMITS)
        num_new = tuple(sequence.num_new for sequence in sequences)
        ends = [sequence.num_context + sequence.num_new for sequence in sequences]
        starts = [sequence.window_start_page * self._page_size for sequence in sequences]
        return FlashInferContext(
            plan,
            self._storage,
            _EagerWrappers(self._wrappers, self._workspace, plan, self._page_size),
            {
                False: _Ragged(num_new, tuple(ends)),
                True: _Ragged(num_new, tuple(end - start for end, start in zip(ends, starts, strict=True))),
            },
        )

    def static_decode(self, tables: DecodeTables) -> StaticDecode:
        """See `StaticDecodeBackend`. FlashInfer plans on the host, before each run of the graph."""
        return _FlashInferDecode(self._storage, self._workspace, tables, page_size=self._page_size)


class _Wrappers(Protocol):
    """One planned wrapper per geometry."""

    def planned(self, spec: AttentionSpec, ragged: _Ragged, dtype: torch.dtype) -> Any:
        """Return the wrapper of the spec's geometry, planned for these lengths; `dtype` is that of all operands."""
        ...


class _EagerWrappers:
    """Wrappers that outlive the forward; each is planned anew when its geometry first comes up in one."""

    def __init__(self, wrappers: dict[AttentionSpec, Any], workspace: Tensor, plan: Plan, page_size: int) -> None:
        self._wrappers, self._workspace = wrappers, workspace
        self._plan, self._page_size = plan, page_size
        self._done: set[AttentionSpec] = set()

    def planned(self, spec: AttentionSpec, ragged: _Ragged, dtype: torch.dtype) -> Any:
        """See `_Wrappers`."""
        kind = replace(spec, index=0)
        if kind not in self._wrappers:
            self._wrappers[kind] = _wrapper_class()(self._workspace, "NHD", backend=_KERNELS)
        if kind not in self._done:
            _plan_wrapper(self._wrappers[kind], spec, ragged, dtype, self._plan.tables, self._page_size)
            self._done.add(kind)
        return self._wrappers[kind]


class _StaticWrappers:
    """Wrappers over buffers at fixed addresses, for a CUDA graph: made in the run before it is recorded, planned again
    by `replan` before each run of it."""

    def __init__(self, workspace: Tensor, tables: DecodeTables, plan: Plan, page_size: int) -> None:
        self._workspace, self._tables = workspace, tables
        self._plan, self._page_size = plan, page_size
        self._wrappers: dict[AttentionSpec, tuple[Any, torch.dtype]] = {}

    def planned(self, spec: AttentionSpec, ragged: _Ragged, dtype: torch.dtype) -> Any:
        """See `_Wrappers`."""
        kind = replace(spec, index=0)
        if kind not in self._wrappers:
            wrapper = self._make(is_window=spec.is_window)
            _plan_wrapper(wrapper, spec, ragged, dtype, self._plan.tables, self._page_size)
            self._wrappers[kind] = wrapper, dtype
        return self._wrappers[kind][0]

    def replan(self, ragged: dict[bool, _Ragged]) -> None:
        """Plan every wrapper for the coming run's lengths."""
        for spec, (wrapper, dtype) in self._wrappers.items():
            _plan_wrapper(wrapper, spec, ragged[spec.is_window], dtype, self._plan.tables, self._page_size)

    def _make(self, *, is_window: bool) -> Any:
        table = self._tables.pages.window if is_window else self._tables.pages.full

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=table.device)

        batch = table.shape[0]
        return _wrapper_class()(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(batch + 1),
            paged_kv_indptr_buf=buffer(batch + 1),
            paged_kv_indices_buf=buffer(table.numel()),
            paged_kv_last_page_len_buf=buffer(batch),
            backend=_KERNELS,
        )


class _FlashInferDecode:
    def __init__(self, storage: KvStorage, workspace: Tensor, tables: DecodeTables, *, page_size: int) -> None:
        self._storage, self._tables, self._page_size = storage, tables, page_size
        plan = DecodePlan(tables.pages, tables.position, page_size=page_size)
        self._wrappers = _StaticWrappers(workspace, tables, plan, page_size)
        self._ragged: dict[bool, _Ragged] = {}

    def prepare(self, rows_B: Sequence[DecodeRow]) -> None:
        """See `StaticDecode`."""
        num_new = (1,) * len(rows_B)
        window = tuple(row.num_tokens - row.window_start_page * self._page_size for row in rows_B)
        self._ragged = {
            False: _Ragged(num_new, tuple(row.num_tokens for row in rows_B)),
            True: _Ragged(num_new, window),
        }
        self._wrappers.replan(self._ragged)

    def context(self) -> FlashInferContext:
        """See `StaticDecode`."""
        plan = DecodePlan(self._tables.pages, self._tables.position, page_size=self._page_size)
        return FlashInferContext(plan, self._storage, self._wrappers, self._ragged)


class FlashInferContext:
    """One forward's attention; see `AttentionContext`."""

    def __init__(self, plan: Plan, storage: KvStorage, wrappers: _Wrappers, ragged: dict[bool, _Ragged]) -> None:
        self._plan = plan
        self._storage = storage
        self._wrappers = wrappers
        self._ragged = ragged

    @torch.no_grad()
    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`; T must be the sum of the sequences' new tokens."""
        if q_TNH.shape[0] != self._plan.num_rows:
            raise ValueError(f"{q_TNH.shape[0]} query rows for sequences of {self._plan.num_rows} new tokens together")
        keys, values = self._storage.keys(spec.index), self._storage.values(spec.index)
        # For what it refuses: a query that would see a window page that is gone.
        self._plan.reads(spec.window_left)
        write = self._plan.write(is_window=spec.is_window)
        store(keys, k_TKH, write)
        store(values, v_TKV, write)
        wrapper = self._wrappers.planned(spec, self._ragged[spec.is_window], keys.dtype)
        q_TNH_stored = q_TNH.to(keys.dtype).contiguous()
        if sink_N is None:
            out_TNV: Tensor = wrapper.run(q_TNH_stored, (keys, values))
            return out_TNV.to(q_TNH.dtype)
        out_TNV, lse_TN = wrapper.run(q_TNH_stored, (keys, values), return_lse=True)
        # Its logarithm is to base 2.
        share_TN = sink_share(lse_TN * math.log(2), sink_N)
        return (out_TNV * share_TN[..., None]).to(q_TNH.dtype)


def _plan_wrapper(
    wrapper: Any, spec: AttentionSpec, ragged: _Ragged, dtype: torch.dtype, tables: PageTables, page_size: int
) -> None:
    num_pages = [-(-keys // page_size) for keys in ragged.num_keys]
    table = tables.window if spec.is_window else tables.full
    wrapper.plan(
        _offsets(ragged.num_new),
        _offsets(num_pages),
        torch.cat([table[row, :count] for row, count in enumerate(num_pages)]).to(torch.int32),
        torch.tensor([(keys - 1) % page_size + 1 for keys in ragged.num_keys], dtype=torch.int32),
        spec.num_heads,
        spec.num_kv_heads,
        spec.qk_dim,
        page_size,
        head_dim_vo=spec.v_dim,
        causal=True,
        sm_scale=spec.scale,
        window_left=-1 if spec.window_left is None else spec.window_left,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


def _wrapper_class() -> Any:
    return getattr(importlib.import_module(_PACKAGE), _WRAPPER)


def _offsets(counts: Sequence[int]) -> Tensor:
    """int32 [B + 1] on the host, where FlashInfer plans."""
    total = torch.zeros(len(counts) + 1, dtype=torch.int32)
    total[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    return total
