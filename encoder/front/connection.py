"""How the front words what it refuses before a route is known (`encoder.connections`)."""

from aiohttp import web

from encoder.connections import Lobby
from encoder.front.config import FrontConfig
from encoder.front.problems import Problem


def lobby_of(config: FrontConfig) -> Lobby:
    """Connections that say half a request, or none."""
    return Lobby(
        max_waiting=config.max_idle_connections,
        head_timeout_s=config.head_timeout_s,
        setting="front.head_timeout_s",
        refuse=_refuse,
    )


def _refuse(status: int, code: str, message: str) -> web.Response:
    return web.Response(
        body=Problem(status, code, message).json_bytes(), status=status, content_type="application/json"
    )
