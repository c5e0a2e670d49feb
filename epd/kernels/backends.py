"""The attention backends by name, and which one a worker takes when none is named.

A backend is one row of `BACKENDS`: how it is made, and what keeps it from running on a device. Its module is imported
only when it is asked about, so that a backend's own dependencies cost nothing to those who take another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.kernels.base import AttentionBackend, KvStorage, PagedSequence
from epd.kernels.reference import PagedAttention

logger = logging.getLogger(__name__)

AUTO = "auto"


class MakeBackend(Protocol):
    """How a backend is made over one storage of pages."""

    def __call__(self, storage: KvStorage, *, page_size: int) -> AttentionBackend: ...


@dataclass(frozen=True, slots=True)
class BackendKind:
    """One way of attending: `make`, and `obstacle`, which says why it cannot run on a device of the type "cpu" or
    "cuda", in words for a person; None where it can. `misfit` says the same of pages of one shape and dtype."""

    make: MakeBackend
    obstacle: Callable[[str], str | None]
    misfit: Callable[[KvStorage, int], str | None] = lambda storage, page_size: None


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


def _cuda_only(device_type: str) -> str | None:
    return None if device_type == "cuda" else "it runs on CUDA devices only"


def _cpu_only(device_type: str) -> str | None:
    return None if device_type == "cpu" else "it runs on CPUs only"


def _make_cpu(storage: KvStorage, *, page_size: int) -> AttentionBackend:
    from epd.kernels.paged import make_cpu

    return make_cpu(storage, page_size=page_size)


def _cpu_obstacle(device_type: str) -> str | None:
    from epd.kernels.paged_native import native_obstacle

    return native_obstacle(device_type)


def _cpu_misfit(storage: KvStorage, page_size: int) -> str | None:
    from epd.kernels.paged_native import native_misfit

    return native_misfit(storage, page_size)


def _make_cpu_torch(storage: KvStorage, *, page_size: int) -> AttentionBackend:
    from epd.kernels.paged import make_cpu_torch

    return make_cpu_torch(storage, page_size=page_size)


def _make_sdpa(storage: KvStorage, *, page_size: int) -> AttentionBackend:
    from epd.kernels.cuda_sdpa import SdpaBackend

    return SdpaBackend(storage, page_size=page_size)


def _make_flex(storage: KvStorage, *, page_size: int) -> AttentionBackend:
    from epd.kernels.flex import FlexBackend

    return FlexBackend(storage, page_size=page_size)


def _flex_misfit(storage: KvStorage, page_size: int) -> str | None:
    from epd.kernels.flex import compile_obstacle

    # On a CPU it is not compiled.
    if storage.keys(0).device.type == "cpu":
        return None
    return compile_obstacle(storage, page_size=page_size)


def _make_flashinfer(storage: KvStorage, *, page_size: int) -> AttentionBackend:
    from epd.kernels.flashinfer import FlashInferBackend

    return FlashInferBackend(storage, page_size=page_size)


def _flashinfer_misfit(storage: KvStorage, page_size: int) -> str | None:
    from epd.kernels.flashinfer import obstacle

    return obstacle(storage)


BACKENDS: Mapping[str, BackendKind] = {
    "reference": BackendKind(ReferenceBackend, _none),
    "cpu": BackendKind(_make_cpu, _cpu_obstacle, _cpu_misfit),
    "cpu-torch": BackendKind(_make_cpu_torch, _cpu_only),
    "sdpa": BackendKind(_make_sdpa, _none),
    "flex": BackendKind(_make_flex, _none, _flex_misfit),
    "flashinfer": BackendKind(_make_flashinfer, _cuda_only, _flashinfer_misfit),
}
# What "auto" takes on each type of device: the first that can run there.
AUTO_ORDER: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "cpu-torch"),
    "cuda": ("flashinfer", "flex", "sdpa"),
}


def make_backend(name: str, storage: KvStorage, *, page_size: int, device_type: str) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest that this device and installation have.

    `device_type` is "cpu" or "cuda". Raises ValueError for an unknown name, or one that cannot run here, saying why.
    """
    if name == AUTO:
        return _first_that_fits(storage, page_size, device_type)
    if name not in BACKENDS:
        raise ValueError(f"engine.attention is {name!r}; allowed: {', '.join((AUTO, *BACKENDS))}")
    reason = _reason_against(name, storage, page_size, device_type)
    if reason is not None:
        raise ValueError(f"engine.attention = {name!r} cannot run on {device_type} here: {reason}")
    return BACKENDS[name].make(storage, page_size=page_size)


def _first_that_fits(storage: KvStorage, page_size: int, device_type: str) -> AttentionBackend:
    """The first of the device's order, with one line in the log about those before it; the last one always fits."""
    passed_over: list[str] = []
    for name in AUTO_ORDER[device_type]:
        reason = _reason_against(name, storage, page_size, device_type)
        if reason is None:
            if passed_over:
                logger.info('attention: "%s", since %s', name, "; ".join(passed_over))
            return BACKENDS[name].make(storage, page_size=page_size)
        passed_over.append(f'"{name}" cannot: {reason}')
    raise ValueError(f"no attention backend runs on {device_type} here: {'; '.join(passed_over)}")


def _reason_against(name: str, storage: KvStorage, page_size: int, device_type: str) -> str | None:
    kind = BACKENDS[name]
    obstacle = kind.obstacle(device_type)
    return kind.misfit(storage, page_size) if obstacle is None else obstacle
