"""docs/cli.md: what it says can be run runs, and it speaks of every command and of every flag of the newer ones."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.app import SUBCOMMANDS, app
from cli.chat_repl import Repl

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
BLOCK = re.compile(r"(<!-- not run: (.+?) -->\n)?```sh\n(.*?)```", re.DOTALL)
BLOCKS = [(match[2], match[3]) for match in BLOCK.finditer(PAGE)]
RUN = [line for reason, text in BLOCKS if reason is None for line in text.splitlines()]
ROOT_COMMAND: Any = typer.main.get_command(app)


@pytest.mark.parametrize("line", RUN)
def test_what_is_not_marked_runs(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIMO_CACHE_DIR", str(tmp_path))
    name, *words = shlex.split(line, comments=True)
    assert name == "mimo"
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for _, text in BLOCKS for line in text.splitlines()])
def test_every_flag_that_is_shown_exists(line: str) -> None:
    words = shlex.split(line.rpartition("| ")[2], comments=True)
    command, rest = ROOT_COMMAND, words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.load(rest[0]) if command is ROOT_COMMAND else command.commands[rest[0]]
        rest = rest[1:]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= known | {"--help"}


def test_every_command_has_a_section() -> None:
    assert set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) - {"Completion"} == set(SUBCOMMANDS)


def test_every_command_of_a_conversation_is_told() -> None:
    told = set(re.findall(r"/[a-z]+", PAGE.partition("| in a conversation")[2].partition("After each answer")[0]))
    assert told >= set(Repl.commands) | {"/exit"}
