"""`mimo chat`: ask about media from a terminal, on a pipeline in this process or on a running server."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import typer

from cli.load import ConfigError, load
from cli.media_files import MediaFileError, chat_part
from cli.preflight import check_deployment
from cli.runtime import run_directory
from preprocess.types import Modality


class ChatFailed(Exception):
    """The server refused or broke off; the message is its own."""


def chat(
    question: Annotated[
        str | None, typer.Argument(help="What to ask; without it, a conversation starts.", show_default=False)
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture to ask about; repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video to ask about; repeatable.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="A sound to ask about; repeatable.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask this server, e.g. http://127.0.0.1:8000; else a local pipeline.")
    ] = None,
    model: Annotated[str, typer.Option(help="As for `mimo serve`; with --url, the served name.")] = "mimo-nano",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
) -> None:
    """Ask a question, with pictures, videos and sounds.

    Example: mimo chat --image samples/picture.png "What is in the picture?"
    """
    try:
        parts = [
            chat_part(path, modality)
            for modality, paths in ((Modality.IMAGE, image), (Modality.VIDEO, video), (Modality.AUDIO, audio))
            for path in paths or []
        ]
    except MediaFileError as error:
        raise ConfigError(str(error)) from error
    if question is not None and not question.strip():
        raise ConfigError("the question is empty; leave it out to start a conversation")
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    try:
        asyncio.run(_talk(None if url is None else server_root(url), model, parts, question, sampling))
    except (ChatFailed, aiohttp.ClientError, OSError) as error:
        typer.echo(f"mimo chat: {error}", err=True)
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, EOFError):
        typer.echo()


def server_root(url: str) -> str:
    """`http://host:port/v1/` and `http://host:port` name the same server. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url is {url!r}: {error}; give an address like http://127.0.0.1:8000") from error
    path = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigError(f"--url is {url!r}; give an address like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{path}"


async def _talk(
    url: str | None, model: str, parts: Sequence[dict[str, Any]], question: str | None, sampling: dict[str, Any]
) -> None:
    async with _server(url, model) as (base_url, name), aiohttp.ClientSession() as session:
        messages: list[dict[str, Any]] = []
        pending = list(parts)
        while True:
            text = question if question is not None else await asyncio.to_thread(input, "you> ")
            if text.strip():
                messages.append({"role": "user", "content": [*pending, {"type": "text", "text": text}]})
                pending = []
                answer = ""
                async for piece in _stream(session, base_url, {"model": name, "messages": messages, **sampling}):
                    answer += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                sys.stdout.write("\n")
                messages.append({"role": "assistant", "content": answer})
            if question is not None:
                return


async def _stream(session: aiohttp.ClientSession, base_url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """Text pieces of one streamed answer. Raises ChatFailed with the server's message."""
    async with session.post(f"{base_url}/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status != 200:
            raise ChatFailed(_error_message(response.status, base_url, await response.text()))
        if response.content_type != "text/event-stream":
            raise ChatFailed(f"{base_url} answered with {response.content_type}: this is no OpenAI-compatible server")
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise ChatFailed(event["error"]["message"])
            for choice in event.get("choices", []):
                yield choice["delta"].get("content") or ""


def _error_message(status: int, base_url: str, body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{base_url} answered with status {status} and no OpenAI error: is this an OpenAI-compatible server?"


@asynccontextmanager
async def _server(url: str | None, model: str) -> AsyncIterator[tuple[str, str]]:
    """Base URL and model name: the given server's, or a pipeline in this process for as long as it is needed."""
    if url is not None:
        yield url, model
        return
    from cli.unified import unified_server

    with run_directory() as runtime_dir:
        config = load(runtime_dir=runtime_dir, flags={"mode": "unified", "model": model, "gateway": {"port": 0}})
        check_deployment(config)
        async with unified_server(config) as port:
            yield f"http://127.0.0.1:{port}", config.model_name
