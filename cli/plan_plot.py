"""KV bytes of one sequence over its length, drawn: two pools against one."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(report: dict[str, Any], path: Path) -> None:
    """Raises OSError."""
    rows = report["kv"]["contexts"]
    tokens = [row["num_tokens"] for row in rows]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        tokens, [row["single_pool_bytes"] / 2**30 for row in rows], label="one pool, every layer whole", color="#999999"
    )
    axes.plot(tokens, [row["size_bytes"] / 2**30 for row in rows], label="full and window pools", color="#d9480f")
    axes.axvline(report["kv"]["context_tokens"], linestyle=":", color="#666666")
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="KV, GiB", title=report["model"])
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
