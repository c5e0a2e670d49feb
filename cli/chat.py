"""`mimo chat`: ask about media from a terminal, on a pipeline in this process or on a running server."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.chat_client import ChatFailed, ModelUnknown, Reply, Target, ask, first_model, server_root
from cli.completion import served_models
from cli.errors import ConfigError
from cli.media_files import MediaFileError, recognised_part
from cli.terminal import complain, os_words
from preprocess.types import Modality

if TYPE_CHECKING:
    from cli.chat_repl import Attachment, Conversation


def chat(
    question: Annotated[
        str | None,
        typer.Argument(help="What to ask; without it, a conversation, or what standard input has.", show_default=False),
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture to ask about; repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video to ask about; repeatable.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="A sound to ask about; repeatable.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask this OpenAI-compatible server, e.g. http://127.0.0.1:8000; else a pipeline in this process."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="As for `mimo serve`; with --url, the served name.",
            show_default="mimo-nano; with --url the first the server lists",
            autocompletion=served_models,
        ),
    ] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Of the server.", show_default=False, show_envvar=True)
    ] = "",
    system: Annotated[str, typer.Option(help="Instructions for the whole conversation.", show_default=False)] = "",
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Reason before answering.", show_default="the model's way")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One question: print answer, usage and times as one JSON object.")
    ] = False,
) -> None:
    """Ask a question, with pictures, videos and sounds, or hold a conversation.

    In a conversation /help tells the commands: /image, /video and /audio attach files, as does the path of a file alone
    on a line; /detach, /think, /system, /reset, /save, /stats. Ctrl-C stops an answer, Ctrl-D leaves.

    Example: mimo chat --image samples/picture.png "What is in the picture?"

    Example: mimo chat --url http://127.0.0.1:8000

    Example: echo "What is 2+2?" | mimo chat --model smollm2 --json
    """
    # Only here: completion and help are quick.
    from cli.chat_repl import Conversation

    attached = _attached({Modality.IMAGE: image, Modality.VIDEO: video, Modality.AUDIO: audio})
    if question is None and (as_json or not sys.stdin.isatty()):
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise ConfigError("the question is empty; leave it out, in a terminal, to start a conversation")
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    conversation = Conversation(Target("", model, api_key), sampling, system=system, thinks=think, attached=attached)
    try:
        with _server(None if url is None else server_root(url), model, api_key) as target:
            conversation.target = target
            if question is not None:
                _answer_once(conversation, question, as_json=as_json)
            else:
                _converse(conversation)
    except (ChatFailed, OSError) as error:
        exit_code = 2 if isinstance(error, ModelUnknown) else 1
        words = os_words(error) if isinstance(error, OSError) else str(error)
        complain("mimo chat", words, exit_code=exit_code)
        raise typer.Exit(exit_code) from error


def _attached(files: dict[Modality, list[Path] | None]) -> "list[Attachment]":
    """Raises ConfigError."""
    from cli.chat_repl import Attachment

    try:
        return [
            Attachment(path.name, *recognised_part(path, modality))
            for modality, paths in files.items()
            for path in paths or []
        ]
    except MediaFileError as error:
        raise ConfigError(str(error)) from error


def _answer_once(conversation: "Conversation", question: str, *, as_json: bool) -> None:
    """One question and its answer on standard output, as it comes. Raises ChatFailed."""
    from cli.chat_repl import shown

    reply, is_terminal = Reply(), sys.stdout.isatty()

    def show(kind: str, piece: str) -> None:
        if kind == "text" and not as_json:
            sys.stdout.write(shown(piece) if is_terminal else piece)
            sys.stdout.flush()

    body = conversation.body(question.rstrip("\n"))
    ask(conversation.target, body, reply, show)
    if not as_json:
        sys.stdout.write("\n")
        return
    report = {
        "model": conversation.target.model,
        "answer": reply.text,
        "reasoning": reply.reasoning or None,
        "finish_reason": reply.finish_reason,
        "usage": reply.usage,
        "warnings": reply.warnings,
        "ttft_s": reply.ttft_s,
        "total_s": reply.total_s,
        "tokens_per_s": reply.tokens_per_s,
    }
    typer.echo(json.dumps(report, indent=2, ensure_ascii=False))


def _converse(conversation: "Conversation") -> None:
    from cli.chat_input import LineReader
    from cli.chat_repl import Repl
    from cli.models import cache_dir

    reader = LineReader(cache_dir(os.environ) / "chat_history", [*Repl.commands, "/exit"])
    try:
        Repl(conversation, reader).run()
    finally:
        reader.close()


@contextmanager
def _server(url: str | None, model: str, api_key: str) -> Iterator[Target]:
    """The given server, or a pipeline in this process for as long as it is needed. Raises ConfigError, ChatFailed."""
    if url is not None:
        yield Target(url, model or first_model(url, api_key), api_key)
        return
    from cli.chat_embedded import embedded_server
    from cli.load import load
    from cli.preflight import check_deployment
    from cli.runtime import run_directory

    with run_directory() as runtime_dir:
        flags: dict[str, Any] = {"mode": "unified", "model": model or "mimo-nano", "gateway": {"port": 0}}
        config = load(runtime_dir=runtime_dir, flags=flags)
        # Nobody else is asked, and nobody knows the port.
        config = replace(config, gateway=replace(config.gateway, api_keys=()))
        check_deployment(config)
        if sys.stderr.isatty():
            typer.secho(f"starting {config.model_name} ...", dim=True, err=True)
        with embedded_server(config) as base_url:
            yield Target(base_url, config.model_name)
