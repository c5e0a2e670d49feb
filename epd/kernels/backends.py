"""The attention backends by name, and which one a worker takes when none is named.

A backend is one row of `BACKENDS`: how it is made, and what keeps it from running on a device. Its module is imported
only when it is asked about, so that a backend's own dependencies cost nothing to those who take another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.kernels.base import AttentionBackend, KvStorage, PagedSequence
from epd.kernels.reference import PagedAttention

AUTO = "auto"


class MakeBackend(Protocol):
    """How a backend is made over one storage of pages."""

    def __call__(self, storage: KvStorage, *, page_size: int) -> AttentionBackend: ...


@dataclass(frozen=True, slots=True)
class BackendKind:
    """One way of attending: `make`, and `obstacle`, which says why it cannot run on a device of the type "cpu" or
    "cuda", in words for a person; None where it can."""

    make: MakeBackend
    obstacle: Callable[[str], str | None]


class ReferenceBackend:
    """Plain torch on any device: the oracle of the others."""

    name = "reference"

    def __init__(self, storage: KvStorage, *, page_size: int) -> None:
        self._storage = storage
        self._page_size = page_size

    def context(self, sequences: Sequence[PagedSequence]) -> PagedAttention:
        """See `AttentionBackend`."""
        return PagedAttention(sequences, self._storage, page_size=self._page_size)


def _none(device_type: str) -> str | None:
    return None


BACKENDS: Mapping[str, BackendKind] = {
    "reference": BackendKind(ReferenceBackend, _none),
}
# What "auto" takes on each type of device: the first that can run there.
AUTO_ORDER: Mapping[str, Sequence[str]] = {
    "cpu": ("reference",),
    "cuda": ("reference",),
}


def make_backend(name: str, storage: KvStorage, *, page_size: int, device_type: str) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest that this device and installation have.

    `device_type` is "cpu" or "cuda". Raises ValueError for an unknown name, or one that cannot run here, saying why.
    """
    if name == AUTO:
        name = next(each for each in AUTO_ORDER[device_type] if BACKENDS[each].obstacle(device_type) is None)
    if name not in BACKENDS:
        raise ValueError(f"engine.attention is {name!r}; allowed: {', '.join((AUTO, *BACKENDS))}")
    obstacle = BACKENDS[name].obstacle(device_type)
    if obstacle is not None:
        raise ValueError(f"engine.attention = {name!r} cannot run on {device_type} here: {obstacle}")
    return BACKENDS[name].make(storage, page_size=page_size)
