"""The front as a process: settings to sockets, HTTP until a signal."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import Final

import uvloop

from encoder.checkpoint import CheckpointError
from encoder.client import EncoderClient
from encoder.front.config import FrontConfig
from encoder.front.serving import running_front
from encoder.sglang.config import SglangConfig

logger = logging.getLogger(__name__)

_EXIT_REFUSED: Final = 2
# The thread that answers probes waits for the interpreter's lock this long at most while another computes.
_SWITCH_INTERVAL_S: Final = 0.001
_NICENESS: Final = -10


async def serve_front(config: FrontConfig, sglang: SglangConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises CheckpointError for a model directory and OSError for a port that cannot be
    used."""
    async with EncoderClient.connect(config.encoders) as encoder, running_front(config, encoder, sglang) as server:
        logger.info("the encoder's front serves %s on %s:%d", config.model_name, config.host, server.port)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({stopped, server.pulse}, return_when=asyncio.FIRST_COMPLETED)
        if server.pulse.done():
            server.pulse.result()


def run_front(config: FrontConfig, sglang: SglangConfig) -> None:
    """Run the front in this process until SIGTERM.

    A checkpoint that cannot work ends it with one line in the log and exit code 2: starting again is no use.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # SIGINT is the supervisor's: a Ctrl-C reaches every stage at once and would end them in no order.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        try:
            await serve_front(config, sglang, stop)
        except CheckpointError as error:
            logger.error("the front cannot start: %s", " ".join(str(error).split()))
            sys.exit(_EXIT_REFUSED)

    with contextlib.suppress(PermissionError):
        # Where it may: whoever holds the interpreter's lock must not stand in line behind the decoders.
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(main())
