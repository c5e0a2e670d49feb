"""The compiled kernel for sequences with few new tokens: `paged_decode.cpp`, built once per machine, called by ctypes.

Shape letters: F rows of queries; N query heads; K KV heads; H query/key width; V value width; P tokens per page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from epd.kernels.base import AttentionSpec, KvStorage
from epd.kernels.native import load_library

DTYPES = (torch.float32, torch.bfloat16)
_SOURCE = Path(__file__).with_name("paged_decode.cpp")
# Tokens per unit of work, as in the source.
_SPLIT_TOKENS = 256


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "page_size",
                "num_kv_heads",
                "groups",
                "qk_dim",
                "v_dim",
                "window_left",
                "num_runs",
                "num_splits",
            )
        ),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One sequence's rows: the first of them in F, the positions they hold, the first position that is seen, and the
    place of the page of logical number `start_page` in the list of pages."""

    row: int
    num_new: int
    num_context: int
    first_key: int
    first_page: int
    start_page: int


class DecodeRuns:
    """The runs of one forward and one reach, with the pages of their pool, int64 on the CPU."""

    def __init__(self, runs: Sequence[DecodeRun], pages: Tensor) -> None:
        self.pages = pages
        self.num_rows = sum(run.num_new for run in runs)
        table = np.empty((len(runs), 6), dtype=np.int64)
        splits = 0
        for i, run in enumerate(runs):
            table[i] = (run.row, run.num_new, run.num_context, run.first_page, run.start_page, splits)
            splits += -(-(run.num_context + run.num_new - run.first_key) // _SPLIT_TOKENS)
        self.table = torch.from_numpy(table)
        self.num_splits = splits


class PagedDecode:
    """The loaded kernel. May be called from any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.mimo_paged_decode
        self._function.argtypes = [*[ctypes.c_int] * 2, ctypes.POINTER(_Shape), *[ctypes.c_void_p] * 7]
        self._function.restype = None

    def attend(
        self,
        spec: AttentionSpec,
        q_FNH: Tensor,
        pages: tuple[Tensor, Tensor],
        runs: DecodeRuns,
        sink_N: Tensor | None,
    ) -> Tensor:
        """Return [F, N, V] in the dtype of the queries where that is one of `DTYPES`, else fp32.

        `pages` are the layer's keys and values, contiguous and of one of `DTYPES`. Sums are cut at fixed places, so a
        sequence's result depends neither on its batch nor on the number of threads.
        """
        keys, values = pages
        q_FNH = (q_FNH if q_FNH.dtype in DTYPES else q_FNH.float()).contiguous()
        sink_N = None if sink_N is None else sink_N.float().contiguous()
        out_FNV = torch.empty((runs.num_rows, spec.num_heads, spec.v_dim), dtype=q_FNH.dtype)
        shape = _Shape(
            keys.shape[1],
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            spec.qk_dim,
            spec.v_dim,
            -1 if spec.window_left is None else spec.window_left,
            runs.table.shape[0],
            runs.num_splits,
            spec.scale,
        )
        self._function(
            int(keys.dtype == torch.bfloat16),
            int(q_FNH.dtype == torch.bfloat16),
            ctypes.byref(shape),
            q_FNH.data_ptr(),
            out_FNV.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            runs.pages.data_ptr(),
            runs.table.data_ptr(),
            None if sink_N is None else sink_N.data_ptr(),
        )
        return out_FNV


def native_misfit(storage: KvStorage, page_size: int) -> str | None:
    """Why the kernel cannot read these pages."""
    dtype = storage.keys(0).dtype
    return None if dtype in DTYPES else f"the compiled kernel reads fp32 and bf16 pages, not {dtype}"


def native_obstacle(device_type: str) -> str | None:
    """Why the kernel cannot be had; compiles it (seconds) where nobody has."""
    if device_type != "cpu":
        return "it runs on CPUs only"
    found = _load()
    return found if isinstance(found, str) else None


def load_native() -> PagedDecode:
    """The kernel. Raises RuntimeError where `native_obstacle` says why there is none."""
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _load() -> PagedDecode | str:
    """The kernel or the reason why there is none; tried once per process."""
    library = load_library(_SOURCE)
    return library if isinstance(library, str) else PagedDecode(library)
