"""Advice about memory: it changes no byte, and is given for whole huge pages only."""

import sys

import pytest
import torch

from epd.kernels.native import prefer_huge_pages


def test_small_memory_is_left_alone() -> None:
    small = torch.arange(1000)
    assert not prefer_huge_pages(small.data_ptr(), small.nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such advice")
def test_large_memory_may_be_advised_and_is_usable() -> None:
    large = torch.empty(8 << 20, dtype=torch.uint8)
    # A kernel without huge pages refuses; either way the memory works.
    prefer_huge_pages(large.data_ptr(), large.nbytes)
    large.fill_(7)
    assert int(large.sum(dtype=torch.int64)) == 7 * large.numel()
