"""The one class of FlashInfer that the backend calls, with the signatures of flashinfer-python 0.7.4 and plain loops in
place of its kernels. It refuses what the real one refuses: buffers missing or too small, lengths that do not add up."""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Paged keys and values in layout "NHD": [num_pages, page_size, num_kv_heads, width]."""

    num_plans = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._buffers = [each for each in buffers if each is not None]
        assert len(self._buffers) == (4 if use_cuda_graph else 0)
        assert all(each.dtype == torch.int32 for each in self._buffers)
        self._planned: dict[str, Any] | None = None

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Marks versions that take keys and values of different strides."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(each.dtype == torch.int32 for each in given)
        assert int(paged_kv_indptr[-1]) == paged_kv_indices.shape[0]
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        if self._buffers:
            assert len(qo_indptr) == len(self._buffers[0]), "the batch size of a graph is fixed"
            assert len(paged_kv_indices) <= len(self._buffers[2]), "more pages than the buffer holds"
            for buffer, each in zip(self._buffers, given, strict=True):
                buffer[: len(each)].copy_(each)
            given = self._buffers
        type(self).num_plans += 1
        self._planned = {
            "indptr": given,
            "page_size": page_size,
            "shape": (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk),
            "scale": 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
            "window_left": window_left,
            "dtypes": (q_data_type, kv_data_type or q_data_type),
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False) -> Any:
        assert self._planned is not None, "run before plan"
        plan, (keys, values) = self._planned, paged_kv_cache
        heads, kv_heads, qk_dim, v_dim = plan["shape"]
        assert (q.dtype, keys.dtype) == plan["dtypes"]
        assert q.is_contiguous()
        assert tuple(q.shape[1:]) == (heads, qk_dim)
        assert tuple(keys.shape[1:]) == (plan["page_size"], kv_heads, qk_dim)
        assert tuple(values.shape[1:]) == (plan["page_size"], kv_heads, v_dim)
        qo_indptr, kv_indptr, indices, last_len = (each.tolist() for each in plan["indptr"])
        assert q.shape[0] == qo_indptr[-1]
        out, lse = q.new_zeros(q.shape[0], heads, v_dim), torch.zeros(q.shape[0], heads)
        for row in range(len(last_len)):
            pages = indices[kv_indptr[row] : kv_indptr[row + 1]]
            num_keys = (len(pages) - 1) * plan["page_size"] + last_len[row]
            k = keys[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(heads // kv_heads, dim=1)
            v = values[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(heads // kv_heads, dim=1)
            start, stop = qo_indptr[row], qo_indptr[row + 1]
            score = torch.einsum("qnh,snh->nqs", q[start:stop].float(), k) * plan["scale"]
            distance = torch.arange(num_keys - (stop - start), num_keys)[:, None] - torch.arange(num_keys)
            seen = distance >= 0
            if plan["window_left"] >= 0:
                seen &= distance <= plan["window_left"]
            score = score.masked_fill(~seen, float("-inf"))
            out[start:stop] = torch.einsum("nqs,snv->qnv", score.softmax(-1), v).to(q.dtype)
            lse[start:stop] = score.logsumexp(-1).T / math.log(2)
        return (out, lse) if return_lse else out


def module() -> ModuleType:
    """The package as `import flashinfer` would give it."""
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return fake
