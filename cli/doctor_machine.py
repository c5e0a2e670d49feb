"""Checks of the machine: processors, memory, limits, shared memory. `root` stands for / in tests."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli.doctor_check import Check, read_text
from cli.plan_units import gib
from cli.terminal import os_words

_LEAST_FILES: Final = 4096
_X86_FEATURES: Final = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
_ARM_FEATURES: Final = ("asimd", "asimddp", "bf16", "i8mm", "sve")
_NO_LIMIT_BYTES: Final = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a deployment takes of its machine, all processes together. `memory_bytes` counts KV budgets, host tiers and
    embeddings, not weights."""

    shared_memory_bytes: int = 0
    memory_bytes: int = 0
    weight_bytes: int = 0
    num_threads: int = 1
    num_files: int = _LEAST_FILES
    on_cpu: bool = True
    on_cuda: bool = False


def check_machine(needs: Needs, root: Path = Path("/")) -> list[Check]:
    """All of them."""
    return [
        _processors(needs, root),
        _features(root),
        _memory(needs, root),
        _shared_memory(needs, root),
        _files(needs),
        _address_space(),
        _numa_balancing(root),
        _huge_pages(needs, root),
    ]


def num_processors(root: Path = Path("/")) -> float:
    """Those this process may use: its affinity, and the quota of its control group."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = (read_text(root / "sys/fs/cgroup/cpu.max") or "max").split()
    if quota[0] != "max" and len(quota) == 2:
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _processors(needs: Needs, root: Path) -> Check:
    cores = num_processors(root)
    said = f"{cores:g} cores; the deployment computes on {needs.num_threads} threads"
    if needs.on_cpu and needs.num_threads > cores:
        fix = "lower encoder.tower_threads, engine.threads or the numbers of processes: threads wait for each other"
        return Check("processors", "warn", said, fix)
    return Check("processors", "ok", said)


def _features(root: Path) -> Check:
    lines = (read_text(root / "proc/cpuinfo") or "").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")
    found = [feature for feature in (*_X86_FEATURES, *_ARM_FEATURES) if feature in flags]
    if not {"avx2", "asimd"} & set(flags):
        return Check("features", "warn", f"{model}: neither avx2 nor asimd", "expect slow kernels")
    return Check("features", "ok", f"{model}: {', '.join(found)}")


def _memory(needs: Needs, root: Path) -> Check:
    total, available = _meminfo(root)
    limit_text = read_text(root / "sys/fs/cgroup/memory.max") or "max"
    if limit_text != "max" and int(limit_text) < min(total, _NO_LIMIT_BYTES):
        total = int(limit_text)
        used = int(read_text(root / "sys/fs/cgroup/memory.current") or 0)
        available = min(available, total - used)
        whose = "this control group"
    else:
        whose = "this machine"
    wanted = needs.memory_bytes + needs.weight_bytes + needs.shared_memory_bytes
    said = f"{gib(available)} free of {gib(total)} in {whose}; the deployment takes up to {gib(wanted)}"
    fix = "lower engine.kv_budget_bytes, engine.host_budget_bytes or encoder.arena_bytes, or run fewer processes"
    if wanted > total:
        return Check("memory", "fail", said, fix)
    if wanted > available:
        return Check("memory", "warn", said, f"end what else uses memory, or {fix}")
    return Check("memory", "ok", said)


def _meminfo(root: Path) -> tuple[int, int]:
    """(total, available) in bytes."""
    values = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) << 10
    return values.get("MemTotal", 0), values.get("MemAvailable", 0)


def _shared_memory(needs: Needs, root: Path) -> Check:
    try:
        stats = os.statvfs(root / "dev/shm")
    except OSError as error:
        return Check("shared memory", "fail", f"/dev/shm: {os_words(error)}", "mount a tmpfs at /dev/shm")
    size, free = stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail
    said = f"/dev/shm has {gib(free)} free of {gib(size)}; the deployment takes up to {gib(needs.shared_memory_bytes)}"
    if needs.shared_memory_bytes > free:
        fix = (
            f"mount -o remount,size={(needs.shared_memory_bytes >> 30) + 2}g /dev/shm (containers: --shm-size), "
            "or lower encoder.arena_bytes or engine.kv_store_memory_bytes"
        )
        return Check("shared memory", "fail", said, fix)
    return Check("shared memory", "ok", said)


def _files(needs: Needs) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{'no limit on' if soft == resource.RLIM_INFINITY else f'{soft:,}'} open files a process"
    if soft != resource.RLIM_INFINITY and soft < needs.num_files:
        most = "" if hard == resource.RLIM_INFINITY or hard >= needs.num_files else f" (the hard limit is {hard:,})"
        return Check(
            "open files",
            "warn",
            f"{said}; {needs.num_files:,} are better",
            f"ulimit -n {max(65536, needs.num_files)}{most}",
        )
    return Check("open files", "ok", said)


def _address_space() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Check("address space", "ok", "no limit")
    return Check("address space", "warn", f"limited to {gib(soft)} a process", "ulimit -v unlimited")


def _numa_balancing(root: Path) -> Check:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1
    value = read_text(root / "proc/sys/kernel/numa_balancing")
    if value not in (None, "0") and nodes > 1:
        return Check(
            "numa balancing",
            "warn",
            f"on, with {nodes} memory nodes: the kernel moves pages that kernels are reading",
            "sysctl kernel.numa_balancing=0",
        )
    state = {None: "not in this kernel", "0": "off"}.get(value, "on")
    return Check("numa balancing", "ok", f"{state}, {nodes} memory node{'s'[: nodes != 1]}")


def _huge_pages(needs: Needs, root: Path) -> Check:
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Check("huge pages", "ok", "this kernel has none")
    chosen = text.partition("[")[2].partition("]")[0] or text
    if chosen == "never" and needs.on_cpu:
        return Check(
            "huge pages",
            "warn",
            "transparent huge pages are off: reading weights on a CPU takes up to a quarter longer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Check("huge pages", "ok", f"transparent, {chosen}")
