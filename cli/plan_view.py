"""The report of `mimo plan` for people."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.plan_memory import TOWERS
from cli.plan_units import flops, gib, parameters, seconds
from preprocess.ranges import printable


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report made by `cli.plan_report.build_report`."""
    console = console or Console(highlight=False, soft_wrap=True)
    gpu, worker = report["gpu"], report["worker"]
    console.print(Text(printable(report["model"]), style="bold"), f"on {_gpus(gpu, worker['tp'])}\n")
    _show_memory(console, report)
    _show_kv(console, report["kv"], report["healing"])
    if not report["fits"]:
        return
    _show_work(console, report["work"])
    _show_movement(console, report)
    if worker["tp"] > 1:
        console.print(
            f"A worker of {worker['tp']} GPUs needs an engine with tensor parallelism (SGLang, docs/sglang.md): "
            "the engine of this package runs on one."
        )
        return
    words = " ".join(f"--set {key}={value}" for key, value in report["settings"].items())
    console.print(Text("Settings", style="bold"), "of a worker")
    console.print(f"  mimo serve {words}", markup=False)


def _gpus(gpu: dict[str, Any], tp: int) -> str:
    """h200, 140.4 GiB; 4 x h200, 140.4 GiB each; a GPU of 80.0 GiB; 4 GPUs of 80.0 GiB."""
    size = gib(gpu["memory_bytes"])
    if not gpu["name"]:
        return f"{tp} GPUs of {size}" if tp > 1 else f"a GPU of {size}"
    return f"{tp} x {gpu['name']}, {size} each" if tp > 1 else f"{gpu['name']}, {size}"


def _show_memory(console: Console, report: dict[str, Any]) -> None:
    weights, worker, kv = report["weights"], report["worker"], report["kv"]
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("memory of one GPU", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    usable = report["gpu"]["memory_bytes"] * report["gpu"]["usable_share"]
    active = f"{parameters(weights['num_active_params'])} active of {parameters(weights['num_params'])}"
    table.add_row("usable", gib(usable), f"{report['gpu']['usable_share']:.0%}")
    towers_bytes = sum(weights["parts"].get(part, 0) for part in TOWERS)
    towers = f", {gib(towers_bytes)} of it towers, which are an encoder's" if towers_bytes else ""
    told = f"{gib(weights['total_bytes'])} in all{towers}; {active} parameters"
    table.add_row("weights", gib(worker["weight_bytes"]), told)
    table.add_row("KV budget", gib(worker["kv_budget_bytes"]), _pool_words(worker))
    table.add_row(
        "a running sequence", gib(worker["running_sequence_bytes"]), f"{kv['context_tokens']:,} tokens, in pages"
    )
    table.add_row(
        "sequences that fit",
        f"{worker['num_sequences']:,}",
        f"one pool for all layers: {worker['num_single_pool_sequences']:,}",
    )
    if weights["tower_bytes"]:
        table.add_row("an encoder", gib(weights["tower_bytes"]), "towers, on a GPU of its own or beside")
    console.print(table)


def _pool_words(worker: dict[str, Any]) -> str:
    pools = worker["pools"]
    if pools is None:
        return "no room"
    full = pools["num_full_pages"] * worker["full_page_bytes"]
    window = pools["num_window_pages"] * worker["window_page_bytes"]
    full_words = f"full pool {gib(full)} ({pools['num_full_pages']:,} pages)"
    return f"{full_words}, window pool {gib(window)} ({pools['num_window_pages']:,})"


def _show_kv(console: Console, kv: dict[str, Any], healing: dict[str, Any]) -> None:
    console.print(Text("KV of one sequence", style="bold"), f"in {kv['dtype']}")
    console.print(f"  full layers: {kv['full_bytes_per_token']:,} bytes a token, every token")
    if kv["window_tokens"]:
        console.print(
            f"  window layers: {kv['window_bytes_per_token']:,} bytes a token, the last {kv['window_tokens']} tokens"
        )
    if kv["draft_bytes_per_token"]:
        console.print(f"  draft heads: {kv['draft_bytes_per_token']:,} bytes a token, as many")
    console.print(
        f"  {kv['context_tokens']:,} tokens: {gib(kv['sequence_bytes'])}; in one pool {gib(kv['single_pool_bytes'])}, "
        f"{1 / kv['ratio']:.1f} times as much"
    )
    if healing["num_tokens"]:
        console.print(
            f"  a window that is gone is healed in H = {healing['num_tokens']:,} tokens: "
            f"{healing['share_of_prefill']:.1%} of computing {kv['context_tokens']:,} again"
        )
    console.print()


def _show_work(console: Console, work: dict[str, Any]) -> None:
    request = work["request"]
    media = f", {work['media_tokens']:,} of them media" if work["media_tokens"] else ""
    console.print(
        Text("One request", style="bold"),
        f"{work['prompt_tokens']:,} tokens{media}; answer {request['answer_tokens']:,}",
    )
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("stage", "compute", "of prefill", "a worker's time", "replicas"):
        table.add_column(title, justify="left" if title == "stage" else "right", no_wrap=True)
    for stage, count in work["flops"].items():
        took = work["worker_seconds"][stage] if work["worker_seconds"] else float("nan")
        table.add_row(
            stage, flops(count), f"{work['flops_ratio'][stage]:.3f}", seconds(took), str(work["replicas"][stage])
        )
    console.print(table)
    if work["worker_seconds"]:
        bound = "memory" if work["decode_is_memory_bound"] else "arithmetic"
        assumed = work["assumed"]
        console.print(
            f"  at {assumed['mfu']:.0%} of the peak arithmetic and {assumed['mbu']:.0%} of the bandwidth; a decode "
            f"step of {assumed['decode_batch']} sequences takes {seconds(work['decode_step_s'])}, bound by {bound}\n"
        )
    else:
        console.print("  replicas by compute alone, which flatters decode: --gpu NAME tells more\n")


def _show_movement(console: Console, report: dict[str, Any]) -> None:
    host, transfer = report["host"], report["transfer"]
    console.print(Text("Between tiers and stages", style="bold"))
    console.print(
        f"  host tier: {gib(host['host_budget_bytes'])} a GPU for {host['num_sessions']:,} idle sequences "
        f"(engine.host_budget_bytes={host['host_budget_bytes']}); a store for ten times as many: "
        f"{gib(host['store_bytes'])}"
    )
    console.print(
        f"  prefill to decode: {gib(transfer['kv_bytes'])} for {transfer['prompt_tokens']:,} tokens, "
        f"{seconds(transfer['kv_s'])} at {transfer['link_bytes_per_s'] / 1e9:g} GB/s; from one pool "
        f"{gib(transfer['single_pool_bytes'])}\n"
    )
