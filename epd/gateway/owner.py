"""Whose a request is. Clients of one gateway see neither each other's files, media names nor receipts."""

import hashlib

from aiohttp import web

_OWNER: web.RequestKey[str] = web.RequestKey("owner", str)


def set_owner(request: web.Request, api_key: bytes) -> None:
    """Called by the edge for a request with a valid key. A digest stands for the key, which is not kept."""
    request[_OWNER] = hashlib.sha256(b"owner " + api_key).hexdigest()[:32]


def owner_of(request: web.Request) -> str:
    """Empty where no API keys are in use: then everybody is the same owner."""
    owner: str = request.get(_OWNER, "")
    return owner
