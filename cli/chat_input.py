"""Reading what a person types: history, several lines, files that are dropped on the terminal.

The standard library's readline, not prompt_toolkit: it is there in 2 ms, prompt_toolkit in 300, and its editing,
searching and bracketed paste are those of the shell.
"""

import contextlib
import glob
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from cli.media_files import modality_of

_HISTORY_LINES: Final = 1000
BLOCK: Final = '"""'
_PROMPT, _MORE = "you> ", "...> "


class LineReader:
    """One message at a time. Keeps history in `history_file`, or none where that cannot be written."""

    def __init__(self, history_file: Path | None, commands: Sequence[str]) -> None:
        self._history_file = history_file
        self._commands = tuple(commands)
        self._readline = _readline()
        if self._readline is not None:
            self._readline.set_completer_delims(" \t\n")
            self._readline.set_completer(self._complete)
            self._readline.parse_and_bind("tab: complete")
            if history_file is not None:
                with contextlib.suppress(OSError):
                    self._readline.read_history_file(history_file)

    def read(self) -> str:
        """A message: a line; several that end in a backslash, but for the last; or all between two `\"\"\"`. A paste of
        several lines is one message. Raises EOFError, KeyboardInterrupt."""
        line = input(_PROMPT)
        if line.strip().startswith(BLOCK):
            return self._block(line.strip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(_MORE))
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].rstrip().endswith(BLOCK)):
            lines.append(input(_MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def close(self) -> None:
        """Keep the history, readable by its owner alone."""
        if self._readline is None or self._history_file is None:
            return
        with contextlib.suppress(OSError):
            self._history_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._history_file, os.O_WRONLY | os.O_CREAT, 0o600))
            self._readline.set_history_length(_HISTORY_LINES)
            self._readline.write_history_file(self._history_file)

    def _complete(self, begun: str, state: int) -> str | None:
        """Commands at the beginning of a line, then file names."""
        assert self._readline is not None
        at_start = self._readline.get_begidx() == 0
        found = [f"{name} " for name in self._commands if name.startswith(begun)] if at_start else []
        if not at_start or not found:
            paths = sorted(glob.glob(f"{glob.escape(os.path.expanduser(begun))}*"))
            found += [f"{path}/" if os.path.isdir(path) else path for path in paths]
        return found[state] if state < len(found) else None


def _readline() -> Any:
    """None where Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def dropped_files(text: str) -> list[Path]:
    """Media files, if `text` is the paths of such files and nothing else: as a terminal writes them when they are
    dropped on it, quoted, escaped or as file: URLs."""
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    paths = [Path(unquote(urlsplit(word).path) if word.startswith("file://") else word).expanduser() for word in words]
    try:
        are_media = all(path.is_file() and modality_of(path) is not None for path in paths)
    except (OSError, ValueError):
        # Too long for a name, or with a zero byte in it.
        return []
    return paths if are_media else []
