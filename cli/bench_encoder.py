"""The cases of `mimo bench encoder`: the deployment that `mimo serve --role encoder` starts, asked over HTTP.

Ours and the plain way are servers with the same weights and as many threads for the tower in all. Both are asked for
the same pictures, which they fetch from a third server that takes its time. Every run asks for media that were never
asked for before.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from cli.bench_case import Bars, BenchFailed, Case, Contest, Findings, Panel, Setting, timed
from cli.bench_encoder_load import Load, encoded, put_load
from cli.bench_encoder_media import Album, mixed_album, paths
from cli.bench_encoder_ours import CpuMeter, encoder_deployment
from cli.bench_encoder_plain import PlainEncoder, plain_server
from cli.bench_encoder_ring import RING_CASES
from cli.bench_server import slow_server, web_process
from cli.bench_tower import CASES as TOWER_CASES
from cli.load import BUILTIN_MODELS

PACKAGES = ("torch", "numpy", "pillow", "simplejpeg", "aiohttp", "uvloop", "pyzmq", "msgspec")
"""Whose versions matter for the figures."""

_MODEL = "mimo-nano"
_DELAY_S = 0.02
_SIDES = (128, 1024)
_NUM_PICTURES = 64
_ROUNDS = 5
_MAX_REPLICAS = 8
_LIMIT_BATCH = 8
# Two ways to resize differ by a grey level here and there; another picture or another tower by everything.
_MAX_ERROR = 0.1
_TOLD_CPU_S = 0.0005
_QUANTILES = {"p50_s": 0.5, "p95_s": 0.95}


@dataclass(frozen=True, slots=True)
class _Rivals:
    """Two servers that are up, and the pictures both fetch."""

    album: Album
    base_url: str
    ours_url: str
    plain_url: str
    largest_error: float
    """Between the two, of any picture compared: relative, in the norm."""

    def urls(self, num_requests: int, repeated_share: float = 0.0) -> list[str]:
        """Media that nobody has asked for before."""
        asked = paths(num_requests, self.album, repeated_share=repeated_share, stamp=uuid.uuid4().hex)
        return [self.base_url + path for path in asked]


@contextmanager
def _rivals(setting: Setting, bars: Bars) -> Iterator[_Rivals]:
    num_pictures, max_side = (6, 256) if setting.quick else (_NUM_PICTURES, _SIDES[1])
    cache_dir = setting.cache_dir
    album = mixed_album(cache_dir, bars, num_pictures=num_pictures, min_side=_SIDES[0], max_side=max_side)
    model_dir = BUILTIN_MODELS[_MODEL]
    with ExitStack() as stack:
        bars.begin("starting the servers", 1)
        base_url = stack.enter_context(slow_server(album, _DELAY_S))
        plain = plain_server(model_dir, num_threads=setting.num_threads)
        plain_url = stack.enter_context(web_process("the plain encoder", plain))
        # One thread each as far as that goes: a forward is too small for two to share it well.
        num_replicas = min(setting.num_threads, _MAX_REPLICAS)
        tower_threads = setting.num_threads // num_replicas
        ours = encoder_deployment(_MODEL, num_replicas=num_replicas, decode_threads=1, tower_threads=tower_threads)
        ours_url = stack.enter_context(ours)
        urls = [f"{base_url}{path}" for path in paths(num_pictures, album, repeated_share=0.0, stamp="compared")]
        error = _largest_error(ours_url, plain_url, urls)
        yield _Rivals(album, base_url, ours_url, plain_url, error)


def _largest_error(ours_url: str, plain_url: str, urls: Sequence[str]) -> float:
    """Also what warms both up. Raises BenchFailed when they do not encode the same."""
    worst = 0.0
    for url, ours, plain in zip(urls, encoded(ours_url, urls), encoded(plain_url, urls), strict=True):
        if ours.shape != plain.shape:
            raise BenchFailed(f"{url}: ours has {ours.shape} rows, the plain way {plain.shape}")
        error = float(np.linalg.norm(ours - plain) / np.linalg.norm(plain))
        if error > _MAX_ERROR:
            raise BenchFailed(f"{url}: the rows of ours and of the plain way differ by {error:.1%}")
        worst = max(worst, error)
    return worst


# Throughput


@dataclass(slots=True)
class _Loads:
    """Runs of one server, and the CPU time that stages of it took."""

    loads: list[Load] = field(default_factory=list)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def run(self, server: str, urls: Sequence[str], concurrency: int) -> float:
        """Requests per second."""
        meter = CpuMeter()
        load = put_load(server, urls, concurrency=concurrency)
        for name, used_s in meter.used_s().items():
            self.cpu_s.setdefault(name, []).append(used_s / len(urls))
        self.loads.append(load)
        return load.throughput

    def figures(self) -> dict[str, Any]:
        """Medians over the runs."""
        return {
            "throughput": _digits(median(load.throughput for load in self.loads)),
            **{name: _digits(self.latency_s(quantile)) for name, quantile in _QUANTILES.items()},
            "cached": median(load.num_cached for load in self.loads),
            "cpu_s_per_request": {name: _digits(median(used)) for name, used in sorted(self.cpu_s.items())},
        }

    def cpu_in_words(self) -> str:
        """Of the stages whose CPU time was seen to pass."""
        used = {name: median(each) for name, each in sorted(self.cpu_s.items())}
        return ", ".join(f"{name} {used_s * 1000:.1f} ms" for name, used_s in used.items() if used_s >= _TOLD_CPU_S)

    def latency_s(self, quantile: float) -> float:
        return median(load.latency_s(quantile) for load in self.loads)

    def in_words(self) -> str:
        p50_s, p95_s = self.latency_s(0.5), self.latency_s(0.95)
        return f"p50 {p50_s * 1000:.0f} ms, p95 {p95_s * 1000:.0f} ms"


@contextmanager
def _throughput(setting: Setting, bars: Bars, *, concurrency: int, repeated_share: float) -> Iterator[Contest]:
    with _rivals(setting, bars) as rivals:
        concurrency = 6 if setting.quick else concurrency
        num_requests = concurrency * (2 if setting.quick else _ROUNDS)
        ours, plain = _Loads(), _Loads()

        def urls() -> list[str]:
            return rivals.urls(num_requests, repeated_share)

        def findings() -> Findings:
            return Findings(
                lines=(
                    f"ours {ours.in_words()}; plain way {plain.in_words()}",
                    f"CPU per request: ours {ours.cpu_in_words()}; plain way {plain.cpu_in_words()}",
                    f"rows of both differ by {rivals.largest_error:.2%} at most: the plain way resizes pictures with "
                    "Pillow, another resampler, whose pixels differ by a grey level here and there",
                ),
                figures={
                    "ours": ours.figures(),
                    "baseline": plain.figures(),
                    "largest_relative_error": _digits(rivals.largest_error),
                },
            )

        yield Contest(
            detail=f"{num_requests} requests, {concurrency} at a time, {repeated_share:.0%} for an earlier medium; "
            f"{rivals.album.in_words}; the server waits {_DELAY_S * 1000:.0f} ms",
            ours=lambda: ours.run(rivals.ours_url, urls(), concurrency),
            baseline=lambda: plain.run(rivals.plain_url, urls(), concurrency),
            limit=_towers_alone(rivals.album, setting.num_threads, of_requests=1 - repeated_share),
            findings=findings,
        )


def _towers_alone(album: Album, num_threads: int, *, of_requests: float) -> Callable[[], float]:
    """Requests per second if only forwards took time, on threads that do not hinder each other, and only that part of
    the requests needed one."""
    encoder = PlainEncoder(BUILTIN_MODELS[_MODEL], num_threads=1)
    inputs = [encoder.prepare(picture.content) for picture in album.pictures]
    batches = [inputs[start : start + _LIMIT_BATCH] for start in range(0, len(inputs), _LIMIT_BATCH)]
    clock = timed(lambda: [encoder.forward(batch) for batch in batches])
    clock()
    return lambda: num_threads * len(inputs) / clock() / of_requests


# Sweep


@contextmanager
def _sweep(setting: Setting, bars: Bars) -> Iterator[Contest]:
    levels = (1, 2) if setting.quick else (1, 2, 4, 8, 16, 32, 64)
    with _rivals(setting, bars) as rivals:
        who_loads = {who: {level: _Loads() for level in levels} for who in ("ours", "baseline")}

        def run(who: str, server: str) -> float:
            return max(
                who_loads[who][level].run(server, rivals.urls(_num_requests(level, setting)), level) for level in levels
            )

        yield Contest(
            detail=f"{levels[0]} to {levels[-1]} requests at a time; {rivals.album.in_words}; "
            f"the server waits {_DELAY_S * 1000:.0f} ms",
            ours=lambda: run("ours", rivals.ours_url),
            baseline=lambda: run("baseline", rivals.plain_url),
            findings=lambda: _sweep_findings(who_loads),
        )


def _num_requests(level: int, setting: Setting) -> int:
    return 2 * level if setting.quick else max(_NUM_PICTURES, 2 * level)


def _sweep_findings(loads: dict[str, dict[int, _Loads]]) -> Findings:
    figures: dict[str, Any] = {"concurrency": list(loads["ours"])}
    for who, by_level in loads.items():
        found = [level_loads.figures() for level_loads in by_level.values()]
        figures[who] = {name: [each[name] for each in found] for name in ("throughput", *_QUANTILES)}
    names = {"ours": "ours", "baseline": "plain way"}

    def curve(who: str, figure: str) -> list[tuple[float, float]]:
        return list(zip(figures["concurrency"], figures[who][figure], strict=True))

    latency = {f"{names[who]} {figure[:3]}": curve(who, figure) for figure in _QUANTILES for who in names}
    rate = {names[who]: curve(who, "throughput") for who in names}
    x_label = "requests at a time"
    lines = []
    for level, ours in loads["ours"].items():
        plain = loads["baseline"][level]
        rates = f"ours {_rate(ours)}, {ours.in_words()}; plain way {_rate(plain)}, {plain.in_words()}"
        lines.append(f"{level} at a time: {rates}")
    return Findings(
        lines=tuple(lines),
        figures=figures,
        panels=(
            Panel(title="latency", x_label=x_label, y_label="s", curves=latency),
            Panel(title="throughput", x_label=x_label, y_label="requests/s", curves=rate),
        ),
    )


def _rate(loads: _Loads) -> str:
    return f"{median(load.throughput for load in loads.loads):.3g} req/s"


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


_OURS = "mimo serve --role encoder, a replica per thread, asked over HTTP"
_PLAIN = "one request at a time: fetch, Pillow and numpy, one forward; no batch, no cache"
_FORWARDS = "the forwards of the tower alone, in batches of 8, as many at a time as there are threads"

CASES: tuple[Case, ...] = (
    Case(
        name="encoder.throughput_c64",
        unit="req/s",
        ours=_OURS,
        baseline=_PLAIN,
        limit=_FORWARDS,
        open=partial(_throughput, concurrency=64, repeated_share=0.0),
    ),
    Case(
        name="encoder.throughput_c64_repeat30",
        unit="req/s",
        ours=_OURS,
        baseline=_PLAIN,
        limit=f"{_FORWARDS}, none for what was asked for before",
        open=partial(_throughput, concurrency=64, repeated_share=0.3),
    ),
    Case(
        name="encoder.sweep",
        unit="req/s",
        ours=f"{_OURS}, at its best number of requests at a time",
        baseline=_PLAIN,
        limit="none",
        open=_sweep,
    ),
    *RING_CASES,
    *TOWER_CASES,
)
