"""Words for the terminal. What comes from a checkpoint's files is shown, never obeyed.

Of `preprocess` only its rules for printing are used, and those when something is said: help and completion are quick.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def error_console() -> Console:
    """Standard error: lines are folded for a terminal, and whole where a file or a program reads them."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def say(message: str) -> None:
    """A message on standard error, of which a terminal obeys nothing but the line ends."""
    from preprocess.ranges import printable

    typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def complain(command: str, message: str, *, exit_code: int) -> None:
    """What went wrong: a line, or where the command was asked for JSON one object, on standard error."""
    message = message.strip("\n") or "failed, and nothing said why"
    if speaks_json(sys.argv[1:]):
        error = {"command": command, "message": message, "exit_code": exit_code}
        typer.echo(json.dumps({"error": error}), err=True)
    else:
        say(f"{command}: {message}")


def os_words(error: OSError) -> str:
    """What the system says of it, or, where nothing came with it, its kind: `TimeoutError()` has no text."""
    # asyncio adds the address, which whoever tells of it has named.
    said = (error.strerror or "").partition(" (while attempting")[0]
    return said or str(error) or type(error).__name__


def counted(number: int, word: str) -> str:
    """`1 answer`, `2 answers`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def speaks_json(arguments: list[str]) -> bool:
    """Whether `--json` stands among the arguments as a flag; with a file after it, it is where results go."""
    return "--json" in arguments and arguments[0] != "bench"


def quoted(text: str) -> str:
    """Text from elsewhere inside rich's markup, as it is."""
    from rich.markup import escape

    from preprocess.ranges import printable

    return escape(printable(text))


def printable_line(text: str) -> str:
    """Text from elsewhere in one line that a terminal shows and does not obey."""
    from preprocess.ranges import printable

    return printable(" ".join(text.split()))
