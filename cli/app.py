"""The `mimo` command: wires the subcommands together and turns known failures into one line and an exit code."""

import contextlib
import os
import sys

try:
    import typer

    from cli.bench import bench
    from cli.cache import cache
    from cli.chat import chat
    from cli.encode import encode
    from cli.eval import evaluate
    from cli.inspect import inspect
    from cli.load import ConfigError
    from cli.serve import serve
    from cli.terminal import say
except KeyboardInterrupt:
    # Ctrl-C a moment after Enter, which is a moment of imports.
    sys.exit(130)

app = typer.Typer(
    name="mimo",
    help="Serve MiMo-V2.5 models as separate Encode, Prefill and Decode stages.",
    no_args_is_help=True,
    # Plain help: the boxed one cuts flags that are longer than its column.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(encode)
app.command()(chat)
app.command("eval")(evaluate)
app.command()(inspect)
app.add_typer(bench)
app.add_typer(cache)


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 the command or its settings are wrong, 130 interrupted."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except ConfigError as error:
        say(f"mimo: {error}")
        sys.exit(2)
    except OSError as error:
        # Standard output that takes no more: a full disk, a closed pipe.
        say(f"mimo: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        _drop_output()
        sys.exit(1)


def _drop_output() -> None:
    """What is still buffered for standard output would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
