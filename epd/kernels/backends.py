"""The attention backends by name, and which one a worker takes when none is named."""

from __future__ import annotations

from collections.abc import Sequence

from epd.kernels.base import AttentionBackend, KvStorage, PagedSequence
from epd.kernels.reference import PagedAttention

BACKENDS = ("auto", "reference")


class ReferenceBackend:
    """Plain torch on any device: the oracle of the others."""

    name = "reference"

    def __init__(self, storage: KvStorage, *, page_size: int) -> None:
        self._storage = storage
        self._page_size = page_size

    def context(self, sequences: Sequence[PagedSequence]) -> PagedAttention:
        """See `AttentionBackend`."""
        return PagedAttention(sequences, self._storage, page_size=self._page_size)


def make_backend(name: str, storage: KvStorage, *, page_size: int, device_type: str) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest that this device and installation have.

    `device_type` is "cpu" or "cuda". Raises ValueError for an unknown name, or one that cannot run here, saying why.
    """
    if name not in BACKENDS:
        raise ValueError(f"engine.attention is {name!r}; allowed: {', '.join(BACKENDS)}")
    return ReferenceBackend(storage, page_size=page_size)
