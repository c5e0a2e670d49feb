"""The cases of `mimo bench kv` that count hits: one workload, one budget, caches of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from cli.bench_case import Bars, BenchFailed, Case, Contest, Findings, Panel, Setting
from cli.bench_kv_config import WORKLOADS, read_workload
from cli.bench_kv_contest import CONTENDERS, Arena, Geometry
from cli.bench_kv_sim import Tally

__all__ = ["arena_of", "hit_cases", "in_words", "percent", "tally_figures", "workload_in_words"]

_PRO, _V25 = "mimo-v2.5-pro", "mimo-v2.5"
_SWEPT = ("ours", "no healing", "plain LRU", "plain LRU, no healing", "no dense, no healing", "single pool")
_TOLD_OF_V25 = ("ours", "no healing", "plain LRU, no healing", "single pool", "infinite")
_MIB = 1 << 20
_MOST_PAGES = 100_000_000
"""What a replay looks up: ten times as many as the agents' come along with, and a few GiB of memory."""
# What stands against ours, by the end of the case's name.
_RIVALS = {
    "vs_single": "single pool",
    "vs_lru": "plain LRU",
    "vs_lru_no_heal": "plain LRU, no healing",
    "vs_ends_only": "no dense retention",
}


def hit_cases(directory: Path) -> tuple[Case, ...]:
    """Of the workload files in `directory`, which are read when a case is opened."""
    cases = []
    for workload in WORKLOADS:
        case = partial(_case, directory, workload)
        cases.append(case("hit_rate", "ours", "infinite", tells=tuple(CONTENDERS)))
        cases.append(case("hit_rate_no_heal", "no healing", "infinite"))
        cases += [case(f"hit_rate_{end}", "ours", rival, limit="infinite") for end, rival in _RIVALS.items()]
        if workload == "agent":
            cases.append(case("hit_rate_v25", "ours", "infinite", tells=_TOLD_OF_V25, model=_V25))
        cases.append(_capacity_case(directory, workload))
        cases.append(_sweep_case(directory, workload))
    return tuple(cases)


@cache
def arena_of(directory: Path, workload: str, model: str, *, quick: bool) -> Arena:
    """One for all cases of a run, so that nothing is replayed twice. Raises ConfigError, or BenchFailed."""
    file = read_workload(workload, directory).as_played(quick=quick)
    trace = file.trace(quick=quick)
    if not trace.sessions:
        raise BenchFailed(f"{workload}.toml: no session was drawn; allowed: more sessions, or another seed")
    num_pages = trace.num_prompt_tokens // file.cache.page_size
    if num_pages > _MOST_PAGES:
        raise BenchFailed(
            f"{workload}.toml: prompts have {num_pages:,} pages in all; allowed: up to {_MOST_PAGES:,}, by fewer or "
            "shorter sessions or a larger cache.page_size"
        )
    return Arena(file, trace, Geometry.of(model, file.cache.page_size))


def _case(
    directory: Path,
    workload: str,
    name: str,
    ours: str,
    rival: str,
    *,
    limit: str = "",
    tells: tuple[str, ...] = (),
    model: str = _PRO,
) -> Case:
    words = {who: contender.words for who, contender in CONTENDERS.items()}

    @contextmanager
    def opened(setting: Setting, bars: Bars) -> Iterator[Contest]:
        bars.begin(f"{workload}: drawing sessions", 1)
        arena = arena_of(directory, workload, model, quick=setting.quick)
        share = arena.file.budget.headline
        wanted = tells or [who for who in (ours, rival, limit) if who]
        tallies = {who: _played(arena, who, share, bars) for who in wanted}
        yield Contest(
            detail=_detail(arena, share),
            ours=lambda: tallies[ours].hit_rate,
            baseline=tallies[rival].hit_rate,
            limit=tallies[limit].hit_rate if limit else None,
            findings=lambda: _findings(arena, tallies) if tells else Findings(),
        )

    return Case(
        name=f"kv.{workload}_{name}",
        unit="hits",
        ours=words[ours],
        baseline=words[rival] + (", same bytes" if rival != "infinite" else ""),
        limit=words[limit] if limit else "none",
        open=opened,
        max_runs=1,
        is_counted=True,
        check=partial(_check, directory, workload),
    )


