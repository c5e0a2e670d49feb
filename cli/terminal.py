"""Words for the terminal. What comes from a checkpoint's files is shown, never obeyed."""

import typer
from rich.markup import escape

from preprocess.ranges import printable


def say(message: str) -> None:
    """A message on standard error, of which a terminal obeys nothing but the line ends."""
    typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def quoted(text: str) -> str:
    """Text from elsewhere inside rich's markup, as it is."""
    return escape(printable(text))
