"""What `mimo cache stats` shows people: arenas, KV stores on this host, KV tiers of workers."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from cli.cache_workers import TIERS, WorkerTiers
from cli.terminal import counted, quoted
from encoder import ArenaReport
from epd import LocalStoreReport

__all__ = ["mib", "show_arena", "show_kv_store", "show_worker", "span"]

_MIB = 2**20
_STATES = {
    "evictable": "kept for reuse",
    "leased": "in use by a request",
    "reserved": "being computed",
    "free": "empty",
}
_TIER_WORDS = {
    "l1": "were on the device",
    "l2": "came from the host's memory",
    "l3": "came from the store",
    "healed": "had lost their windows and were healed",
}

_UNKEPT_WORDS = {
    "refused": "pages refused (it is full, or they are too large for it)",
    "dropped": "pages dropped (too many waited for it)",
    "failed": "pages lost to its failures",
}


def show_arena(console: Console, report: ArenaReport) -> None:
    age = span(time.time() - report.created_unix_s)
    console.print(f"[bold]{quoted(report.name)}[/]   embeddings; made by pid {report.pid}, {age} ago")
    usage, capacity = report.usage, report.usage.capacity_bytes
    table = _table()
    for state, words in _STATES.items():
        size_bytes = getattr(usage, f"{state}_bytes")
        table.add_row(state, mib(size_bytes), f"{size_bytes / capacity:.0%}", words)
    table.add_row("total", mib(capacity), "", f"pages of {report.page_bytes} bytes")
    console.print(table)
    rows = "" if report.width is None else f" with rows of {report.width} {report.dtype}"
    line = f"{report.num_entries:,} embeddings{rows}, {report.num_leases:,} leases"
    if report.oldest_use_age_s is not None and report.newest_use_age_s is not None:
        line += f"; last used {span(report.newest_use_age_s)} ago, the oldest {span(report.oldest_use_age_s)} ago"
    console.print(line, soft_wrap=True)
    console.print(_hits(report.hits, report.misses))
    for holder in report.holders:
        state = "" if holder.is_alive else ", has died"
        reserved = f", {mib(holder.reserved_bytes)} being computed" if holder.reserved_bytes else ""
        console.print(f"  encoder pid {holder.pid}{state}: {_hits(holder.hits, holder.misses)}{reserved}")
    console.print()


def show_kv_store(console: Console, report: LocalStoreReport) -> None:
    console.print(f"[bold]{quoted(report.directory)}[/]   KV", soft_wrap=True)
    table = _table()
    table.add_row("memory", mib(report.memory_bytes), f"{report.num_memory_records:,}", quoted(report.memory_directory))
    table.add_row("disk", mib(report.disk_bytes), f"{report.num_disk_records:,}", quoted(report.disk_directory))
    console.print(table)
    line = f"{counted(report.num_records, 'page')} of KV"
    if report.oldest_put_age_s is not None and report.newest_put_age_s is not None:
        line += (
            f"; the last written {span(report.newest_put_age_s)} ago, the oldest {span(report.oldest_put_age_s)} ago"
        )
    console.print(line, soft_wrap=True)
    if report.num_damaged_files:
        console.print(f"{report.num_damaged_files} files that are damaged, and are passed over", style="yellow")
    console.print()


def show_worker(console: Console, tiers: WorkerTiers) -> None:
    console.print(f"[bold]{quoted(tiers.worker)}[/]   {tiers.stage}")
    table = _table()
    num_asked = tiers.prompt_tokens + sum(tiers.hit_tokens.values())
    for tier in TIERS:
        count = tiers.hit_tokens.get(tier, 0)
        table.add_row(tier, f"{count:,}", _percent(count, num_asked), f"tokens of prompts that {_TIER_WORDS[tier]}")
    computed = tiers.prompt_tokens
    table.add_row("none", f"{computed:,}", _percent(computed, num_asked), "tokens of prompts that were computed")
    console.print(table)
    for place, pools in (("device", tiers.device_pages), ("host", tiers.host_pages)):
        for pool, states in pools.items():
            console.print(f"{place}, {pool} pages: {_states(states)}", soft_wrap=True)
    if tiers.copied_bytes:
        load, save = (mib(tiers.copied_bytes.get(way, 0)) for way in ("load", "save"))
        console.print(f"copied from host to device {load}, from device to host {save}", soft_wrap=True)
    if tiers.store:
        _show_store(console, tiers)
    console.print()


def _show_store(console: Console, tiers: WorkerTiers) -> None:
    store = tiers.store
    hits, misses = store.get("gets_hit", 0), store.get("gets_miss", 0)
    got, put = mib(store.get("get_bytes", 0)), mib(store.get("put_bytes", 0))
    console.print(
        f"store: {hits:,} pages found, {misses:,} missed, {got} read; {store.get('puts_kept', 0):,} written, {put}; "
        f"{store.get('queued_pages', 0):,} waiting",
        soft_wrap=True,
    )
    faults = {name: store.get(name, 0) for name in ("corrupt", "timeouts", "failures")}
    console.print(f"  faults: {_states(faults)}", style="yellow" if any(faults.values()) else "", soft_wrap=True)
    unkept = {result: store.get(f"puts_{result}", 0) for result in _UNKEPT_WORDS}
    style = "yellow" if any(unkept.values()) else ""
    console.print(f"  pages not kept: {_states(unkept)}", style=style, soft_wrap=True)
    if tiers.prefetches:
        console.print(f"  prefetches: {_states(tiers.prefetches)}", soft_wrap=True)
    for name, node in tiers.nodes.items():
        held = "" if node.used_bytes is None else f", {mib(node.used_bytes)} used"
        held += "" if node.capacity_bytes is None else f" of {mib(node.capacity_bytes)}"
        lost = {words: node.puts.get(result, 0) for result, words in _UNKEPT_WORDS.items()}
        told = "".join(f"; {count:,} {words}" for words, count in lost.items() if count)
        style = "" if node.breaker == "closed" and not told else "yellow"
        console.print(f"  {quoted(name)}: breaker {node.breaker}{held}{told}", style=style, soft_wrap=True)


def _table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    return table


def _states(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {state.replace('_', ' ')}" for state, count in counts.items())


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole > 0 else ""


def _hits(hits: int, misses: int) -> str:
    asked = hits + misses
    return f"{hits:,} found, {misses:,} computed" + (f" ({hits / asked:.0%} found)" if asked else "")


def mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB"


def span(seconds: float) -> str:
    """To two units: 3 s, 4 min 5 s, 2 h 10 min, 5 d 3 h."""
    total = max(0, round(seconds))
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if total >= size:
            return f"{total // size} {unit} {total % size // smaller_size} {smaller}"
    return f"{total} s"
