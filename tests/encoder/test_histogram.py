"""Histograms that processes keep for others to show."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder import histogram
from encoder.histogram import Histogram, Histograms


@given(st.lists(st.floats(0, 10, allow_nan=False), max_size=40))
def test_every_value_is_counted_in_the_first_bucket_that_holds_it(values: list[float]) -> None:
    bounds = (0.5, 1.0, 5.0)
    kept = Histogram("x_seconds", bounds)
    for value in values:
        kept.observe(value)
    told = kept.told()
    edges = (float("-inf"), *bounds, float("inf"))
    expected = [sum(low < value <= high for value in values) for low, high in pairwise(edges)]
    assert list(told.counts) == expected
    assert told.total == pytest.approx(sum(values))
    assert told.labels == {}


def test_a_histogram_for_each_value_of_the_label() -> None:
    kept = Histograms("step_seconds", (1.0,), "kind")
    assert list(kept.told()) == []
    kept["decode"].observe(0.5)
    kept["prefill"].observe(2.0)
    kept["decode"].observe(0.25)
    assert [(told.labels, told.counts, told.total) for told in kept.told()] == [
        ({"kind": "decode"}, (2, 0), 0.75),
        ({"kind": "prefill"}, (0, 1), 2.0),
    ]


@pytest.mark.parametrize("name", ["STEP_SECONDS", "WAIT_SECONDS", "SIZES", "TOKENS"])
def test_bounds_rise(name: str) -> None:
    bounds = getattr(histogram, name)
    assert list(bounds) == sorted(set(bounds))
