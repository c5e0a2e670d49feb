"""One encoder replica: put the parts together, serve until a signal, take them apart again."""

import asyncio
import contextlib
import logging
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
import zmq.asyncio

from encoder.cache.host import private_arena, remove_orphaned
from encoder.cache.index import RowFormat
from encoder.cache.store import EmbeddingStore
from encoder.checkpoint import read_json_object
from encoder.cluster import ClusterKeys
from encoder.config import EncoderConfig
from encoder.errors import ArenaUnavailable
from encoder.fingerprint import checkpoint_fingerprint
from encoder.links import ZmqEndpoint
from encoder.runner import TowerRunner
from encoder.server import EncoderServer
from encoder.tiers.base import TierFailed, open_tier
from encoder.tiers.second import SecondTier
from encoder.types import Replica
from preprocess.config import ProcessorConfig
from preprocess.errors import DecoderUnavailable
from preprocess.pool import DecodePool
from preprocess.video.backends import load_video_backend

logger = logging.getLogger(__name__)

_EXIT_REFUSED = 2
# What `open_server` raises about settings and checkpoints; CheckpointError is a ValueError.
_REFUSALS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, DecoderUnavailable, TierFailed)


@contextmanager
def open_server(
    config: EncoderConfig, *, model_dir: Path, name: str, arena: str, shared: bool = False
) -> Iterator[EncoderServer]:
    """An encoder server with everything it needs; the caller starts and stops it on its loop.

    With `shared`, `arena` is one that somebody made for all encoders of this host (see `encoder.cache.host`) and will
    unlink; otherwise the server makes one for itself whose name begins with `arena`. Raises CheckpointError,
    ArenaUnavailable, DecoderUnavailable where decoders cannot be isolated in processes, BackendUnavailable, TierFailed.
    """
    incarnation = uuid.uuid4().hex[:12]
    processor = ProcessorConfig.from_hf(read_json_object(model_dir / "config.json"))
    processor = replace(processor, video_backend=config.video_backend)
    load_video_backend(config.video_backend)
    replica = Replica(name=name, incarnation=incarnation, fingerprint=checkpoint_fingerprint(model_dir))
    with contextlib.ExitStack() as stack:
        # First: its processes, if there are any, start while the towers are loaded.
        pool = DecodePool(config.decode_settings)
        stack.callback(pool.close)
        runner = TowerRunner.load(model_dir, config)
        stack.callback(runner.close)
        if not shared:
            arena = stack.enter_context(private_arena(config, arena, incarnation))
        else:
            stack.callback(remove_orphaned, arena)
        rows = RowFormat(runner.width, runner.dtype, runner.row_bytes)
        store = EmbeddingStore(arena, holder=incarnation, rows=rows)
        stack.callback(store.close)
        yield EncoderServer(
            config,
            replica=replica,
            runner=runner,
            store=store,
            pool=pool,
            processor=processor,
            second=_open_second_tier(config, runner, store),
        )


def _open_second_tier(config: EncoderConfig, runner: TowerRunner, store: EmbeddingStore) -> SecondTier | None:
    """Raises TierFailed."""
    if not config.embedding_store:
        return None
    tier = open_tier(
        config.embedding_store,
        max_bytes=config.embedding_store_bytes,
        ttl_s=config.embedding_store_ttl_s,
        timeout_s=config.embedding_store_timeout_s,
    )
    return SecondTier(
        tier,
        store,
        width=runner.width,
        dtype=runner.dtype,
        timeout_s=config.embedding_store_timeout_s,
        clock=time.monotonic,
    )


async def serve(server: EncoderServer, address: str, stop: asyncio.Event, *, keys: ClusterKeys | None = None) -> None:
    """Serve over ZMQ until `stop` is set, then drain. Raises what ended a background task before that."""
    context = zmq.asyncio.Context()
    try:
        endpoint = ZmqEndpoint(address, server, context, keys=keys)
        server.start()
        endpoint.start()
        logger.info("encoder serves on %s", endpoint.address)
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopped, *server.tasks, *endpoint.tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await server.stop()
        await endpoint.stop()
    finally:
        context.destroy(linger=200)


def run_encoder(
    config: EncoderConfig,
    *,
    model_dir: Path,
    name: str,
    address: str,
    arena: str,
    shared: bool = False,
    keys: ClusterKeys | None = None,
) -> None:
    """Run a replica in this process until SIGTERM; `arena` and `shared` as for `open_server`.

    What keeps it from starting ends it with one line in the log: exit code 2 for settings or a checkpoint that cannot
    work, where starting again is no use, and 1 for a host without enough shared memory.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # SIGINT is the supervisor's: a Ctrl-C reaches every stage at once and would end them in no order.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        with contextlib.ExitStack() as stack:
            try:
                opened = open_server(config, model_dir=model_dir, name=name, arena=arena, shared=shared)
                server = stack.enter_context(opened)
            except (*_REFUSALS, ArenaUnavailable) as error:
                logger.error("encoder %s cannot start: %s", name, " ".join(str(error).split()))
                sys.exit(1 if isinstance(error, ArenaUnavailable) else _EXIT_REFUSED)
            await serve(server, address, stop, keys=keys)

    uvloop.run(main())
