"""A collector of traces: takes OTLP over HTTP as protobuf, as every process of a deployment sends it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.fakes.span_tree import Node


class Received:
    """Spans as they came, in no order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._nodes: list[Node] = []

    def add(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for of_resource in request.resource_spans:
                who = {item.key: item.value.string_value for item in of_resource.resource.attributes}
                for of_scope in of_resource.scope_spans:
                    self._nodes += [_node(span, who["service.instance.id"]) for span in of_scope.spans]

    def nodes(self) -> list[Node]:
        with self._lock:
            return list(self._nodes)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    return getattr(value, kind)


def _node(span: Any, service: str) -> Node:
    return Node(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        stop_ns=span.end_time_unix_nano,
        attributes={item.key: _value(item.value) for item in span.attributes},
        events=[event.name for event in span.events],
        links=[link.span_id.hex() for link in span.links],
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        service=service,
    )


@contextmanager
def receiving() -> Iterator[Received]:
    """Listen on a port of the system's choice while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Received(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
