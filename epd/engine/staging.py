"""Room for KV that arrives before its sequence has a place: pages of the host tier.

A decode worker may be sent more prompts than it has device pages for. What comes is written into host pages at once, so
the buffers it came in are free again, and when the sequence gets its place its pages are loaded like any others in host
memory, beside the forward. They stay there afterwards, for whoever begins with the same prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from encoder.wire import TensorFrame
from epd.cache.tiers.tiered import StagedPages, TieredCache
from epd.engine.handoff import kv_frames, tail_frames
from epd.engine.plan import HeldTransfer
from epd.kv.copies import runs_of
from epd.kv.host_storage import HostStorage


class KvStager:
    """Puts transfers into the host tier of one worker's cache."""

    def __init__(self, cache: TieredCache, host: HostStorage | None) -> None:
        """`host` is the memory of the cache's host tier, None where there is no tier, or no bytes behind its pages."""
        self._cache = cache
        self._host = host
        self.num_unstaged = 0
        """Transfers for which the host tier had no room."""

    def stage(self, keys: Sequence[bytes], held: HeldTransfer) -> HeldTransfer:
        """The transfer with its KV in host pages, or as it came where there is no room.

        `keys` are those of the prompt's pages, and the transfer is one that `KvMover.refusal` finds nothing wrong with.
        Whoever gets the staged pages either resumes from them or gives them back, once; see `TieredCache.stage`.
        """
        if self._cache.host is None:
            return held
        staged = self._cache.stage(keys, held.transfer.num_tokens)
        if staged is None:
            self.num_unstaged += 1
            return held
        if self._host is not None:
            write_staged(self._host, held, staged)
        return replace(held, tensors=tail_frames(held), staged=staged)


def write_staged(host: HostStorage, held: HeldTransfer, staged: StagedPages) -> None:
    """Fill the host pages that `staged` names from the transfer's tensors."""
    transfer, frames = held.transfer, iter(kv_frames(held))
    layout = host.layout
    for layers, pairs, first_page in (
        (layout.full_layers, staged.full, transfer.first_full_page),
        (layout.window_layers, staged.window, transfer.first_window_page),
    ):
        runs = runs_of(pairs)
        for spec in layers:
            for view in host.layer_views(spec.index):
                pages, target_pages = _pages(next(frames)), view.numpy()
                for page, target, num_pages in runs:
                    target_pages[target : target + num_pages] = pages[page - first_page : page - first_page + num_pages]


def _pages(frame: TensorFrame) -> NDArray[np.uint8]:
    """uint8 [pages, bytes]: a view of the frame."""
    return np.frombuffer(frame.data, dtype=np.uint8).reshape(frame.shape[0], -1)
