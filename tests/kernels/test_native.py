"""Advice about memory: it changes no byte, and is given for whole huge pages only."""

import sys
from pathlib import Path

import pytest
import torch

from epd.kernels.native import load_library, prefer_huge_pages


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


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "it ended with 3 and said nothing"),
        ("echo 'no header' >&2; echo \"found 'x'\" >&2; exit 1", "it ended with 1: no header found 'x'"),
    ],
)
def test_a_compiler_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    source = tmp_path / "kernel.cpp"
    source.write_text("")
    monkeypatch.setenv("CXX", str(compiler))
    assert load_library(source) == f"the kernel could not be built with {compiler}: {reason}"
