"""The gateway process stays light, and its settings reach the fetcher."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from epd.config import FetchPolicy, GatewayConfig
from epd.gateway.process import fetch_limits
from tests.fakes.gateway import MODEL_DIR, running_gateway


def test_the_gateway_loads_no_torch_and_no_engine() -> None:
    code = (
        "import sys, epd; epd.run_gateway; epd.create_app; epd.Renderer\n"
        "heavy = [name for name in sys.modules if name.split('.')[0] in ('torch', 'torchvision', 'av', 'decord')"
        " or name.startswith(('epd.engine', 'epd.model', 'epd.kv', 'epd.cache', 'encoder.towers', 'encoder.server'))]\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_fetch_limits_follow_the_policy() -> None:
    policy = FetchPolicy(media_roots=(Path("m"),), allow_private_addresses=True, max_bytes=7, timeout_s=3.0)
    slow = FetchPolicy(stall_timeout_s=2.0, max_concurrency=5, max_concurrency_per_request=4)
    limits = fetch_limits(GatewayConfig(model_dir=MODEL_DIR, model_name="m", fetch=policy))
    assert (limits.media_roots, limits.allow_private_addresses) == ((Path("m"),), True)
    assert (limits.max_bytes, limits.timeout_s) == (7, 3.0)
    assert (slow.limits.stall_timeout_s, slow.limits.max_concurrency, slow.limits.max_concurrency_per_request) == (
        2.0,
        5,
        4,
    )


async def test_other_requests_do_not_feel_a_long_prompt() -> None:
    async with running_gateway() as stack:
        long = asyncio.create_task(stack.ask("word " * 16_000))
        slowest_s = 0.0
        while not long.done():
            started_s = time.monotonic()
            async with stack.session.get("/health") as response:
                assert response.status == 200
            slowest_s = max(slowest_s, time.monotonic() - started_s)
        status, body, _ = await long
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert slowest_s < 1.0
