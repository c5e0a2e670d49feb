"""The report of `mimo inspect` as tables for people."""

import re
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.preflight import DIFFERENCES, NUM_NAMES_SHOWN, advices, counted
from epd import Findings
from preprocess.ranges import printable

_PARTS = {
    "embedding": "token embedding",
    "full_attention": "full attention",
    "window_attention": "window attention",
    "dense_mlp": "dense feed-forward",
    "experts": "experts",
    "router": "routers",
    "norms": "norms",
    "lm_head": "vocabulary head",
    "mtp": "draft heads (MTP)",
    "vision": "vision tower",
    "speech_embeddings": "code embeddings",
    "audio_encoder": "audio encoder",
}
_MTP_SOURCES = {
    "argument": "as asked for",
    "configuration": "as the configuration says",
    "weights": "counted in the files",
    "family": "what the family has; configurations do not say, --mtp-layers changes it",
}


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report made by `cli.inspect.build_report`."""
    console = console or Console(highlight=False, soft_wrap=True)
    _show_model(console, report)
    _show_inventory(console, report)
    _show_kv(console, report["kv"])
    if report["files"] is None:
        console.print("No weights: everything above follows from the configuration.")
    else:
        console.print(_file_table(report["files"]))
        for note in report["notes"]:
            console.print(f"Note: {printable(note)}", markup=False)
        _show_check(console, report["check"])
    for tensor in report.get("tensors", ()):
        shape = "x".join(map(str, tensor["shape"]))
        where = f"  {tensor['file']}" if tensor["file"] else ""
        console.print(printable(f"{tensor['name']}  {tensor['dtype']}  {shape}{where}"), markup=False)


def _show_model(console: Console, report: dict[str, Any]) -> None:
    model = report["model"]
    name = Text(printable(report["checkpoint"]), style="bold")
    kind = printable(str(model["architecture"] or model["model_type"] or "no architecture named"))
    console.print(name, Text(f"({kind}): {', '.join(model['modalities'])} in, text out"))
    line = f"{model['num_layers']} layers: {model['num_full_layers']} full (F)"
    if model["num_window_layers"]:
        line += f", {model['num_window_layers']} with a window of {model['window_tokens']} tokens (w)"
    console.print(line)
    pattern = Text(" ".join(re.findall(r"Fw*|w+", model["layer_pattern"])))
    pattern.highlight_regex("F", "bold green")
    console.print(pattern)
    dense = model["dense_layers"]
    if len(dense) < model["num_layers"]:
        where = f"layer {dense[0]}" if len(dense) == 1 else f"layers {', '.join(map(str, dense))}"
        dense_text = f", dense in {where}" if dense else ""
        console.print(f"{model['num_experts']} experts, {model['num_experts_per_token']} per token{dense_text}")
    console.print(f"{model['num_mtp_layers']} draft heads, {_MTP_SOURCES[model['num_mtp_layers_from']]}")


def _show_inventory(console: Console, report: dict[str, Any]) -> None:
    total, parameters, own = report["total"], report["parameters"], report["audio_tokenizer"]
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("part", footer="total", no_wrap=True)
    table.add_column("tensors", footer=f"{total['num_tensors']:,}", justify="right", no_wrap=True)
    table.add_column("elements", footer=f"{total['num_elements']:,}", justify="right", no_wrap=True)
    table.add_column("bytes", footer=_bytes(total["size_bytes"]), justify="right", no_wrap=True)
    for part in report["parts"]:
        counts = f"{part['num_tensors']:,}", f"{part['num_elements']:,}"
        table.add_row(_PARTS[part["part"]], *counts, _bytes(part["size_bytes"]))
    console.print(table)
    if own:
        console.print(
            f"audio tokenizer, its own file, not in the total: {own['num_elements']:,} elements in "
            f"{own['num_tensors']:,} tensors, {_bytes(own['size_bytes'])}"
        )
    console.print(
        f"parameters: {parameters['total']:,} ({_short(parameters['total'])}); in one text token: "
        f"{parameters['active_per_token']:,} ({_short(parameters['active_per_token'])})\n"
    )


def _show_kv(console: Console, kv: dict[str, Any]) -> None:
    console.print(Text("KV of one sequence", style="bold"), f"in {kv['dtype']}")
    console.print(f"  full layers keep every token: {kv['growing_bytes_per_token']:,} bytes per token")
    if kv["window_bytes_per_token"]:
        console.print(
            f"  window layers keep {kv['window_tokens']} tokens: {kv['window_bytes_per_token']:,} bytes each, "
            f"{kv['constant_bytes']:,} together"
        )
    if kv["mtp_constant_bytes"]:
        console.print(
            f"  draft heads keep as many, not in the table: {kv['mtp_window_bytes_per_token']:,} bytes each, "
            f"{kv['mtp_constant_bytes']:,} together"
        )
    ratio = f", ratio {kv['asymptotic_ratio']:.4f} in the limit" if kv["asymptotic_ratio"] < 1 else ""
    console.print(f"  one pool, every layer whole: {kv['single_pool_bytes_per_token']:,} bytes per token{ratio}")
    if kv["all_full_layers_bytes_per_token"] not in (None, kv["single_pool_bytes_per_token"]):
        alike = kv["all_full_layers_bytes_per_token"]
        console.print(f"  were all layers like the full ones: {alike:,} bytes per token")
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("tokens", "bytes", "", "one pool", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in kv["contexts"]:
        sizes = f"{row['size_bytes']:,}", _bytes(row["size_bytes"]), _bytes(row["single_pool_bytes"])
        table.add_row(f"{row['num_tokens']:,}", *sizes, f"{row['ratio']:.3f}")
    console.print(table)


def _file_table(files: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=len(files) > 1)
    size_bytes = sum(file["size_bytes"] for file in files)
    table.add_column("file", footer="total", overflow="fold")
    table.add_column("tensors", footer=f"{sum(file['num_tensors'] for file in files):,}", justify="right")
    table.add_column("bytes", footer=f"{size_bytes:,}", justify="right")
    table.add_column("", footer=_bytes(size_bytes), justify="right")
    for file in files:
        name = Text(printable(file["name"]))
        table.add_row(name, f"{file['num_tensors']:,}", f"{file['size_bytes']:,}", _bytes(file["size_bytes"]))
    return table


def _show_check(console: Console, check: dict[str, Any]) -> None:
    if check["stored_otherwise"]:
        console.print(f"{len(check['stored_otherwise']):,} tensors load though published files store them otherwise:")
        _show_names(console, check["stored_otherwise"])
    if check["matches"]:
        console.print("The files hold what the configuration calls for.", style="green")
        return
    console.print("The files do not hold what the configuration calls for:", style="red")
    for key in DIFFERENCES:
        if check[key]:
            console.print(f"{counted(key, len(check[key]))}:")
            _show_names(console, check[key])
    for advice in advices(Findings(**{key: check[key] for key in DIFFERENCES})):
        console.print(advice, markup=False)


def _show_names(console: Console, names: list[str]) -> None:
    for name in names[:NUM_NAMES_SHOWN]:
        console.print(f"  {printable(name)}", markup=False)
    if len(names) > NUM_NAMES_SHOWN:
        console.print(f"  and {len(names) - NUM_NAMES_SHOWN:,} more; --json lists all")


def _short(count: int) -> str:
    """310.8 B, 7.2 M."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.2f} {unit}" if unit == "T" else f"{count / size:.1f} {unit}"
    return str(count)


def _bytes(size_bytes: int) -> str:
    """24.16 GB, decimal."""
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes} B"
