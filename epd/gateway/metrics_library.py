"""What a gateway keeps for its clients, as Prometheus metrics: files, and media by name."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd.gateway.library import Libraries


class LibraryMetrics(Collector):
    """Read when they are scraped."""

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries

    def collect(self) -> Iterator[Metric]:
        shelf = self._libraries.shelf
        yield GaugeMetricFamily(
            "mimo_gateway_media_shelf_bytes", "Content kept to be named again by uuid or key", shelf.size_bytes
        )
        yield GaugeMetricFamily(
            "mimo_gateway_media_shelf_names", "Names under which that content can be asked for", shelf.num_names
        )
        looked_up = CounterMetricFamily(
            "mimo_gateway_media_shelf_lookups", "Parts that came as a name alone, by what was found", labels=["result"]
        )
        looked_up.add_metric(["hit"], shelf.num_hits)
        looked_up.add_metric(["miss"], shelf.num_misses)
        yield looked_up
        yield CounterMetricFamily(
            "mimo_gateway_media_shelf_evictions", "Names forgotten because room was short", shelf.num_evicted
        )
        if self._libraries.files is not None:
            num_files, size_bytes = self._libraries.files.usage()
            yield GaugeMetricFamily(
                "mimo_gateway_files", "Uploaded files that are kept, as far as this gateway knows", num_files
            )
            yield GaugeMetricFamily("mimo_gateway_files_bytes", "Bytes of uploaded files that are kept", size_bytes)
