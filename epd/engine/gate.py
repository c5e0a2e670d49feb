"""A forward over pages that are still arriving: each layer waits for its own pages, and for no others.

So a step can begin while its cached pages are on their way from host memory: what is before a layer's attention is
computed while the layer's bytes are copied.
"""

from collections.abc import Sequence

from torch import Tensor

from epd.engine.plan import SequenceStep
from epd.kernels.base import AttentionBackend, AttentionContext, AttentionSpec, PagedSequence
from epd.kv.copies import CopyTicket


def arrivals_of(steps: Sequence[SequenceStep]) -> tuple[CopyTicket, ...]:
    """What the steps have to wait for, each ticket once. Raises CopyFailed for what has already failed."""
    tickets = {id(step.arrival): step.arrival for step in steps if step.arrival is not None}
    under_way = []
    for ticket in tickets.values():
        if ticket.is_done():
            ticket.wait()
        else:
            under_way.append(ticket)
    return tuple(under_way)


class GatedAttention:
    """A backend whose contexts wait for what arrives; see `AttentionBackend`."""

    def __init__(self, attention: AttentionBackend, arrivals: Sequence[CopyTicket]) -> None:
        self._attention = attention
        self._arrivals = arrivals

    @property
    def name(self) -> str:
        """As in `engine.attention`."""
        return self._attention.name

    def context(self, sequences: Sequence[PagedSequence]) -> AttentionContext:
        """One forward over these sequences. Its `attend` raises CopyFailed when a layer's pages will never come."""
        return _GatedContext(self._attention.context(sequences), self._arrivals)


class _GatedContext:
    def __init__(self, context: AttentionContext, arrivals: Sequence[CopyTicket]) -> None:
        self._context = context
        self._arrivals = arrivals

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """See `AttentionContext`."""
        # Before new keys are written, too: an arriving page that is not full is written to by whoever goes on in it.
        for ticket in self._arrivals:
            ticket.wait_layer(spec.index)
        return self._context.attend(spec, q_TNH, k_TKH, v_TKV, sink_N)


def gated(attention: AttentionBackend, arrivals: Sequence[CopyTicket]) -> AttentionBackend:
    """The backend for a step: itself when nothing is on its way."""
    return GatedAttention(attention, arrivals) if arrivals else attention