def _capacity_case(directory: Path, workload: str) -> Case:
    @contextmanager
    def opened(setting: Setting, bars: Bars) -> Iterator[Contest]:
        bars.begin(f"{workload}: drawing sessions", 1)
        arena = arena_of(directory, workload, _PRO, quick=setting.quick)
        share = arena.file.budget.headline
        budget_mib = arena.budget_bytes(share) / _MIB
        ours, single = (_played(arena, who, share, bars) for who in ("ours", "single pool"))
        yield Contest(
            detail=_detail(arena, share),
            ours=lambda: ours.peak_cached / budget_mib,
            baseline=single.peak_cached / budget_mib,
            limit=_MIB / arena.geometry.layout.full_bytes_per_token,
        )

    return Case(
        name=f"kv.{workload}_capacity",
        unit="tok/MiB",
        ours="tokens that can be found at once, both pools' bytes counted",
        baseline="the same of a single pool of as many bytes",
        limit="windows cost nothing",
        open=opened,
        max_runs=1,
        is_counted=True,
        check=partial(_check, directory, workload),
    )


def _sweep_case(directory: Path, workload: str) -> Case:
    @contextmanager
    def opened(setting: Setting, bars: Bars) -> Iterator[Contest]:
        bars.begin(f"{workload}: drawing sessions", 1)
        arena = arena_of(directory, workload, _PRO, quick=setting.quick)
        shares = arena.file.budget.sweep
        curves = {who: [(share, _played(arena, who, share, bars)) for share in shares] for who in _SWEPT}
        ceiling = _played(arena, "infinite", shares[0], bars)
        yield Contest(
            detail=f"{workload_in_words(arena)}; budgets of {', '.join(map(percent, shares))} of the working set",
            ours=lambda: _mean(curves["ours"]),
            baseline=_mean(curves["single pool"]),
            limit=ceiling.hit_rate,
            findings=lambda: _sweep_findings(arena, curves, ceiling),
        )

    return Case(
        name=f"kv.{workload}_sweep",
        unit="hits",
        ours="ours, mean over the budgets",
        baseline="a single pool, mean over the budgets",
        limit=CONTENDERS["infinite"].words,
        open=opened,
        max_runs=1,
        is_counted=True,
        check=partial(_check, directory, workload),
    )


def _check(directory: Path, workload: str) -> None:
    read_workload(workload, directory)


def _played(arena: Arena, who: str, share: float, bars: Bars) -> Tally:
    bars.begin(f"{arena.trace.name}: {who}, {percent(share)}", arena.num_requests)
    return arena.tally(who, share, bars.advance)


# In words and figures


def workload_in_words(arena: Arena) -> str:
    requests = [request for _, requests in arena.sessions for request in requests]
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    return (
        f"{arena.trace.name}: {len(arena.sessions)} sessions, {len(requests):,} requests, "
        f"{num_tokens / 1e6:.1f} M prompt tokens; {arena.geometry.model}"
    )


def _detail(arena: Arena, share: float) -> str:
    return (
        f"{workload_in_words(arena)}; {arena.budget_bytes(share) / 2**30:.1f} GiB, {percent(share)} of what a single "
        f"pool needs for the working set of {arena.working_set_tokens / 1e6:.2f} M tokens"
    )


