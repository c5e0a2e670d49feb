"""A workload file of configs/bench: read once, every key checked against the dataclass it fills."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from cli.bench_kv_sim import ServerTimes
from cli.bench_kv_trace import Trace
from cli.bench_kv_workloads import AgentWorkload, ConversationWorkload, SyntheticWorkload, Workload
from cli.load import CONFIGS, ConfigError

__all__ = ["WORKLOADS", "Budget", "CacheSettings", "WorkloadFile", "read_workload"]

WORKLOADS: Mapping[str, type[Workload]] = {
    "agent": AgentWorkload,
    "conversation": ConversationWorkload,
    "synthetic": SyntheticWorkload,
}
DIRECTORY = CONFIGS / "bench"

SectionT = TypeVar("SectionT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Of the cache as it is meant to run; the fields are those of `RetentionPolicy`."""

    page_size: int
    retention_stride_tokens: int
    dense_retention_tokens: int
    release_interval_tokens: int
    at_chunk_ends: bool
    long_prompt_tokens: int
    long_stride_tokens: int
    learns_branches: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes for the pools, as shares of what a single pool would need for the workload's working set."""

    headline: float
    sweep: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sweep or min(self.headline, *self.sweep) <= 0:
            raise ValueError("shares must be above 0, and sweep must name some")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """What `--quick` plays."""

    num_sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFile:
    workload: Workload
    server: ServerTimes
    cache: CacheSettings
    budget: Budget
    quick: Quick

    def trace(self, *, quick: bool) -> Trace:
        return self.workload.trace(self.quick.num_sessions if quick else None)


def read_workload(name: str, directory: Path = DIRECTORY) -> WorkloadFile:
    """`name`.toml. Raises ConfigError naming file, key, and what is allowed."""
    path = directory / f"{name}.toml"
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"workload {path}: {error}") from error
    sections = {**get_type_hints(WorkloadFile), "workload": WORKLOADS[name]}
    _check_keys(f"{path.name}: section", raw, list(sections), needed=list(sections))
    filled = {section: _filled(f"{path.name}: {section}", raw[section], owner) for section, owner in sections.items()}
    return WorkloadFile(**filled)


def _filled(where: str, raw: object, owner: type[SectionT]) -> SectionT:
    _check_tree(where, raw, owner)
    try:
        return msgspec.convert(raw, type=owner)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_tree(where: str, raw: object, owner: Any) -> None:
    """Tables inside tables too: msgspec passes over keys it does not know."""
    if not isinstance(raw, dict) or not is_dataclass(owner):
        return
    needed = [field.name for field in fields(owner) if field.default is MISSING]
    _check_keys(where, raw, [field.name for field in fields(owner)], needed=needed)
    hints = get_type_hints(owner)
    for key, value in raw.items():
        _check_tree(f"{where}.{key}", value, hints[key])


def _check_keys(where: str, raw: Mapping[str, object], allowed: list[str], *, needed: list[str]) -> None:
    unknown = [key for key in raw if key not in allowed]
    if unknown:
        raise ConfigError(f"{where} {unknown[0]!r} is unknown; allowed: {', '.join(allowed)}")
    missing = [key for key in needed if key not in raw]
    if missing:
        raise ConfigError(f"{where} has no {missing[0]!r}; needed: {', '.join(needed)}")
