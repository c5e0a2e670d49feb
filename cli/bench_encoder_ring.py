"""What consistent hashing is worth: two replicas with caches of their own, as on two hosts, and a skewed workload.

Real replicas in this process, each with its own arena: asked in turns, both fill up with the same popular media; asked
by key, they hold different ones.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

import uvloop

from cli.bench_case import Bars, Case, Contest, Findings, Setting
from cli.bench_encoder_media import Picture, zipf_ranks
from cli.bench_inputs import pictures
from cli.load import BUILTIN_MODELS
from encoder import MemoryLink, open_server
from encoder.checkpoint import read_json_object
from encoder.client import EncoderClient
from encoder.config import EncoderConfig
from preprocess.config import ProcessorConfig
from preprocess.keys import media_key
from preprocess.types import MediaOptions, Modality

_MODEL_DIR = BUILTIN_MODELS["mimo-nano"]
_NUM_REPLICAS = 2
# The smallest square that is not enlarged: 9 rows of 128 values.
_SIDE = 96
_ENTRY_BYTES = 9 * 128 * 4
_EXPONENT = 1.0
_CACHED_SHARE = 0.05
_CONCURRENCY = 2
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """Requests by popularity. The first `num_warming` fill the caches and are not counted."""

    num_media: int
    exponent: float
    num_requests: int
    num_warming: int
    cached_media: int
    """What one replica has room for."""

    def ranks(self, seed: int) -> Sequence[int]:
        return zipf_ranks(self.num_requests, num_media=self.num_media, exponent=self.exponent, seed=seed)

    def known_share(self, seed: int) -> float:
        """Of the counted requests, those for a medium that was asked for before: what caches without end would hit."""
        ranks = self.ranks(seed)
        seen = set(ranks[: self.num_warming])
        new = len(set(ranks[self.num_warming :]) - seen)
        return 1 - new / (self.num_requests - self.num_warming)


@dataclass(frozen=True, slots=True)
class _Media:
    """The contents by popularity, made when they are asked for."""

    picture: Picture
    processor: ProcessorConfig = field(
        default_factory=lambda: ProcessorConfig.from_hf(read_json_object(_MODEL_DIR / "config.json"))
    )

    def content(self, rank: int) -> bytes:
        return self.picture.stamped(b"%d" % rank)


async def _hit_rate(workload: _Workload, media: _Media, seed: int, *, by_key: bool) -> float:
    """Of the counted requests, those that took no forward of their own. The replicas have seen nothing before."""
    config = EncoderConfig(
        dtype="float32",
        tower_threads=1,
        decode_threads=1,
        arena_bytes=workload.cached_media * _ENTRY_BYTES,
        page_bytes=_ENTRY_BYTES,
    )
    async with AsyncExitStack() as stack:
        servers = []
        for index in range(_NUM_REPLICAS):
            arena = f"mimo-bench-{uuid.uuid4().hex[:12]}-{index}"
            server = open_server(config, model_dir=_MODEL_DIR, name=f"encoder-{index}", arena=arena)
            servers.append(stack.enter_context(server))
            servers[-1].start()
            stack.push_async_callback(servers[-1].stop)
        links = [MemoryLink(f"encoder-{index}", server) for index, server in enumerate(servers)]
        # One client of both asks by key; clients of one each, taken in turns, are a round robin.
        groups = [links] if by_key else [[link] for link in links]
        clients = [await stack.enter_async_context(EncoderClient(group)) for group in groups]
        ranks = workload.ranks(seed)
        await _ask(clients, [media.content(rank) for rank in ranks[: workload.num_warming]], media)
        num_forwards = -sum(server.info().counters["encoded"] for server in servers)
        counted = ranks[workload.num_warming :]
        await _ask(clients, [media.content(rank) for rank in counted], media)
        num_forwards += sum(server.info().counters["encoded"] for server in servers)
        return 1 - num_forwards / len(counted)


async def _ask(clients: Sequence[EncoderClient], contents: Sequence[bytes], media: _Media) -> None:
    """Clients in turns, `_CONCURRENCY` requests at a time."""
    fingerprint = (await clients[0].info()).fingerprint
    options = MediaOptions()
    left = iter(zip(contents, itertools.cycle(clients), strict=False))

    async def asker() -> None:
        for content, client in left:
            key = media_key(
                content,
                modality=Modality.IMAGE,
                options=options,
                processor=media.processor,
                tower_fingerprint=fingerprint,
            )
            reply = await client.encode(content, Modality.IMAGE, options, key, time.time() + _DEADLINE_S)
            client.release(reply.ref)

    await asyncio.gather(*(asker() for _ in range(_CONCURRENCY)))


@contextmanager
def _ring(setting: Setting, bars: Bars) -> Iterator[Contest]:
    (content,) = pictures(setting.cache_dir, bars, kind="JPEG", num_files=1, width=_SIDE, height=_SIDE, quality=90)
    media = _Media(Picture("JPEG", content, _SIDE, _SIDE))
    workload = _workload(num_media=16 if setting.quick else 256, cached_share=_CACHED_SHARE, exponent=_EXPONENT)
    seeds = {"ours": itertools.count(1), "baseline": itertools.count(1), "limit": itertools.count(1)}

    def run(who: str) -> float:
        return uvloop.run(_hit_rate(workload, media, next(seeds[who]), by_key=who == "ours"))

    def findings() -> Findings:
        others = [] if setting.quick else [(share, _EXPONENT) for share in (0.1, 0.2)] + [(_CACHED_SHARE, 0.8)]
        found = []
        for share, exponent in others:
            other = _workload(num_media=workload.num_media, cached_share=share, exponent=exponent)
            rates = [uvloop.run(_hit_rate(other, media, 1, by_key=by_key)) for by_key in (True, False)]
            found.append({"cached_share": share, "exponent": exponent, "ours": rates[0], "baseline": rates[1]})
        return Findings(lines=tuple(map(_in_words, found)), figures={"others": found} if found else {})

    yield Contest(
        detail=f"{workload.num_requests - workload.num_warming} requests after {workload.num_warming} that fill the "
        f"caches, for {workload.num_media} media by Zipf's law (exponent {_EXPONENT}); room for "
        f"{workload.cached_media} of them in each of {_NUM_REPLICAS} caches",
        ours=lambda: run("ours"),
        baseline=lambda: run("baseline"),
        limit=lambda: workload.known_share(next(seeds["limit"])),
        findings=findings,
    )


def _workload(*, num_media: int, cached_share: float, exponent: float) -> _Workload:
    return _Workload(
        num_media=num_media,
        exponent=exponent,
        num_requests=6 * num_media,
        num_warming=2 * num_media,
        cached_media=max(2, round(num_media * cached_share)),
    )


def _in_words(found: dict[str, float]) -> str:
    which = f"with room for {found['cached_share']:.0%} of the media in each cache and exponent {found['exponent']}"
    rates = f"ours {found['ours']:.1%}, plain way {found['baseline']:.1%}"
    return f"{which}: {rates}, {found['ours'] / found['baseline']:.2f}x"


RING_CASES: tuple[Case, ...] = (
    Case(
        name="encoder.ring_hit_rate",
        unit="hits",
        ours="the replica that the ring names for the key",
        baseline="round robin",
        limit="caches without end",
        open=_ring,
    ),
)
