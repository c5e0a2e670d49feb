"""Fenced blocks of the project's Markdown, each with what its author says of running it.

A block of commands or code stands under one of these lines, which no reader of the rendered page sees:

    <!-- run -->                    it is run by the tests, as it stands
    <!-- not run: WHY -->           it is not; WHY names what a test machine lacks, or the test that does it otherwise
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SHELL = ("sh", "bash", "console")
CHECKED = (*SHELL, "python")
_SAYING = re.compile(r"<!-- (run|not run: .+) -->")


@dataclass(frozen=True, slots=True)
class Block:
    path: Path
    line: int
    language: str
    text: str
    saying: str
    """"run", "not run: ...", or "" where nothing is said."""

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """All Markdown a user is meant to read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*.md")])


def blocks(path: Path) -> list[Block]:
    found: list[Block] = []
    saying, fence, language, first, lines = "", "", "", 0, list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        opened = re.match(r"(```+)(\w*)", line)
        if fence:
            if line.strip() == fence:
                found.append(Block(path, first, language, "\n".join(lines) + "\n", saying))
                fence, saying = "", ""
            else:
                lines.append(line)
        elif opened:
            fence, language, first, lines = opened[1], opened[2], number, []
        elif line.strip():
            said = _SAYING.fullmatch(line.strip())
            saying = said[1] if said else ""
    assert not fence, f"{path}: a block that begins on line {first} does not end"
    return found
