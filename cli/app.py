"""The `mimo` command: finds the subcommand that is asked for and turns known failures into one line and an exit code.

A subcommand's module is imported when that subcommand runs, or is completed: `mimo --help` and the completion of its
words load nothing that serves.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from cli.errors import ConfigError
from cli.interrupts import EXIT_INTERRUPTED, interrupt_again, is_interrupted
from cli.terminal import complain, os_words


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Where a subcommand is, and what it is for in the few words that fit beside its name."""

    module: str
    attribute: str
    summary: str


SUBCOMMANDS: Final[Mapping[str, Subcommand]] = {
    "serve": Subcommand("cli.serve", "serve", "Start an OpenAI-compatible API, or one stage of it."),
    "chat": Subcommand("cli.chat", "chat", "Ask about pictures, videos and sounds, or hold a conversation."),
    "encode": Subcommand("cli.encode", "encode", "Turn media into embeddings, without a server."),
    "plan": Subcommand("cli.plan", "plan", "Tell what a model takes on a GPU, before it is downloaded."),
    "doctor": Subcommand("cli.doctor", "doctor", "Check this machine, and say what to do about it."),
    "inspect": Subcommand("cli.inspect", "inspect", "Print what a checkpoint holds and costs."),
    "eval": Subcommand("cli.eval", "evaluate", "Count exact answers of the built-in model."),
    "bench": Subcommand("cli.bench", "bench", "Measure this machine against the plain way and the limit."),
    "cache": Subcommand("cli.cache", "cache", "Look into the caches of this host, or empty them."),
}
"""In the order of the help."""

_MODELS: Final = "the models are mimo-nano, smollm2, directories and .gguf files; `mimo inspect MODEL` tells of one"
_OTHER_TOOLS: Final[Mapping[str, str]] = {
    "run": "`mimo chat` asks a model, `mimo serve` serves it",
    "start": "`mimo serve` starts a server",
    "list": _MODELS,
    "ls": _MODELS,
    "models": _MODELS,
    "show": "`mimo inspect MODEL` tells what a model holds",
    "pull": "nothing is downloaded; `mimo serve --model` takes a directory or a .gguf file that is here",
    "ps": "`mimo doctor` tells who has a port; a server names its model at /v1/models",
}
"""Commands of Ollama and others, by the words people try."""

_USAGE_FAULT: Final[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What a wrong flag, value or argument raises. typer brings a click of its own, whose names are not public."""


class LazyGroup(TyperGroup):
    """A group whose commands are names and summaries until one of them is needed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, known in SUBCOMMANDS.items():
            self.commands[name] = TyperCommand(name, help=known.summary)

    def load(self, name: str) -> Any:
        """The command itself. Imports its module."""
        known = SUBCOMMANDS[name]
        found = getattr(import_module(known.module), known.attribute)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)
            single.command(name)(found)
            found = single
        command = typer.main.get_command(found)
        command.name = name
        self.commands[name] = command
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises a usage error that tells whoever knows another tool's word what does the same here."""
        if args and args[0] in _OTHER_TOOLS:
            ctx.fail(f"No such command {args[0]!r}: {_OTHER_TOOLS[args[0]]}")
        if args and args[0] in SUBCOMMANDS:
            self.load(args[0])
        interrupt_again()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Raises usage errors that name the value which was given."""
        try:
            return super().invoke(ctx)
        except _USAGE_FAULT as error:
            name_value(error)
            raise


def name_value(error: Any) -> None:
    """A value's refusal in the words of settings, `x is 0; allowed: ...`; what was given only its cause knows."""
    told = getattr(error.__cause__, "errors", None)
    found = told() if told is not None else []
    if found and not isinstance(given := found[0].get("input"), list | tuple | dict):
        allowed = error.message.removeprefix("Input should be ").partition(", unable to parse")[0]
        name = next(iter(getattr(error.param, "opts", ())), None) or "the value"
        error.message, error.is_whole = (
            f"{name} is {given if str(given)[-1:].isdigit() else repr(given)}; allowed: {allowed}",
            True,
        )


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            found = version("mimo-epd")
        except PackageNotFoundError:
            found = "(not installed)"
        typer.echo(f"mimo {found}")
        raise typer.Exit


app = typer.Typer(
    name="mimo",
    cls=LazyGroup,
    no_args_is_help=True,
    # Plain help: the boxed one cuts flags that are longer than its column.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve MiMo-V2.5 models as separate Encode, Prefill and Decode stages.

    Example: mimo serve --mode epd

    Example: mimo chat "Hello! Who are you?"
    """


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 the command or its settings are wrong, 130 interrupted."""
    try:
        _run()
    except ConfigError as error:
        _refuse(str(error))
    except BaseException as error:
        if isinstance(error, SystemExit) or not is_interrupted(error):
            if not isinstance(error, OSError):
                raise
            # Standard output that takes no more: a full disk, a closed pipe.
            _fail(error)
        sys.exit(EXIT_INTERRUPTED)


def _run() -> None:
    """A usage error is one line, or one JSON object where the command is asked for JSON."""
    try:
        code = app(standalone_mode=False)
    except _USAGE_FAULT as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        _refuse_words(error)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_words(error: Any) -> NoReturn:
    """What is wrong with the words of the command, and where to read which there are."""
    command = _command(sys.argv[1:])
    message = error.message if getattr(error, "is_whole", False) else error.format_message()
    _refuse(f"{' '.join(message.split()).rstrip('.')} (see {command} --help)")


def _refuse(message: str) -> NoReturn:
    complain(_command(sys.argv[1:]), message, exit_code=2)
    sys.exit(2)


def _fail(error: OSError) -> NoReturn:
    message = os_words(error) + (f": {error.filename}" if error.filename else "")
    complain(_command(sys.argv[1:]), message, exit_code=1)
    _drop_output()
    sys.exit(1)


def _command(arguments: Sequence[str]) -> str:
    """`mimo cache stats` of these arguments: the words that lead to the command."""
    words, group = ["mimo"], typer.main.get_command(app)
    for word in arguments:
        found = getattr(group, "commands", {}).get(word)
        if found is None:
            break
        words.append(word)
        group = group.load(word) if isinstance(group, LazyGroup) else found
    return " ".join(words)


def _drop_output() -> None:
    """What is still buffered for standard output would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
