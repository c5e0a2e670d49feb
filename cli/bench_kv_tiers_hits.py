"""Hits of the agents' workload with little device memory and a host tier behind it, on the real books of both.

Counted, like the other hits: copies take no time, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cli.bench_case import Bars, BenchFailed, Case, Contest, Findings, Panel, Setting
from cli.bench_kv_config import read_workload
from cli.bench_kv_contest import CONTENDERS, Arena
from cli.bench_kv_hits import arena_of, in_words, percent, tally_figures, workload_in_words
from cli.bench_kv_sim import Replay, Tally
from cli.bench_kv_trace import Request
from epd import HostTier, InstantMover, PrefixCache, TieredCache

__all__ = ["hit_tier_cases"]

_WORKLOAD, _MODEL = "agent", "mimo-v2.5-pro"
_SHARES = {"10pct": 0.10, "5pct": 0.05}
_QUICK_FACTOR = 8
"""Of few sessions a tenth holds not even one."""
_HOST_SHARES = (0.25, 0.5, 1.0, 2.0)
_HEADLINE = 1.0
"""Of the working set: what the host holds in the figure of the case."""
_HIT_THRESHOLD = 2


def hit_tier_cases(directory: Path) -> tuple[Case, ...]:
    """`tiers.agent_hit_rate_10pct` and `tiers.agent_hit_rate_5pct`."""
    return tuple(
        Case(
            name=f"tiers.{_WORKLOAD}_hit_rate_{short}",
            unit="hits",
            ours=f"device pools of {percent(share)} of the working set's bytes, and as much host memory as all of it",
            baseline=CONTENDERS["infinite"].words,
            limit="none",
            open=partial(_opened, directory, share),
            max_runs=1,
            is_counted=True,
            check=partial(_check, directory),
        )
        for short, share in _SHARES.items()
    )


@contextmanager
def _opened(directory: Path, share: float, setting: Setting, bars: Bars) -> Iterator[Contest]:
    bars.begin(f"{_WORKLOAD}: drawing sessions", 1)
    arena = arena_of(directory, _WORKLOAD, _MODEL, quick=setting.quick)
    stage = Stage(arena, share * (_QUICK_FACTOR if setting.quick else 1))
    for host_share in (None, 0.0, *_HOST_SHARES):
        words = "infinite" if host_share is None else f"{percent(host_share)} on the host"
        bars.begin(f"{arena.trace.name}: {percent(stage.device_share)} on the device, {words}", stage.num_requests)
        stage.play(host_share, bars.advance)
    yield Contest(
        detail=stage.in_words(),
        ours=lambda: stage.tallies[_HEADLINE].hit_rate,
        baseline=stage.tallies[None].hit_rate,
        findings=lambda: _findings(stage),
    )


def _check(directory: Path) -> None:
    read_workload(_WORKLOAD, directory)


class Stage:
    """The workload's sessions on one size of device pools, with hosts of several sizes."""

    def __init__(self, arena: Arena, device_share: float) -> None:
        """`device_share`: of the working set's bytes, as our pools would hold it. Raises BenchFailed when no session
        fits."""
        self.arena = arena
        self.device_share = device_share
        self.tallies: dict[float | None, Tally] = {}
        """By the host's share of the same bytes; None for a cache that loses nothing."""
        self.plan = arena.plan(self._bytes(device_share))
        room = (self.plan.num_full_pages - 1) * arena.file.cache.page_size
        # Longer contexts nobody could serve with these pools, whatever is behind them.
        self.sessions = [
            (start_s, requests) for start_s, requests in arena.sessions if max(map(_num_tokens, requests)) <= room
        ]
        if not self.sessions:
            raise BenchFailed(f"no session's contexts fit {room:,} tokens, {percent(device_share)} of the working set")
        self.num_requests = sum(len(requests) for _, requests in self.sessions)

    def play(self, host_share: float | None, advance: Callable[[int], None]) -> None:
        """Replay with this much on the host."""
        arena, contender = self.arena, CONTENDERS["infinite" if host_share is None else "ours"]
        cache: PrefixCache | TieredCache
        if host_share is None:
            cache = arena.cache(contender, 1.0)
        else:
            cache = self.cache(host_share)
        heal_cost = arena.geometry.heal_cost if contender.heals else None
        self.tallies[host_share] = Replay(cache, arena.file.server, heal_cost=heal_cost).run(self.sessions, advance)

    def cache(self, host_share: float) -> TieredCache:
        """Empty."""
        plan = self.plan
        device = self.arena.sized_cache(CONTENDERS["ours"], plan.num_full_pages, plan.num_window_pages)
        if host_share == 0:
            return TieredCache(device, host=None, mover=None, store=None, hit_threshold=_HIT_THRESHOLD)
        there = self.arena.plan_host(self._bytes(host_share))
        host = HostTier(num_full_pages=there.num_full_pages, num_window_pages=there.num_window_pages)
        return TieredCache(device, host=host, mover=InstantMover(), store=None, hit_threshold=_HIT_THRESHOLD)

    def in_words(self) -> str:
        num_left_out = len(self.arena.sessions) - len(self.sessions)
        words = (
            f"{workload_in_words(self.arena)}; a working set of {self.arena.working_set_tokens / 1e6:.2f} M tokens, "
            f"{_gib(self._bytes(1))} in our pools; {_gib(self._bytes(self.device_share))} on the device "
            f"({self.plan.num_full_pages:,} full and {self.plan.num_window_pages:,} window pages), "
            f"{_gib(self._bytes(_HEADLINE))} on the host"
        )
        return words + (
            f"; {num_left_out} sessions with contexts longer than the device left out" if num_left_out else ""
        )

    def host_gib(self, host_share: float) -> float:
        return self._bytes(host_share) / 2**30

    def _bytes(self, share: float) -> int:
        return int(share * self.arena.dual_working_set_bytes)


