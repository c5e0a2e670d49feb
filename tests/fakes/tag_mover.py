"""A mover of tags instead of bytes, whose copies end when the test says so: late, out of order, or not at all well."""

from __future__ import annotations

from collections.abc import Callable

from epd.kv.copies import CopyFailed, CopyTicket, PageCopies
from tests.oracles.tier_oracle import Memory

__all__ = ["TagMover", "TagTicket"]


class TagTicket:
    """`copy` is what is done when the copy ends well."""

    def __init__(self, copies: PageCopies, copy: Callable[[], None], *, is_load: bool) -> None:
        self.copies = copies
        self.is_load = is_load
        self.state = "pending"
        self.fails = False
        self._copy = copy

    def end(self, *, fails: bool = False) -> None:
        if self.state == "pending":
            self.state = "failed" if fails else "done"
            if not fails:
                self._copy()

    def is_done(self) -> bool:
        return self.state != "pending"

    def wait(self) -> None:
        self.end(fails=self.fails)
        if self.state == "failed":
            raise CopyFailed("the test said so")

    def wait_layer(self, layer_index: int) -> None:
        self.wait()


class TagMover:
    """Copies between the shadow memories of device and host. With `is_instant` every copy has ended at once."""

    def __init__(self, device: Memory, host: Memory, *, is_instant: bool = False) -> None:
        self._device = device
        self._host = host
        self._is_instant = is_instant
        self.fails = False
        """Whether copies asked for from now on end badly where somebody waits for them."""
        self.tickets: list[TagTicket] = []
        """All that were ever asked for."""

    @property
    def pending(self) -> list[TagTicket]:
        return [ticket for ticket in self.tickets if not ticket.is_done()]

    def load(self, copies: PageCopies) -> CopyTicket:
        device, host = self._device, self._host

        def copy() -> None:
            # What is local is read before anything is written, as pages of one copy never overlap.
            local = [device.window[source] for source, _ in copies.local_window]
            for source, target in copies.full:
                device.full[target] = host.full[source]
            for source, target in copies.window:
                device.window[target] = host.window[source]
            for tag, (_, target) in zip(local, copies.local_window, strict=True):
                device.window[target] = tag

        return self._add(TagTicket(copies, copy, is_load=True))

    def save(self, copies: PageCopies) -> CopyTicket:
        device, host = self._device, self._host
        assert not copies.local_window

        def copy() -> None:
            for source, target in copies.full:
                host.full[target] = device.full[source]
            for source, target in copies.window:
                host.window[target] = device.window[source]

        return self._add(TagTicket(copies, copy, is_load=False))

    def _add(self, ticket: TagTicket) -> TagTicket:
        pairs = (ticket.copies.full, (*ticket.copies.window, *ticket.copies.local_window))
        for of_pool in pairs:
            targets = [target for _, target in of_pool]
            assert len(set(targets)) == len(targets), "a page is the target of two copies"
        ticket.fails = self.fails
        self.tickets.append(ticket)
        if self._is_instant:
            ticket.end()
        return ticket
