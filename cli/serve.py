"""`mimo serve`: start the stages of one deployment, show them coming up, keep them alive until told to stop.

The command's function is long because every flag is one of its parameters.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.completion import one_of, served_models, shipped_configs
from cli.greet import greet_encoder
from cli.load import BUILTIN_MODELS, MODES, ConfigError, ServeConfig
from cli.load_role import ENCODER_WORKER, ROLES, EncoderDeployment, RoleDeployment, given_role, load_any
from cli.load_workers import check_workers
from cli.logs import LOG_FORMATS, LogFormat, log_to_stderr
from cli.preflight import check_deployment
from cli.processes import (
    base_url,
    build_stages,
    console,
    encoder_stages,
    free_port,
    reach,
    require_free_port,
    serve_processes,
    stop_signal,
    until_ready,
)
from cli.runtime import run_directory
from cli.settings_view import as_json
from cli.signals import Stop
from cli.stage import FrontStage, Stage
from cli.startup import PlainView, plain_view, startup_view
from cli.supervisor import StageFailed, StageRefused
from cli.terminal import os_words, quoted
from encoder.checkpoint import read_json_object


def serve(
    mode: Annotated[
        str,
        typer.Option(
            help=f"How the stages are spread over processes: {', '.join(MODES)}.",
            show_default="epd",
            autocompletion=one_of(*MODES),
        ),
    ] = "",
    role: Annotated[
        str,
        typer.Option(
            help="One stage served by itself: encoder, whose HTTP side takes media on /v1/encode and speaks SGLang's "
            "encoder protocol; or one process of a pipeline over many machines: gateway, prefill, decode, "
            f"{ENCODER_WORKER}. Without it, the whole pipeline.",
            show_default=False,
            autocompletion=one_of(*ROLES),
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="mimo-nano, smollm2, a directory in Hugging Face layout or a .gguf file.",
            show_default="mimo-nano",
            autocompletion=served_models,
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            help="File in TOML or JSON; a bare name means one of the shipped configs/.", autocompletion=shipped_configs
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = "",
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one.", show_default="8000")
    ] = None,
    media_root: Annotated[
        list[Path] | None, typer.Option(help="Directory that file: URLs may read; repeatable. Off by default.")
    ] = None,
    allow_private_addresses: Annotated[
        bool, typer.Option("--allow-private-addresses", help="Let media URLs reach loopback and private networks.")
    ] = False,
    encoders: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COUNT|ADDRESS",
            help="Encoder processes; of role gateway where they listen, tcp://HOST:PORT, repeatable.",
            show_default="1",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Of role gateway: where prefill workers listen; repeatable."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Of role gateway: where decode workers listen; repeatable."),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help=f"Of roles prefill, decode and {ENCODER_WORKER}: where to listen, such as tcp://0.0.0.0:7001.",
            show_default=False,
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Where others reach --listen.", show_default="this machine's own address"),
    ] = "",
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that all processes of a cluster share; or MIMO_CLUSTER_KEY."),
    ] = None,
    insecure_cluster: Annotated[
        bool, typer.Option("--insecure-cluster", help="Do without one, on a network that nobody else can reach.")
    ] = False,
    health_host: Annotated[str, typer.Option(help="Address of --health-port.", show_default="127.0.0.1")] = "",
    health_port: Annotated[
        int | None,
        typer.Option(
            help=f"Of roles prefill, decode and {ENCODER_WORKER}: port of /health, /ready and /metrics.",
            show_default="none",
        ),
    ] = None,
    prefill_workers: Annotated[int | None, typer.Option(help="Prefill processes.", show_default="1")] = None,
    decode_workers: Annotated[int | None, typer.Option(help="Decode processes.", show_default="1")] = None,
    embedding_store: Annotated[
        str,
        typer.Option(
            help="Where embeddings outlive the encoders' shared memory: a directory, or redis://HOST:PORT/DB.",
            show_default="nowhere",
        ),
    ] = "",
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse the KV of shared prompt beginnings.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help='Any other setting; repeatable. Lists: a,b or a JSON list, \'["a", "b"]\'.',
        ),
    ] = None,
    log_format: Annotated[
        str,
        typer.Option(
            help="Of logs and of what happens to the stages, on standard error: text, or json with an object per line.",
            autocompletion=one_of(*LOG_FORMATS),
            show_default="text",
        ),
    ] = "",
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Show every setting with its value as JSON, named as --set takes it, and stop."
        ),
    ] = False,
) -> None:
    """Start an OpenAI-compatible API on the Encode-Prefill-Decode pipeline, or one stage of it.

    Example: mimo serve --mode epd --media-root samples

    Example: mimo serve --role encoder --encoders 2 --port 8001

    Example: mimo serve --role decode --listen tcp://0.0.0.0:7002 --cluster-key-file cluster.key
    """
    given_format = log_format or os.environ.get("MIMO_SUPERVISOR__LOG_FORMAT", "")
    with _ends_told("json" if given_format == "json" else "text") as shown, run_directory() as runtime_dir:
        known_role = given_role(config, role)
        http = "front" if known_role == "encoder" else "gateway"
        flags = _flags(
            {
                "mode": mode or None,
                "role": role or None,
                "model": model or None,
                f"{http}.host": host or None,
                f"{http}.port": port,
                "fetch.media_roots": [str(root) for root in media_root] if media_root else None,
                "fetch.allow_private_addresses": allow_private_addresses or None,
                **_encoders(encoders, known_role),
                "cluster.prefill": prefill,
                "cluster.decode": decode,
                "cluster.listen": listen or None,
                "cluster.advertise": advertise or None,
                "cluster.key_file": cluster_key_file,
                "cluster.insecure": insecure_cluster or None,
                "cluster.health_host": health_host or None,
                "cluster.health_port": health_port,
                "encoder.embedding_store": _store_url(embedding_store),
                "prefill.replicas": prefill_workers,
                "decode.replicas": decode_workers,
                "engine.prefix_cache": prefix_cache,
                "supervisor.log_format": log_format or None,
            },
            setting or [],
        )
        if flags.get(http, {}).get("port") == 0:
            flags[http]["port"] = free_port(host or "127.0.0.1")
        resolved = load_any(runtime_dir=runtime_dir, file=config, flags=flags)
        if print_config:
            if not isinstance(resolved, EncoderDeployment):
                check_workers(resolved)
            typer.echo(as_json(resolved))
            return
        shown.log_format = resolved.supervisor.log_format
        is_unified = isinstance(resolved, ServeConfig) and resolved.mode == "unified"
        if is_unified or shown.log_format == "json":
            log_to_stderr("unified" if is_unified else "supervisor", shown.log_format)
        if isinstance(resolved, EncoderDeployment):
            require_free_port(resolved.front.host, resolved.front.port)
            asyncio.run(_serve_encoder(resolved))
        elif isinstance(resolved, RoleDeployment):
            # Only here: the command line is completed without it.
            from cli.serve_role import serve_role

            serve_role(resolved)
        else:
            check_deployment(resolved)
            require_free_port(resolved.gateway.host, resolved.gateway.port)
            asyncio.run(_serve(resolved))


@dataclass(slots=True)
class _Shown:
    """How what happens is told."""

    log_format: LogFormat


@contextmanager
def _ends_told(log_format: LogFormat) -> Iterator[_Shown]:
    """What ends the block is told in the format that was asked for, as far as that is known. Raises Exit, and for
    people what is told elsewhere."""
    shown = _Shown(log_format)
    try:
        yield shown
    except StageFailed as error:
        plain_view(console, shown.log_format).failed(error)
        raise typer.Exit(2 if isinstance(error, StageRefused) else 1) from error
    except (ConfigError, OSError) as error:
        if shown.log_format != "json":
            raise
        exit_code = 2 if isinstance(error, ConfigError) else 1
        words = str(error) if isinstance(error, ConfigError) else os_words(error)
        plain_view(console, "json").refused(words, exit_code=exit_code)
        raise typer.Exit(exit_code) from error


def _flags(named: dict[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """Flags as nested settings; None means not given. `--set section.key=value` goes through the same path."""
    given = {key: value for key, value in named.items() if value is not None}
    for item in free:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item!r} is not SECTION.KEY=VALUE; example: --set engine.page_size=32")
        given[key.strip()] = value
    nested: dict[str, Any] = {}
    for key, value in given.items():
        section, _, name = key.partition(".")
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[section] = value
    return nested


def _encoders(given: Sequence[str] | None, role: str | None) -> dict[str, Any]:
    """`--encoders` is how many there are or, for a gateway by itself, where. Raises ConfigError."""
    if role == "gateway" or not given:
        return {"cluster.encoders": given or None}
    if len(given) > 1 or not given[0].isdecimal():
        raise ConfigError(f"--encoders is {' '.join(given)}; allowed: a whole number; role gateway takes addresses")
    return {"encoder.replicas": int(given[0])}


def _store_url(given: str) -> str | None:
    """A directory by its whole path: a stage may run elsewhere."""
    if not given:
        return None
    return given if "://" in given or given.startswith("unix:") else str(Path(given).expanduser().absolute())


async def _serve_encoder(config: EncoderDeployment) -> None:
    front = FrontStage(config=config.front, sglang=config.sglang)
    stages: list[Stage] = [*encoder_stages(config, config.front.encoders), front]
    await _serve_shown(config, stages, stop_signal(config.runtime_dir))


async def _serve(config: ServeConfig) -> None:
    stop = stop_signal(config.runtime_dir)
    if config.mode == "unified":
        from cli.unified import serve_unified

        view = plain_view(console, config.supervisor.log_format, "unified")
        started_s = time.monotonic()
        await serve_unified(config, stop, view=view, on_ready=lambda: _announce(config, view, started_s))
        return
    await _serve_shown(config, build_stages(config), stop)


async def _serve_shown(config: ServeConfig | EncoderDeployment, stages: Sequence[Stage], stop: Stop) -> None:
    """Serve, and show how the stages come up. Raises Exit for a stage that is beyond restarting, which is told."""
    started_s = time.monotonic()
    view = startup_view(console, [stage.name for stage in stages], config.supervisor.log_format)
    view.start()
    try:
        await serve_processes(config, stages, stop, announce=lambda: _announce(config, view, started_s), view=view)
    except StageFailed as error:
        view.failed(error)
        raise typer.Exit(2 if isinstance(error, StageRefused) else 1) from error
    finally:
        view.close()


async def _announce(config: ServeConfig | EncoderDeployment, view: PlainView, started_s: float) -> None:
    """Wait until every stage is ready, then say where the API is. Raises StageFailed."""
    await until_ready(config)
    view.ready(time.monotonic() - started_s, base_url(config))
    if view.is_for_machines:
        return
    if isinstance(config, EncoderDeployment):
        greet_encoder(config, reach(config), console)
    else:
        await _greet(config)


async def _greet(config: ServeConfig) -> None:
    """Say where the API is, and what part of the model's context it has room for."""
    url = f"{base_url(config)}/v1/chat/completions"
    sample = next(
        (root / "picture.png" for root in config.gateway.fetch.media_roots if (root / "picture.png").exists()), None
    )
    content: Any = "Hello! Who are you?"
    if sample is not None and config.model_name in BUILTIN_MODELS:
        content = [
            {"type": "image_url", "image_url": {"url": sample.resolve().as_uri()}},
            {"type": "text", "text": "What is in the picture?"},
        ]
    body = {"model": config.model_name, "stream": True, "messages": [{"role": "user", "content": content}]}
    console.print(
        f"\n[bold]{quoted(config.model_name)}[/] in mode {config.mode} at [bold]{base_url(config)}[/]   (Ctrl-C stops)"
    )
    console.print(f"chat, and the pipeline at work: {base_url(config)}/ in a browser\n")
    console.print(
        f"curl -N {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n", soft_wrap=True, markup=False
    )

    await _mention_context(config)


async def _mention_context(config: ServeConfig) -> None:
    """A small KV budget is no fault, but the limit it sets should surprise nobody."""
    import aiohttp

    headers = {"Authorization": f"Bearer {config.gateway.api_keys[0]}"} if config.gateway.api_keys else {}
    try:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=5), headers=headers, connector=aiohttp.TCPConnector(ssl=False)
            ) as session,
            session.get(f"{base_url(config)}/v1/models") as response,
        ):
            room = (await response.json())["data"][0]["max_model_len"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError):
        # The service runs all the same.
        return
    own = read_json_object(config.model_dir / "config.json").get("max_position_embeddings")
    if isinstance(own, int) and room < own:
        console.print(
            f"a prompt and its answer may have {room:,} of the model's {own:,} tokens together: "
            f"engine.kv_budget_bytes, {config.prefill[0].kv_budget_bytes:,}, has room for no more\n"
        )
