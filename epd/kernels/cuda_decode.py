"""What a backend must offer so that decode steps can be held in CUDA graphs.

Shape letters: B rows of the graph, padded ones among them; F, W pages of a row of the full and the window table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from epd.kernels.base import AttentionContext
from epd.kernels.cuda_plan import PageTables


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Tensors at fixed addresses that describe one decode step, overwritten before each run of the graph.

    Row b computes the token at `position[b]`. `pages.full` [B, F] holds its pages from the first on; `pages.window`
    [B, W] those from logical page `pages.window_start[b]` on, which is where the widest window of the model begins.
    Entries after the page of `position[b]` may be any valid page.
    """

    pages: PageTables
    position: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """What the host knows of a row: its tokens, the new one among them, and the logical page its window begins with."""

    num_tokens: int
    window_start_page: int


class StaticDecode(Protocol):
    """Decode of one shape."""

    def prepare(self, rows_B: Sequence[DecodeRow]) -> None:
        """Do what must be done on the host before a run.

        Called outside the graph, before each run of it, after the tables have been written.
        """
        ...

    def context(self) -> AttentionContext:
        """Return the attention of one forward over the tables; called inside the graph, once per recording."""
        ...


@runtime_checkable
class StaticDecodeBackend(Protocol):
    """A backend whose decode has fixed shapes and does not wait for the device."""

    def static_decode(self, tables: DecodeTables) -> StaticDecode:
        """Return the decode of the shape that the tables have."""
        ...
