"""Which rows healing re-runs in which layer, and where their windows lie meanwhile: pure arithmetic.

Healing makes the windows before token N exact in every window layer, so that token N can be computed. Counted back:

    the last window layer must be given exact rows from E on, the first position of the window's first page;
    a layer whose results matter from e on needs, if it is a window layer that sees r tokens back, its own keys and
    values from e - r on: so that is where the results of the layer below begin to matter;
    full layers read keys and values that are there already and ask for nothing more.

Rows in front of that are dropped layer by layer, a trapezoid of about half of all rows and layers; what lies above the
last window layer is not run at all. Each layer starts at the page below its first row, since pages are read whole; the
few rows in between see too short a window, and no row that matters reads them. Near the start of the sequence the first
row is 0, where windows are whole by themselves.

        layer 3  (window)                          .......E########N
        layer 2  (full)                            .......#########N
        layer 1  (window)                  .......#################N
        layer 0  (full)                    s      #################N

Windows that are behind a chunk are let go of: the window pages of a healing sequence are a ring, as long as one window
and one chunk, that ends as the window of token N.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def first_rows(reaches: Sequence[int | None], stop: int, *, page_size: int) -> tuple[int, ...]:
    """First position to run, a multiple of `page_size`, of each layer up to the last window layer.

    `reaches`: of each layer of the trunk, the tokens it sees to its left, None for all; `stop`: N, a multiple of
    `page_size`. Empty without window layers. Not decreasing from layer to layer.
    """
    last = max((index for index, reach in enumerate(reaches) if reach is not None), default=-1)
    widest = max((reach for reach in reaches if reach is not None), default=0)
    needed = max(0, stop - -(-widest // page_size) * page_size)
    rows = []
    for index in range(last, -1, -1):
        # Of the last window layer nothing but its keys and values is wanted.
        needed = max(0, needed - ((reaches[index] or 0) if index < last else 0))
        rows.append(needed // page_size * page_size)
    return tuple(reversed(rows))


def ring_pages(num_heal_pages: int, *, window_pages: int, chunk_pages: int) -> int:
    """Window pages that healing `num_heal_pages` pages takes with chunks of up to `chunk_pages`. A chunk that begins
    inside a page ends a page earlier."""
    return min(num_heal_pages, window_pages + chunk_pages)


@dataclass(frozen=True, slots=True)
class HealRing:
    """Window pages of a healing sequence: place i holds, one after the other, the row pages p with
    (p - `stop_page`) = i modulo `num_places`, so that at the end they hold the last `num_places` before `stop_page`.

    `first_page` is where healing starts; `window_tokens` is the widest reach.
    """

    first_page: int
    stop_page: int
    num_places: int
    window_tokens: int
    page_size: int

    def window_start(self, start: int) -> int:
        """First row page that a chunk from `start` on reads windows of."""
        return max(self.first_page, (start - self.window_tokens) // self.page_size)

    def limit(self, start: int) -> int:
        """Where a chunk from `start` on must end, in tokens, to overwrite no window that it reads."""
        return min(self.stop_page, self.window_start(start) + self.num_places) * self.page_size

    def places(self, start: int, stop: int) -> list[int]:
        """Places of the row pages that the chunk `[start, stop)` reads or writes, from `window_start(start)` on."""
        pages = range(self.window_start(start), -(-stop // self.page_size))
        return [(page - self.stop_page) % self.num_places for page in pages]
