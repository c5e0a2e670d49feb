"""Registration, against a bootstrap server of our own that comes late, goes away and forgets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from encoder.sglang.bootstrap import Bootstrap, own_address
from encoder.sglang.config import SglangConfig
from tests.encoder.sglang.conftest import until


@dataclass
class Server:
    """The list of one language-only server."""

    urls: list[str] = field(default_factory=list)
    num_refusals: int = 0
    num_calls: int = 0
    times_s: list[float] = field(default_factory=list)

    async def register(self, request: web.Request) -> web.Response:
        self.num_calls += 1
        self.times_s.append(asyncio.get_running_loop().time())
        if self.num_refusals:
            self.num_refusals -= 1
            return web.Response(status=503)
        url = (await request.json())["url"]
        if url not in self.urls:
            self.urls.append(url)
        return web.Response(text="OK")

    async def unregister(self, request: web.Request) -> web.Response:
        self.urls.remove((await request.json())["url"])
        return web.Response(text="OK")


@asynccontextmanager
async def serving(server: Server, port: int) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_post("/register_encoder_url", server.register)
    app.router.add_delete("/unregister_encoder_url", server.unregister)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield
    await runner.cleanup()


async def test_it_registers_everywhere_and_takes_its_leave(unused_tcp_port_factory: Callable[[], int]) -> None:
    ports = [unused_tcp_port_factory() for _ in range(2)]
    servers = [Server(), Server(num_refusals=3)]
    config = SglangConfig(register_urls=tuple(f"http://127.0.0.1:{port}" for port in ports))
    bootstrap = Bootstrap(config, pause_s=0.02)
    async with serving(servers[0], ports[0]):
        bootstrap.start("10.1.2.3", 4567)
        await until(lambda: servers[0].urls)
        # The other is not there yet.
        async with serving(servers[1], ports[1]):
            await until(lambda: servers[1].urls)
            assert servers[0].urls == servers[1].urls == ["http://10.1.2.3:4567"]
            assert servers[1].num_calls == 4
            # In peace, not as fast as it can.
            assert servers[1].times_s[3] - servers[1].times_s[0] >= 3 * 0.02
            await bootstrap.stop()
            assert servers[0].urls == servers[1].urls == []
            await bootstrap.stop()


async def test_a_server_that_was_restarted_learns_of_it(unused_tcp_port: int) -> None:
    config = SglangConfig(register_urls=(f"http://127.0.0.1:{unused_tcp_port}",), renew_period_s=0.02)
    bootstrap = Bootstrap(config, pause_s=0.01)
    first, second = Server(), Server()
    async with serving(first, unused_tcp_port):
        bootstrap.start("", 80)
        await until(lambda: first.urls)
        assert first.urls == [f"http://{own_address()}:80"]
    async with serving(second, unused_tcp_port):
        await until(lambda: second.urls)
        await bootstrap.stop()
        assert second.urls == []


async def test_it_gives_up_after_thirty_attempts(unused_tcp_port: int, caplog: pytest.LogCaptureFixture) -> None:
    config = SglangConfig(
        register_urls=(f"http://127.0.0.1:{unused_tcp_port}",), renew_period_s=0, advertised_url="http://[::1]:5"
    )
    server = Server(num_refusals=1000)
    async with serving(server, unused_tcp_port):
        bootstrap = Bootstrap(config, pause_s=0.001)
        bootstrap.start("", 80)
        await until(lambda: "30 attempts" in caplog.text)
        await asyncio.sleep(0.05)
        assert server.num_calls == 30
        server.urls.append("http://[::1]:5")
        await bootstrap.stop()
        assert server.urls == []


def test_urls_that_the_other_side_would_not_know_again() -> None:
    for url in ("http://a:80/", "https://a:80", "a:80", "http://a:80?x", "http://"):
        with pytest.raises(ValueError, match="http://host:port"):
            SglangConfig(register_urls=(url,))
        with pytest.raises(ValueError, match="http://host:port"):
            SglangConfig(advertised_url=url)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transfer_backend": "carrier pigeon"}, "zmq_to_tokenizer"),
        ({"encode_timeout_s": 0}, "encode_timeout_s"),
        ({"max_parts": 0}, "max_parts"),
        ({"renew_period_s": -1}, "renew_period_s"),
        ({"embedding_data_module": "os; x"}, "dotted name"),
        ({"receiver_networks": ("10.0.0.1/8",)}, "host bits"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SglangConfig(**settings)  # type: ignore[arg-type]
