"""The judging of public load tools' runs, on files that they wrote; and that the documentation has those commands.

The files in tests/golden/load_tools are those of real runs, cut down to what is read of them.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.load_results import Result, ResultUnreadable, read
from tests.clients.load_tools import REMOVED, REQUIREMENTS, ROOT, RUNS, Outcome, Run, media_problems, table
from tests.docs.blocks import blocks

GOLDEN = ROOT / "tests" / "golden" / "load_tools"
DOCUMENT = ROOT / "docs" / "load-tools.md"


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A copy of a tool's results, and the one file in it."""

    def copy(tool: str) -> tuple[Path, Path]:
        directory = tmp_path / tool
        shutil.copytree(GOLDEN / tool, directory)
        (file,) = directory.iterdir()
        return directory, file

    return copy


def change(file: Path, path: str, value: Any) -> None:
    root = json.loads(file.read_text())
    place = root
    *parents, last = path.split("/")
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    assert last in place
    place[last] = value
    file.write_text(json.dumps(root))


@pytest.mark.parametrize("tool", REQUIREMENTS)
def test_a_good_run_is_read_and_passes(tool: str) -> None:
    result = read(tool, GOLDEN / tool)
    assert result.problems(20, may_ask_more=True) == []
    assert result.num_errors == 0
    assert result.num_completed >= 20
    assert 10 < result.prompt_tokens / result.num_completed < 400
    assert 10 < result.completion_tokens / result.num_completed < 50
    assert 0.0005 < result.inter_token_s < result.ttft_s < 2


TOTALS = "benchmarks/0/metrics/request_totals"


@pytest.mark.parametrize(
    ("tool", "path", "value", "word"),
    [
        ("aiperf", "error_summary", [{"error_details": {"code": 500}, "count": 3}], "3 requests failed"),
        ("aiperf", "was_cancelled", True, "failed"),
        ("aiperf", "is_complete", False, "failed"),
        ("aiperf", "request_count", {"unit": "requests", "avg": 19.0}, "19 of 20"),
        ("aiperf", "total_usage_prompt_tokens", {"avg": 0.0}, "usage"),
        ("guidellm", f"{TOTALS}/errored", 1, "1 requests failed"),
        ("guidellm", f"{TOTALS}/incomplete", 2, "2 requests failed"),
        ("guidellm", f"{TOTALS}/successful", 4, "4 of 20"),
        ("genai-bench", "aggregated_metrics/num_error_requests", 5, "5 requests failed"),
        ("genai-bench", "aggregated_metrics/num_completed_requests", 12, "12 of 20"),
        ("vllm", "failed", 20, "20 requests failed"),
        ("vllm", "completed", 0, "0 of 20"),
        ("vllm", "total_output_tokens", 3, "3 tokens in 20 answers"),
        ("vllm", "mean_itl_ms", 0.0, "nothing was streamed"),
    ],
)
def test_a_bad_run_fails(
    written: Callable[[str], tuple[Path, Path]], tool: str, path: str, value: Any, word: str
) -> None:
    directory, file = written(tool)
    change(file, path, value)
    problems = read(tool, directory).problems(20, may_ask_more=True)
    assert len(problems) == 1
    assert word in problems[0]


@pytest.mark.parametrize("tool", REQUIREMENTS)
def test_no_result_file_and_one_of_another_shape_are_no_success(
    written: Callable[[str], tuple[Path, Path]], tmp_path: Path, tool: str
) -> None:
    with pytest.raises(ResultUnreadable, match="0 files"):
        read(tool, tmp_path)
    directory, file = written(tool)
    for text in ("{}", "[]", '{"benchmarks": []}', "no JSON"):
        file.write_text(text)
        with pytest.raises(ResultUnreadable, match="something else"):
            read(tool, directory)


def test_more_requests_than_asked_for_are_told_unless_the_tool_does_that() -> None:
    result = Result(21, 0, 100, 100, 0.1, 0.1)
    assert result.problems(20) == ["21 requests completed, 20 were asked for"]
    assert result.problems(20, may_ask_more=True) == []


def test_media_that_the_server_never_saw_are_a_failure() -> None:
    run = next(run for run in RUNS if run.name == "aiperf-pictures")
    result = Result(20, 0, 100, 100, 0.1, 0.1)
    assert media_problems(run, result, 20, 17) == []
    assert media_problems(run, result, 19, 17) == ["the server saw 19 media in 20 requests"]
    assert media_problems(run, result, 20, 0) == ["none of 20 media came from the cache"]


def test_the_table_tells_what_failed() -> None:
    run = RUNS[0]
    shown = table([Outcome(run, None, 0, 0, ["the tool ended with 2"], 1.0), Outcome(run, None, 0, 0, [], 1.0)])
    assert list(shown.columns[-1].cells) == ["the tool ended with 2", "ok"]


def documented() -> list[list[str]]:
    """The commands of the document, each as its words."""
    found = []
    for block in blocks(DOCUMENT):
        for line in block.text.replace("\\\n", " ").splitlines():
            found.append(shlex.split(line))
    return found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_document_has_the_command(run: Run) -> None:
    assert run.command in documented()


@pytest.mark.parametrize("tool", REQUIREMENTS)
def test_the_document_installs_what_is_tried(tool: str) -> None:
    installs = [words for words in documented() if words[1:2] == ["install"]]
    assert [f"{tool}/bin/pip", "install", REQUIREMENTS[tool]] in [
        [words[0].partition("load-tools/")[2], *words[1:]] for words in installs
    ]
    for name in REMOVED.get(tool, ()):
        assert any("uninstall" in words and name in words for words in documented())


def test_files_of_questions_name_media_that_are_there() -> None:
    for path in sorted((ROOT / "samples" / "load").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            named = [row[kind] for kind in ("image", "audio", "video") if kind in row] + row.get("images", [])
            assert named
            assert all((ROOT / name).is_file() for name in named), path
