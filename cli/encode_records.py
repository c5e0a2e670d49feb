"""What is told of each input, in the order of the inputs: index.jsonl, failed.jsonl, and lines on standard output."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from cli.encode_inputs import Input
from cli.encode_volumes import About
from cli.media_files import path_text

# Of warnings and of failures, so many are kept to be told on the terminal at the end.
MAX_TOLD: Final = 20


class OutputFailed(Exception):
    """Nothing more can be written; what is done is kept."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an input has no rows."""

    reason: str
    code: str
    """A word that does not change, such as media_undecodable."""


@dataclass(frozen=True, slots=True)
class RecordPaths:
    """Where the records go, and the directory in which they are written until they are whole."""

    index: Path
    failed: Path
    workspace: Path


@dataclass(slots=True)
class Totals:
    """Of the inputs recorded so far."""

    num_done: int = 0
    num_rows: int = 0
    num_failed: int = 0
    num_warned: int = 0
    warned: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


class Records:
    """Lines are written as they come and moved into place at the end; memory does not grow with their number."""

    def __init__(self, paths: RecordPaths | None, say: Callable[[str], None] | None) -> None:
        """`paths` None: no files. `say` takes JSON lines for standard output."""
        self.totals = Totals()
        self._paths = paths
        self._say = say
        self._files: dict[Path, IO[bytes]] = {}

    def quiet(self) -> None:
        """From here on, count only: what is done is not where it would be said to be."""
        self._say = None

    def done(self, item: Input, about: About, output: Path, tensor: str) -> None:
        """An input whose rows are in place."""
        totals = self.totals
        totals.num_done += 1
        totals.num_rows += about.rows
        totals.num_warned += bool(about.warnings)
        totals.warned += [(item.label, warning) for warning in about.warnings][: MAX_TOLD - len(totals.warned)]
        facts: dict[str, Any] = msgspec.to_builtins(about)
        facts.pop("input", None)
        if self._paths is not None:
            where = path_text(Path(os.path.relpath(output, self._paths.index.parent)))
            head = self._head(item) | {"output": where, "tensor": tensor}
            self._write(self._paths.index, head | facts)
        if self._say is not None:
            self._say(json.dumps({"file": item.label, "out": path_text(output)} | facts))

    def failed(self, item: Input, failure: Failure) -> None:
        """An input without rows."""
        totals = self.totals
        totals.num_failed += 1
        if len(totals.failed) < MAX_TOLD:
            totals.failed.append((item.label, failure.reason))
        if self._paths is not None:
            line = self._head(item) | {"error": failure.reason, "code": failure.code}
            self._write(self._paths.index, line)
            self._write(self._paths.failed, line)
        if self._say is not None:
            self._say(json.dumps({"file": item.label, "error": failure.reason, "code": failure.code}))

    def publish(self) -> None:
        """Moves the files into place; without failures, none tells of any. Raises OutputFailed."""
        if self._paths is None:
            return
        try:
            self._publish(self._paths)
        except OSError as error:
            raise _index_failed(error) from error

    def _publish(self, paths: RecordPaths) -> None:
        for path in (paths.index, paths.failed):
            self._file(path).close()
            if path == paths.failed and not self.totals.num_failed:
                self._partial(path).unlink()
                path.unlink(missing_ok=True)
            else:
                self._partial(path).replace(path)
        self._files = {}

    def close(self) -> None:
        """Gives up what is not in place."""
        for path, file in self._files.items():
            # A full disk refuses what is still buffered.
            with contextlib.suppress(OSError):
                file.close()
            self._partial(path).unlink(missing_ok=True)
        self._files = {}

    def _file(self, path: Path) -> IO[bytes]:
        if path not in self._files:
            self._files[path] = self._partial(path).open("wb")
        return self._files[path]

    def _partial(self, path: Path) -> Path:
        assert self._paths is not None, "there are files"
        return self._paths.workspace / f"{path.name}.partial"

    def _head(self, item: Input) -> dict[str, Any]:
        return {"input": item.label} | ({} if item.id is None else {"id": item.id})

    def _write(self, path: Path, line: dict[str, Any]) -> None:
        try:
            self._file(path).write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise _index_failed(error) from error


def _index_failed(error: OSError) -> OutputFailed:
    return OutputFailed(f"cannot write the index: {error.strerror or error}")
