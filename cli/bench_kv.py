"""The cases of `mimo bench kv`: bytes, hits, time to the first token, speed; and those of its `--tiers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cli.bench_case import Case
from cli.bench_kv_bytes import byte_cases
from cli.bench_kv_config import DIRECTORY
from cli.bench_kv_hits import hit_cases
from cli.bench_kv_speed import SPEED_PACKAGES, speed_cases
from cli.bench_kv_tiers import ttft_tier_cases
from cli.bench_kv_ttft import ttft_cases

__all__ = ["PACKAGES", "kv_cases", "tier_cases"]

PACKAGES = (*SPEED_PACKAGES, "numpy", "xxhash")
"""Whose versions matter for the figures."""


def kv_cases(directory: Path | None = None) -> tuple[Case, ...]:
    """Workload files come from `directory`, or are those that come along."""
    speed = (replace(case, needs="transformers") for case in speed_cases())
    return (*byte_cases(), *hit_cases(directory or DIRECTORY), *ttft_cases(), *speed)


def tier_cases(directory: Path | None = None) -> tuple[Case, ...]:
    """Of the tiers behind the device; as above."""
    from cli.bench_kv_store import store_cases
    from cli.bench_kv_tiers_hits import hit_tier_cases

    return (*ttft_tier_cases(), *hit_tier_cases(directory or DIRECTORY), *store_cases())
