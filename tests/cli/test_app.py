"""The `mimo` command before any subcommand has begun."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.app import SUBCOMMANDS, LazyGroup, app, main
from cli.terminal import counted, os_words

ROOT = Path(__file__).parent.parent.parent

_INTERRUPTED = """
import sys

class Impatient:
    def find_spec(self, name, path, target=None):
        if name == "cli.serve":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Impatient())
sys.argv = ["mimo", "serve"]
from cli.app import main
main()
"""


def test_an_interruption_of_the_imports_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group below `group`, with the words that lead to it."""
    for name in list(group.commands):
        found = group.load(name) if isinstance(group, LazyGroup) else group.commands[name]
        yield (*words, name), found
        if hasattr(found, "commands"):
            yield from commands(found, (*words, name))


ROOT_COMMAND: Any = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT_COMMAND))


def test_every_command_is_found_by_its_name() -> None:
    assert {words[0] for words in COMMANDS} == set(SUBCOMMANDS)
    assert {("cache", "stats"), ("cache", "clear"), ("bench", "kv")} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert re.search(rf"^\s*(Example: )?mimo {' '.join(words)}\b", done.output, re.MULTILINE), done.output


@pytest.mark.parametrize("words", [words for words, found in COMMANDS.items() if not hasattr(found, "commands")])
def test_an_unknown_flag_is_a_usage_error(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, [*words, "--no-such-flag"]).exit_code == 2


def test_what_stands_beside_the_names_fits_a_terminal() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    for name, known in SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(known.summary)}$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", ["cache", "bench"])
def test_completion_is_offered_once(name: str) -> None:
    assert "--install-completion" not in CliRunner().invoke(app, [name, "--help"]).output


def test_an_address_is_told_once() -> None:
    error = OSError(98, "Address already in use (while attempting to bind on address ('127.0.0.1', 1))")
    assert os_words(error) == "Address already in use"


def test_one_is_not_several() -> None:
    assert [counted(number, "answer") for number in (0, 1, 2000)] == ["0 answers", "1 answer", "2,000 answers"]


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"mimo {version('mimo-epd')}\n"


HEAVY = ("torch", "numpy", "aiohttp", "zmq", "pydantic", "cli.load")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_that_serves(arguments: list[str]) -> None:
    probe = f"import sys; from cli.app import app; app({arguments}, standalone_mode=False)"
    probe += f"; sys.exit(str([name for name in {HEAVY} if name in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def completed(*words: str, shell: str = "bash", cwd: Path = ROOT) -> list[str]:
    """What the shell is told after `mimo WORDS`, the last of them unfinished."""
    line = " ".join(["mimo", *words])
    environment = os.environ | {
        "_MIMO_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line.replace(" ", "\n"),
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "PYTHONPATH": str(ROOT),
    }
    probe = "import sys; sys.argv = ['mimo']; from cli.app import main\ntry: main()\nfinally:"
    probe += " print('LOADED', *(m for m in ('torch', 'aiohttp') if m in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.stderr.strip() == "LOADED", done.stderr
    return [word for word in done.stdout.splitlines() if word]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_are_completed(shell: str) -> None:
    told = "\n".join(completed("", shell=shell))
    assert all(name in told for name in SUBCOMMANDS)
    assert "serve" in "\n".join(completed("se", shell=shell))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serve", "--mode", ""), {"epd", "e-pd", "unified"}),
        (("serve", "--role", "e"), {"encoder"}),
        (("serve", "--model", "mimo"), {"mimo-nano"}),
        (("serve", "--config", "un"), {"unified"}),
        (("chat", "--model", "smol"), {"smollm2"}),
        (("plan", "mimo-v2.5-"), {"mimo-v2.5-pro"}),
        (("plan", "--gpu", "h2"), {"h20", "h200"}),
        (("inspect", "mimo-v2-"), {"mimo-v2-flash"}),
        (("cache", "st"), {"stats"}),
        (("serve", "--prefill-"), {"--prefill-workers"}),
    ],
)
def test_values_are_completed(words: tuple[str, ...], expected: set[str]) -> None:
    told = set(completed(*words))
    assert told >= expected
    assert all(word.startswith(words[-1]) for word in told)


