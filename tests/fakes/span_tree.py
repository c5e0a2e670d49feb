"""Spans as a test wants them: the trees they form, whoever collected them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from encoder.tracing import exporting_to


@dataclass(eq=False)
class Node:
    """A span. Times are Unix nanoseconds; `service` is the instance that exported it."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    stop_ns: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[str]
    is_error: bool
    service: str = ""
    children: list[Node] = field(default_factory=list)

    def find(self, name: str) -> list[Node]:
        """This span and those below it of that name, in order of time."""
        found = [self] if self.name == name else []
        for child in self.children:
            found += child.find(name)
        return sorted(found, key=lambda node: node.start_ns)

    def one(self, name: str) -> Node:
        (node,) = self.find(name)
        return node

    def shape(self) -> str:
        """Names alone, for comparing: `name`, or `name(children)`, those by name."""
        inside = ", ".join(sorted(child.shape() for child in self.children))
        return f"{self.name}({inside})" if inside else self.name

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


def trees(nodes: Sequence[Node]) -> list[Node]:
    """Every span below its parent; the roots, in order of time."""
    by_id = {node.span_id: replace(node, children=[]) for node in nodes}
    assert len(by_id) == len(nodes), "a span was exported twice"
    roots = []
    for node in sorted(by_id.values(), key=lambda node: node.start_ns):
        parent = by_id.get(node.parent_id or "")
        if parent is None:
            roots.append(node)
        else:
            assert parent.trace_id == node.trace_id
            parent.children.append(node)
    return roots


def node_of(span: ReadableSpan) -> Node:
    return Node(
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        name=span.name,
        start_ns=span.start_time or 0,
        stop_ns=span.end_time or 0,
        attributes=dict(span.attributes or {}),
        events=[event.name for event in span.events],
        links=[f"{link.context.span_id:016x}" for link in span.links],
        is_error=span.status.status_code is StatusCode.ERROR,
    )


class Spans:
    """What was exported in this process."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def clear(self) -> None:
        self._exporter.clear()

    def roots(self) -> list[Node]:
        return trees([node_of(span) for span in self._exporter.get_finished_spans()])

    def tree(self, is_whole: Callable[[Node], bool] = lambda root: True, timeout_s: float = 5.0) -> Node:
        """The only tree, once its root has ended and `is_whole`: some spans are made on another thread."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            roots = self.roots()
            if len(roots) == 1 and roots[0].name == "mimo.request" and is_whole(roots[0]):
                return roots[0]
            time.sleep(0.005)
        raise AssertionError(f"no whole tree; there is {[root.shape() for root in self.roots()]}")


@contextmanager
def collecting() -> Iterator[Spans]:
    """Export the spans of this process to memory while the block runs."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with exporting_to(provider):
        yield Spans(exporter)