def _findings(arena: Arena, tallies: dict[str, Tally]) -> Findings:
    ceiling = tallies["infinite"].hit_rate
    lines = [f"{who}: {in_words(tally, ceiling)}" for who, tally in tallies.items() if who != "infinite"]
    lines.append(f"infinite: {ceiling:.2%}")
    pages = {who: arena.num_pages(who, arena.file.budget.headline) for who in tallies if who != "infinite"}
    return Findings(
        lines=tuple(lines),
        figures={
            "workload": statistics_of(arena),
            "budget_bytes": arena.budget_bytes(arena.file.budget.headline),
            "working_set_tokens": arena.working_set_tokens,
            "contenders": {who: tally_figures(tally, ceiling) for who, tally in tallies.items()},
            "full_and_window_pages": pages,
        },
    )


def in_words(tally: Tally, ceiling: float) -> str:
    parts = _parts(tally, ceiling)
    words = (
        f"{tally.hit_rate:.2%}; lost with full pages {parts['full_lost']:.2%}, with windows {parts['windows_lost']:.2%}"
    )
    if tally.num_healings:
        words += f"; {tally.num_healings} healings ran {parts['healed']:.2%} again, worth {parts['heal_work']:.2%}"
    if tally.num_retractions:
        words += f"; {tally.num_retractions} put back"
    if tally.num_refused:
        words += f"; {tally.num_refused} too long for it"
    return words


def _parts(tally: Tally, ceiling: float) -> dict[str, float]:
    """Shares of the prompt tokens."""
    full_only, usable = tally.full_only / tally.prompt, tally.usable / tally.prompt
    return {
        "never_seen": 1 - ceiling,
        "full_lost": ceiling - full_only,
        "windows_lost": full_only - usable,
        "healed": tally.healed / tally.prompt,
        "heal_work": tally.heal_work / tally.prompt,
        "computed_again": tally.computed_again / tally.prompt,
    }


def tally_figures(tally: Tally, ceiling: float) -> dict[str, Any]:
    rates = {
        "hit_rate": tally.hit_rate,
        "hit_rate_healing_by_work": tally.work_rate,
        "hit_rate_healing_free": tally.reach_rate,
        "window_loss": tally.window_loss,
    }
    counts = {
        "requests": tally.requests,
        "prompt_tokens": tally.prompt,
        "computed_tokens": tally.computed,
        "healed_tokens": tally.healed,
        "healings": tally.num_healings,
        "retractions": tally.num_retractions,
        "refused": tally.num_refused,
        "peak_cached_tokens": tally.peak_cached,
        "evicted_full_pages": tally.evicted_full_pages,
        "evicted_window_pages": tally.evicted_window_pages,
    }
    shares = {f"{name}_share": share for name, share in _parts(tally, ceiling).items()}
    return {name: _digits(value) for name, value in (rates | shares).items()} | counts


def statistics_of(arena: Arena) -> dict[str, Any]:
    """Of the workload as replayed."""
    return {name: _digits(value) for name, value in arena.trace.statistics().items()}


def _sweep_findings(arena: Arena, curves: dict[str, list[tuple[float, Tally]]], ceiling: Tally) -> Findings:
    rates = {who: [(100 * share, tally.hit_rate) for share, tally in curve] for who, curve in curves.items()}
    rates["infinite"] = [(percent, ceiling.hit_rate) for percent, _ in rates["ours"]]
    lines = [f"{who}: {', '.join(f'{rate:.1%}' for _, rate in curve)}" for who, curve in rates.items()]
    return Findings(
        lines=tuple(lines),
        figures={
            "budget_shares": list(arena.file.budget.sweep),
            "budget_bytes": [arena.budget_bytes(share) for share in arena.file.budget.sweep],
            "hit_rates": {who: [_digits(rate) for _, rate in curve] for who, curve in rates.items()},
        },
        panels=(
            Panel(
                title=f"{arena.trace.name}, {arena.geometry.model}",
                x_label="bytes, % of the working set in a single pool",
                y_label="prompt tokens not computed",
                curves=rates,
            ),
        ),
    )


def _mean(curve: list[tuple[float, Tally]]) -> float:
    return sum(tally.hit_rate for _, tally in curve) / len(curve)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