@pytest.mark.parametrize("words", [("serve", "--media-root", ""), ("serve", "--model", "./"), ("encode", "sam")])
def test_file_names_are_left_to_the_shell(words: tuple[str, ...]) -> None:
    assert completed(*words) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_of_that_shell(shell: str) -> None:
    environment = os.environ | {"_MIMO_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['mimo']; from cli.app import main; main()"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    word = {"bash": "complete -o default -F", "zsh": "#compdef mimo", "fish": "complete --command mimo"}[shell]
    assert word in done.stdout


def test_errors_are_one_object_in_json_mode() -> None:
    command = [sys.executable, "-m", "cli", "inspect", "nowhere", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, error["exit_code"], done.stdout) == (2, 2, "")
    assert "nowhere" in error["message"]


@pytest.mark.parametrize(
    ("words", "command", "said"),
    [
        (["plan"], "mimo plan", "model"),
        (["plan", "mimo-v2.5", "--tp", "0"], "mimo plan", "--tp is 0"),
        (["plan", "mimo-v2.5", "--gpu", "h900"], "mimo plan", "h900"),
        (["chat", "hi", "--max-tokens", "many"], "mimo chat", "'many'"),
        (["cache", "stats", "--jsn"], "mimo cache stats", "--jsn"),
        (["nothing"], "mimo", "nothing"),
    ],
)
def test_what_is_wrong_with_the_words_is_an_object_too(
    words: list[str], command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mimo", *words, "--json"])
    with pytest.raises(SystemExit, match="2"):
        main()
    written = capsys.readouterr()
    error = json.loads(written.err)["error"]
    assert (error["command"], error["exit_code"], written.out) == (command, 2, "")
    assert said in error["message"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan", "mimo plan: Missing argument 'model' (see mimo plan --help)"),
        ("plan mimo-v2.5 --tp 0", "mimo plan: --tp is 0; allowed: greater than or equal to 1 (see mimo plan --help)"),
        (
            "chat hi --max-tokens many",
            "mimo chat: --max-tokens is 'many'; allowed: a valid integer (see mimo chat --help)",
        ),
        ("cache stats --jsn", "mimo cache stats: No such option: --jsn (Possible options: --json)"),
        ("cache sta", "mimo cache: No such command 'sta'. Did you mean 'stats'? (see mimo cache --help)"),
        ("run smollm2", "mimo: No such command 'run': `mimo chat` asks a model, `mimo serve` serves it"),
        ("models", "mimo: No such command 'models': the models are mimo-nano"),
        ("cache stats --url x --kv", "mimo cache stats: --url asks a deployment"),
        ("chat --url nowhere hi", "mimo chat: --url is 'nowhere'"),
    ],
)
def test_an_error_is_one_line_that_begins_with_the_command(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mimo", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        main()
    written = capsys.readouterr()
    assert (written.out, written.err.count("\n")) == ("", 1)
    assert written.err.startswith(line)


@pytest.mark.parametrize("error", [TimeoutError(), ProcessLookupError(), BrokenPipeError(), OSError("words")])
def test_an_error_of_the_system_always_says_something(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("cli.app._run", fail)
    monkeypatch.setattr("cli.app._drop_output", lambda: None)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == f"mimo: {str(error) or type(error).__name__}\n"


_LOADING = """
import os, signal, sys
from cli.__main__ import main

class Slow:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                for _ in range(1000):
                    pass
            except KeyboardInterrupt:
                raise ImportError("numpy failed to import")

sys.meta_path.insert(0, Slow())
sys.argv = ["mimo", "chat", sys.argv[1]]
main()
"""


@pytest.mark.parametrize("module", ["typer", "cli.chat", "cli.chat_repl", "cli.chat_embedded"])
def test_ctrl_c_while_anything_is_loaded_is_one_quiet_exit(module: str) -> None:
    """Also where a library makes another error of the interruption."""
    command = [sys.executable, "-c", _LOADING.replace("sys.argv[2]", repr(module)), "hello"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        # A shell that runs the tests in the background hands SIGINT on as ignored; a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
