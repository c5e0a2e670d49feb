"""The HTTP application: what there is, wired together. The parts of the API say what they can do as operations."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from aiohttp import web

from encoder.connections import TlsSite
from encoder.tracing_web import trace_requests
from epd.config import GatewayConfig
from epd.gateway.admission import Admission
from epd.gateway.body import BodyReader
from epd.gateway.chat import ChatService
from epd.gateway.completions import ChatCompletions
from epd.gateway.completions_text import TextCompletions
from epd.gateway.connection import Drain, GatewayRunner
from epd.gateway.edge import Edge
from epd.gateway.encode_routes import Encode
from epd.gateway.exchange import Exchange
from epd.gateway.files_routes import Files, file_store
from epd.gateway.grammar_process import Grammars
from epd.gateway.keys import ApiKeys
from epd.gateway.library import Libraries
from epd.gateway.media import Encoder, MediaFetcher, MediaStage
from epd.gateway.media_shelf import MediaShelf
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.metrics_library import LibraryMetrics
from epd.gateway.openapi import Document
from epd.gateway.operations import ApiPart, Operation, add_routes
from epd.gateway.origins import Origins
from epd.gateway.page_files import PageFiles
from epd.gateway.pipeline import Pipeline
from epd.gateway.rates import RateLimiter
from epd.gateway.receipt import Receipt
from epd.gateway.recent import RecentRequests
from epd.gateway.render import Renderer
from epd.gateway.status import Status
from epd.gateway.text import TextService
from epd.gateway.tls import Tls
from epd.gateway.tokenize import TokenizerRoutes
from epd.gateway.traces import trace_receipt
from epd.router.workers import Fleet
from epd.transport.base import Channel

OPERATIONS: web.AppKey[Sequence[Operation]] = web.AppKey("operations", Sequence)
"""All that the application can do."""

# How often keys and certificates are looked at for changes.
_RENEW_S = 10.0


def create_app(
    config: GatewayConfig,
    *,
    renderer: Renderer,
    fetcher: MediaFetcher,
    encoder: Encoder,
    prefill: Sequence[Channel],
    decode: Sequence[Channel] = (),
    discovery: Callable[[Fleet], AbstractAsyncContextManager[None]] | None = None,
    grammars: Grammars | None = None,
    clock: Callable[[], float] = time.monotonic,
    unix_clock: Callable[[], float] = time.time,
) -> web.Application:
    """The gateway over what is handed in. The channels are opened when the app starts and closed when it stops;
    `fetcher` and `encoder` belong to the caller. Serve it with `start_gateway`, which notices a client that leaves.
    `discovery` adds workers to the fleet, and retires them, for as long as the app runs. `grammars`, where they are
    given, belong to the caller, too.
    """
    fleet = Fleet(
        prefill=prefill,
        decode=decode,
        heartbeat_s=config.heartbeat_s,
        timeout_s=config.worker_timeout_s,
        clock=clock,
        has_decode=bool(decode or config.decode),
        model=config.model_name,
    )
    metrics = GatewayMetrics(fleet=fleet, encoder_infos=encoder.infos)
    admission = Admission(
        max_inflight=config.max_inflight, timeout_s=config.request_timeout_s, on_change=metrics.inflight.set
    )

    def patience_s() -> float:
        # A gateway that stops waits for nobody: what is down then stays down.
        return 0.0 if admission.draining else config.restart_wait_s

    media = MediaStage(
        fetcher=fetcher, encoder=encoder, processor=renderer.processor, clock=clock, patience_s=patience_s
    )
    files = file_store(config, unix_clock=unix_clock)
    libraries = Libraries(files=files, shelf=MediaShelf(config.media_shelf_bytes), max_bytes=config.fetch.max_bytes)
    metrics.registry.register(LibraryMetrics(libraries))
    own_grammars = None
    if grammars is None:
        grammars = own_grammars = Grammars(config.model_dir / "tokenizer.json", renderer.grammars)
    chat = ChatService(
        config=config,
        renderer=renderer,
        grammars=grammars,
        media=media,
        libraries=libraries,
        fleet=fleet,
        metrics=metrics,
        clock=clock,
        unix_clock=unix_clock,
    )
    recent = RecentRequests()
    bodies = BodyReader(max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)

    def tell_end(receipt: Receipt, owner: str) -> None:
        recent.add(receipt, owner=owner)
        trace_receipt(receipt)

    exchange = Exchange(
        config=config,
        admission=admission,
        bodies=bodies,
        clock=clock,
        unix_clock=unix_clock,
        on_end=tell_end,
    )
    parts: list[ApiPart] = [
        ChatCompletions(exchange, chat=chat),
        TextCompletions(exchange, text=TextService(chat=chat)),
        TokenizerRoutes(config, chat=chat, admission=admission, bodies=bodies),
        Status(config, chat=chat, fleet=fleet, encoder=encoder, metrics=metrics, admission=admission),
        Pipeline(
            config,
            fleet=fleet,
            encoder=encoder,
            admission=admission,
            recent=recent,
            clock=clock,
            unix_clock=unix_clock,
        ),
        PageFiles(),
        Encode(
            config,
            fetcher=fetcher,
            encoder=encoder,
            processor=renderer.processor,
            libraries=libraries,
            admission=admission,
            patience_s=patience_s,
            unix_clock=unix_clock,
        ),
    ]
    file_routes = None if files is None else Files(config, store=files, admission=admission)
    if file_routes is not None:
        parts.append(file_routes)
    parts.append(Document(config, operations=lambda: operations, num_token_ids=renderer.vocabulary.num_token_ids))
    operations = [operation for part in parts for operation in part.operations()]
    keys = ApiKeys(config.api_keys, config.api_keys_file)
    edge = Edge(
        keys=keys,
        limiter=RateLimiter(
            per_minute=config.requests_per_minute,
            burst=config.requests_burst,
            max_inflight=config.max_inflight_per_client,
            clock=clock,
        ),
        origins=Origins(
            config.cors_origins, host=config.host, names=config.allowed_hosts, asks_for_keys=keys.are_asked_for
        ),
        metrics=metrics,
        operations=operations,
        clock=clock,
    )
    app = web.Application(middlewares=[trace_requests, edge.around])
    app[OPERATIONS] = tuple(operations)
    add_routes(app, operations)
    app[_DRAIN] = drain = Drain(config, fleet=fleet, admission=admission)
    app.on_response_prepare.append(drain.mark)

    async def run_stages(_: web.Application) -> AsyncIterator[None]:
        fleet.start()
        renewing = asyncio.create_task(_renew(keys.renew), name="renew keys")
        async with nullcontext() if discovery is None else discovery(fleet):
            yield
        renewing.cancel()
        await fleet.stop()
        if own_grammars is not None:
            own_grammars.close()

    # First what can fail.
    if file_routes is not None:
        app.cleanup_ctx.append(file_routes.run)
    app.cleanup_ctx.append(run_stages)
    return app


async def start_gateway(
    app: web.Application, *, host: str, port: int, tls: Tls | None = None
) -> tuple[GatewayRunner, int]:
    """Listen; returns the runner, whose `cleanup` drains and stops everything, and the port (the system's choice for
    0)."""
    if tls is not None:
        app.cleanup_ctx.append(lambda _: _renewing(tls))
    runner = GatewayRunner(app, drain=app[_DRAIN])
    await runner.setup()
    site = web.TCPSite(runner, host, port) if tls is None else TlsSite(runner, host, port, context=tls.context)
    await site.start()
    return runner, runner.addresses[0][1]


async def _renewing(tls: Tls) -> AsyncIterator[None]:
    task = asyncio.create_task(_renew(tls.renew), name="renew certificate")
    yield
    task.cancel()


async def _renew(look: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_RENEW_S)
        await asyncio.to_thread(look)


_DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