def _num_tokens(request: Request) -> int:
    return request.num_prompt_tokens + request.num_answer_tokens


def _findings(stage: Stage) -> Findings:
    ceiling = stage.tallies[None].hit_rate
    played = {share: tally for share, tally in stage.tallies.items() if share is not None}
    lines = [f"{_name(stage, share)}: {in_words(tally, ceiling)}" for share, tally in played.items()]
    lines.append(f"infinite: {ceiling:.2%}")
    points = [(100 * share, tally.hit_rate) for share, tally in played.items() if share]
    return Findings(
        lines=tuple(lines),
        figures={
            "working_set_bytes": stage.arena.dual_working_set_bytes,
            "device_bytes": int(stage.device_share * stage.arena.dual_working_set_bytes),
            "device_pages": [stage.plan.num_full_pages, stage.plan.num_window_pages],
            "sessions_left_out": len(stage.arena.sessions) - len(stage.sessions),
            "points_below_infinite": round(100 * (ceiling - played[_HEADLINE].hit_rate), 3),
            "by_host_share": {str(share): _figures(tally, ceiling) for share, tally in played.items()},
        },
        panels=(
            Panel(
                title=f"{stage.arena.trace.name}, {_MODEL}, a device behind which is a host",
                x_label="bytes on the host, % of the working set",
                y_label="prompt tokens not computed",
                curves={
                    f"{percent(stage.device_share)} on the device": points,
                    f"infinite, beside {percent(stage.device_share)}": [(x, ceiling) for x, _ in points],
                },
            ),
        ),
    )


def _name(stage: Stage, host_share: float) -> str:
    return f"with {_gib(host_share * stage.arena.dual_working_set_bytes)} on the host" if host_share else "device alone"


def _figures(tally: Tally, ceiling: float) -> dict[str, Any]:
    return tally_figures(tally, ceiling) | {"host_tokens": tally.host}


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
