"""What `mimo serve --role encoder` says once it is ready: where, and requests that can be pasted."""

from rich.console import Console

from cli.load_role import EncoderDeployment
from cli.terminal import quoted

_ONE_LINER = (
    "import base64, json, sys, numpy; item = json.load(sys.stdin)['data'][0]; "
    "print(numpy.frombuffer(base64.b64decode(item['embedding']), numpy.float32).reshape(item['rows'], item['width']))"
)


def greet_encoder(config: EncoderDeployment, address: str, console: Console) -> None:
    """`address` is host:port to reach the front."""
    replicas = f"{len(config.encoders)} replica{'s'[: len(config.encoders) != 1]}"
    console.print(
        f"\n[bold]{quoted(config.model_name)}[/]'s encoder, {replicas}, at [bold]http://{address}[/]   (Ctrl-C stops)\n"
    )
    key = " -H 'Authorization: Bearer KEY'" if config.front.api_keys else ""
    lines = [f"curl -s http://{address}/v1/encode{key} -F image=@samples/picture.png"]
    if config.encoders[0].dtype == "float32":
        lines[0] += f' | \\\n    python3 -c "{_ONE_LINER}"'
    if config.sglang.enabled:
        lines.append(f"python3 -m sglang.launch_server ... --language-only --encoder-urls http://{address}")
    for line in lines:
        console.print(f"{line}\n", soft_wrap=True, markup=False)
