"""Runs of pages, and a mover that moves nothing."""

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.kv.copies import DONE, InstantMover, PageCopies, runs_of


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), unique_by=lambda pair: pair[1]))
def test_runs_name_every_pair_once(pairs: list[tuple[int, int]]) -> None:
    runs = runs_of(pairs)
    assert sorted((s + i, t + i) for s, t, count in runs for i in range(count)) == sorted(pairs)
    # As few as there can be: no run goes on where another ends.
    ends = {(source + count, target + count) for source, target, count in runs}
    assert not ends & {(source, target) for source, target, _ in runs}


def test_pages_in_any_order_make_one_run() -> None:
    pairs = [(page, page + 7) for page in range(100)]
    random.Random(1).shuffle(pairs)
    assert runs_of(pairs) == [(0, 7, 100)]
    assert runs_of([]) == []


def test_the_instant_mover_counts_and_is_done() -> None:
    mover = InstantMover()
    ticket = mover.load(PageCopies(full=((0, 1), (1, 2)), window=((3, 4),), local_window=((5, 6),)))
    assert ticket is DONE
    assert ticket.is_done()
    ticket.wait()
    ticket.wait_layer(3)
    assert mover.save(PageCopies(full=((1, 0),))).is_done()
    assert (mover.num_loaded_pages, mover.num_saved_pages) == (4, 1)
    with pytest.raises(ValueError, match="local_window"):
        mover.save(PageCopies(local_window=((1, 0),)))


def test_books_need_no_torch() -> None:
    code = "import sys, epd.kv.copies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
