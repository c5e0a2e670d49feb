"""A workload file of configs/bench: read once, every key checked against the dataclass it fills."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cli.bench_kv_bounds import Rising, Shares, Span
from cli.bench_kv_sim import ServerTimes
from cli.bench_kv_trace import Trace
from cli.bench_kv_workloads import AgentWorkload, ConversationWorkload, Sessions, SyntheticWorkload, Workload
from cli.load import CONFIGS, ConfigError

__all__ = ["WORKLOADS", "Budget", "CacheSettings", "WorkloadFile", "read_workload"]

WORKLOADS: Mapping[str, type[Workload]] = {
    "agent": AgentWorkload,
    "conversation": ConversationWorkload,
    "synthetic": SyntheticWorkload,
}
DIRECTORY = CONFIGS / "bench"

Distance = Annotated[int, Span(0, 1 << 30)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Of the cache as it is meant to run; the fields are those of `RetentionPolicy`."""

    page_size: Annotated[int, Span(1, 1024)]
    retention_stride_tokens: Distance
    dense_retention_tokens: Distance
    release_interval_tokens: Annotated[int, Span(1, 1 << 30)]
    at_chunk_ends: bool
    long_prompt_tokens: Distance
    long_stride_tokens: Distance
    learns_branches: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes for the pools, as shares of what a single pool would need for the workload's working set."""

    headline: Annotated[float, Span(0.01, 100)]
    sweep: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """What `--quick` plays: fewer sessions, on a server that holds less at a time, with fewer budgets."""

    num_sessions: Sessions
    max_running: Annotated[int, Span(1, 4096)]
    sweep: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFile:
    workload: Workload
    server: ServerTimes
    cache: CacheSettings
    budget: Budget
    quick: Quick

    def trace(self, *, quick: bool) -> Trace:
        return self.workload.trace(self.quick.num_sessions if quick else None)

    def as_played(self, *, quick: bool) -> WorkloadFile:
        """With what `[quick]` says in its places, if so."""
        if not quick:
            return self
        server = replace(self.server, max_running=self.quick.max_running)
        return replace(self, server=server, budget=replace(self.budget, sweep=self.quick.sweep))


def read_workload(name: str, directory: Path = DIRECTORY) -> WorkloadFile:
    """`name`.toml. Raises ConfigError naming file, section and field, the value, and what is allowed."""
    path = directory / f"{name}.toml"
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"workload {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"workload {path} is not TOML: {error}") from error
    sections = {**get_type_hints(WorkloadFile), "workload": WORKLOADS[name]}
    _check_keys(f"{path}: section", raw, list(sections), needed=list(sections))
    return WorkloadFile(**{name: _made(path, name, raw[name], owner) for name, owner in sections.items()})


def _made(path: Path, where: str, raw: object, owner: Any) -> Any:
    """A section, or a shape inside one, as a value of its class; a field's type and its Span or Rising are kept."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: {where} is {raw!r:.80}; allowed: a table")
    needed = [field.name for field in fields(owner) if field.default is MISSING]
    _check_keys(f"{path}: {where}", raw, [field.name for field in fields(owner)], needed=needed)
    hints = get_type_hints(owner, include_extras=True)
    values = {}
    for key, value in raw.items():
        hint = hints[key]
        make = _made if is_dataclass(hint) else _checked
        values[key] = make(path, f"{where}.{key}", value, hint)
    try:
        return owner(**values)
    except ValueError as error:
        # What its fields must be together.
        raise ConfigError(f"{path}: {where}: {error}") from error


def _checked(path: Path, where: str, raw: object, hint: Any) -> object:
    if hint is bool:
        if isinstance(raw, bool):
            return raw
        raise ConfigError(f"{path}: {where} is {raw!r:.80}; allowed: true, false")
    assert get_origin(hint) is Annotated, f"{where} has no bounds"
    kind, bounds = get_args(hint)
    is_list = isinstance(bounds, Rising)
    number = get_args(kind)[0] if is_list else kind
    parts = raw if is_list and isinstance(raw, list) else [raw]
    is_right = isinstance(raw, list) == is_list and all(_is_number(part, number) for part in parts)
    if not is_right or not bounds.holds(tuple(parts) if is_list else raw):
        noun = "" if is_list else "a whole number " if number is int else "a number "
        raise ConfigError(f"{path}: {where} is {raw!r:.80}; allowed: {noun}{bounds.words}")
    return tuple(parts) if is_list else raw


def _is_number(value: object, kind: type) -> bool:
    """A whole number is a number too; true and false are none."""
    return not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))


def _check_keys(where: str, raw: Mapping[str, object], allowed: list[str], *, needed: list[str]) -> None:
    unknown = [key for key in raw if key not in allowed]
    if unknown:
        raise ConfigError(f"{where} {unknown[0]!r} is unknown; allowed: {', '.join(allowed)}")
    missing = [key for key in needed if key not in raw]
    if missing:
        raise ConfigError(f"{where} has no {missing[0]!r}; needed: {', '.join(needed)}")
