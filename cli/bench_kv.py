"""The cases of `mimo bench kv`: bytes, hits, time to the first token, speed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cli.bench_case import Case
from cli.bench_kv_bytes import byte_cases
from cli.bench_kv_config import DIRECTORY
from cli.bench_kv_hits import hit_cases
from cli.bench_kv_speed import SPEED_PACKAGES, speed_cases
from cli.bench_kv_ttft import ttft_cases

__all__ = ["PACKAGES", "kv_cases", "left_out"]

PACKAGES = (*SPEED_PACKAGES, "numpy", "xxhash")
"""Whose versions matter for the figures."""
_SPEED_NEEDS = "transformers"


def kv_cases(directory: Path | None = None) -> tuple[Case, ...]:
    """All that can run here; workload files come from `directory`, or are those that come along."""
    speed = () if left_out() else speed_cases()
    return (*byte_cases(), *hit_cases(directory or DIRECTORY), *ttft_cases(), *speed)


def left_out() -> str | None:
    """Why some cases cannot run here, None when all can."""
    if find_spec(_SPEED_NEEDS) is not None:
        return None
    names = ", ".join(case.name for case in speed_cases())
    return f"left out: {names}; they need {_SPEED_NEEDS}: pip install 'mimo-epd[test]'"
