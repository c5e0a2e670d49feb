"""`mimo eval` against a server that knows the answers, and does not always say them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from cli import eval as command
from cli.app import app
from cli.eval import Bars, Plan
from cli.eval_client import ChatClient, NoAnswer, Reply, served_model
from cli.eval_view import Tally, percent, show
from cli.load import ConfigError
from training.files import chat_messages, conversation
from training.tasks.types import HELD_OUT_SEED

ROOT = Path(__file__).parent.parent.parent
MODEL = "nano"
TASKS = ("count", "small_talk")
COUNT = 4


def known_answers() -> dict[str, tuple[str, int, str]]:
    """Task, index and answer by the messages as JSON."""
    known = {}
    for task in TASKS:
        for index in range(COUNT):
            asked = conversation(task, HELD_OUT_SEED, index)
            known[json.dumps(chat_messages(asked.messages))] = (task, index, asked.answer)
    return known


@dataclass
class Oracle:
    """Answers what it knows. `faults` gives the answer to the n-th try of a request instead."""

    faults: Callable[[str, int, int], web.Response | str | None] = lambda task, index, num_try: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_tries: dict[tuple[str, int], int] = field(default_factory=dict)
    hang_after: int | None = None
    known: dict[str, tuple[str, int, str]] = field(default_factory=known_answers)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.hang_after is not None and len(self.bodies) > self.hang_after:
            await asyncio.sleep(3600)
        task, index, answer = self.known[json.dumps(body["messages"])]
        num_try = self.num_tries[task, index] = self.num_tries.get((task, index), 0) + 1
        fault = self.faults(task, index, num_try)
        if isinstance(fault, web.Response):
            return fault
        text = answer if fault is None else fault
        if not body["stream"]:
            return web.json_response(
                {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": len(text)}}
            )
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": letter}}]} for letter in text]
        events.append({"choices": [], "usage": {"completion_tokens": len(text)}})
        return await send_events(request, [*map(json.dumps, events), "[DONE]"])


async def send_events(request: web.Request, events: list[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response


def busy(status: int = 503, code: str = "overloaded") -> web.Response:
    return web.json_response(
        {"error": {"message": "come back", "code": code, "type": "server_error"}},
        status=status,
        headers={"Retry-After": "0.05"},
    )


@asynccontextmanager
async def serving(complete: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    server = web.Application()
    server.add_routes([web.get("/v1/models", Oracle().models), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def serve_oracle() -> Iterator[Callable[[Oracle], str]]:
    """Starts a server in a thread of its own, for commands that run a loop themselves; gives its URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    threads: list[threading.Thread] = []

    def serve(oracle: Oracle) -> str:
        started = threading.Event()
        urls: list[str] = []

        async def main() -> None:
            async with serving(oracle.complete) as url:
                urls.append(url)
                started.set()
                await stop.wait()

        threads.append(threading.Thread(target=loop.run_until_complete, args=(main(),)))
        threads[0].start()
        assert started.wait(30)
        return urls[0]

    yield serve
    loop.call_soon_threadsafe(stop.set)
    for thread in threads:
        thread.join()
    loop.close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments, "--tasks", ",".join(TASKS), "--count", str(COUNT)])


def test_counts_exact_answers_and_waits_out_a_busy_server(
    serve_oracle: Callable[[Oracle], str], tmp_path: Path
) -> None:
    def faults(task: str, index: int, num_try: int) -> web.Response | str | None:
        if (task, index) == ("count", 0) and num_try < 3:
            return busy(503 if num_try == 1 else 429)
        return "wrong" if (task, index) == ("count", 2) else None

    oracle = Oracle(faults)
    out = tmp_path / "found.json"
    done = run("--url", serve_oracle(oracle), "--json", "--out", str(out), "--concurrency", "3")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    assert found["complete"]
    counts, talk = found["tasks"]
    assert (counts["task"], counts["asked"], counts["answered"], counts["exact"]) == ("count", 4, 4, 3)
    assert counts["exact_share"] == 0.75
    assert counts["errors"] == {}
    answers = [conversation("count", HELD_OUT_SEED, index).answer for index in range(COUNT)]
    assert counts["misses"] == [{"index": 2, "expected": answers[2], "got": "wrong"}]
    lengths = [len(answer) for index, answer in enumerate(answers) if index != 2] + [5]
    assert counts["answer_tokens"] == {"mean": sum(lengths) / 4, "min": min(lengths), "max": max(lengths)}
    assert 0 < counts["ttft_p50_s"] <= counts["total_p50_s"]
    assert (talk["exact"], talk["misses"]) == (4, [])
    assert oracle.num_tries["count", 0] == 3
    assert {(body["model"], body["temperature"], body["stream"]) for body in oracle.bodies} == {(MODEL, 0, True)}
    for body in oracle.bodies:
        assert body["max_tokens"] > len(oracle.known[json.dumps(body["messages"])][2])


def test_shows_a_table_and_fails_for_errors_and_for_a_share_below_the_required(
    serve_oracle: Callable[[Oracle], str],
) -> None:
    def faults(task: str, index: int, num_try: int) -> web.Response | str | None:
        if task == "small_talk":
            return None
        return busy(500, "broken") if index == 1 else "wrong"

    done = run("--url", serve_oracle(Oracle(faults)), "--no-stream", "--require", "0.9", "--failures", "1")
    assert done.exit_code == 1
    words = re.sub(r"[^\w.%'-]+", " ", done.stdout)
    assert re.search(r"count 4 0.0% 5.0 5-5 - \d+\.\d{3} s 1 ", words), done.stdout
    assert re.search(r"small_talk 4 100.0% [\d. -]+ - \d+\.\d{3} s 0 ", words), done.stdout
    assert re.search(r"all 8 50.0%", words), done.stdout
    assert done.stdout.count("expected") == 1
    assert "count: 1 x 500 broken: come back" in done.stdout
    assert "count: 0.0% exact, 0.9 is required" in done.stderr
    assert "small_talk: " not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "count,chess"], r"'chess'; allowed: .*small_talk"),
        (["--url", "http://127.0.0.1:1", "--mode", "epd"], "--mode"),
        (["--url", "127.0.0.1"], "--url is '127.0.0.1'"),
        (["--url", "http://127.0.0.1:99999"], "--url is 'http://127.0.0.1:99999': Port out of range"),
        (["--url", "http://[::1"], "--url is"),
        (["--url", "http://:80"], "--url is"),
        (["--tasks", " , "], "--tasks names no task; allowed: .*small_talk"),
        (["--out", "/tmp"], "is not a regular file"),
        (["--mode", "solo", "--count", "1"], "mode is 'solo'"),
        (["--out", "/nowhere/found.json"], "no such directory"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["eval", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert re.search(message, str(done.exception))


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = run("--url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "127.0.0.1:1" in done.stderr.replace(", port", "").replace("'", "")


def test_ctrl_c_shows_what_is_done_so_far(serve_oracle: Callable[[Oracle], str]) -> None:
    oracle = Oracle(hang_after=5)
    url = serve_oracle(oracle)
    arguments = ["eval", "--url", url, "--tasks", ",".join(TASKS), "--count", str(COUNT), "--concurrency", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background hands SIGINT on as ignored; a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while len(oracle.bodies) < 6:
            assert process.poll() is None
            threading.Event().wait(0.02)
        # To the whole group, as a terminal sends it.
        os.killpg(process.pid, signal.SIGINT)
        shown, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    words = re.sub(r"[^\w.%'-]+", " ", shown)
    assert "count 4 100.0%" in words
    assert "small_talk 1 of 4 100.0%" in words
    assert complaints == "mimo eval: interrupted; this is what was done so far\n"


class Standstill(ChatClient):
    """Takes requests and never answers."""

    def __init__(self) -> None:
        self.num_taken = 0

    async def ask(self, messages_json: bytes, max_tokens: int) -> Reply:
        self.num_taken += 1
        await asyncio.sleep(3600)
        raise AssertionError


class NoBars(Bars):
    def __init__(self) -> None:
        pass

    def advance(self, tally: Tally) -> None:
        pass


async def test_samples_are_rendered_only_a_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rendered = 0

    def chat_json(task: str, seed: int, index: int) -> tuple[bytes, str]:
        nonlocal num_rendered
        num_rendered += 1
        return b"[]", ""

    monkeypatch.setattr("training.files.chat_json", chat_json)
    plan = Plan(url="", mode="epd", model=None, tasks=("count",), count=1000, concurrency=4, stream=True)
    client = Standstill()
    with ThreadPoolExecutor(2) as pool:
        running = asyncio.create_task(command._ask_all(plan, [Tally("count", 1000)], client, pool, NoBars()))
        await asyncio.sleep(0.3)
        assert client.num_taken == 4
        assert num_rendered <= 2 * 4 + 2 * command._num_renderers()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


Complete = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def ask(complete: Complete, *, stream: bool = True, retry_for_s: float = 1.0) -> Reply:
    async with serving(complete) as url, aiohttp.ClientSession() as session:
        assert await served_model(session, url) == MODEL
        client = ChatClient(session, url, MODEL, stream=stream, retry_for_s=retry_for_s)
        return await client.ask(b"[]", 9)


def streams(*events: str) -> Complete:
    async def complete(request: web.Request) -> web.StreamResponse:
        return await send_events(request, list(events))

    return complete


def replies(response: Callable[[], web.Response]) -> Complete:
    async def complete(_: web.Request) -> web.StreamResponse:
        return response()

    return complete


HI = '{"choices": [{"delta": {"content": "hi"}}]}'


@pytest.mark.parametrize(
    ("complete", "stream", "kind", "message"),
    [
        (streams(HI), True, "stream cut short", "DONE"),
        (streams(HI, '{"error": {"message": "lost", "code": "stage_lost"}}'), True, "stream stage_lost", "lost"),
        (streams(HI, "gibberish", "[DONE]"), True, "not a chat completion", "gibberish"),
        (streams(HI, "x" * (1 << 20)), True, "not a chat completion", "too long"),
        (replies(lambda: web.Response(text="hello")), False, "not a chat completion", "hello"),
        (replies(lambda: web.Response(text="no", status=404)), True, "404", "OpenAI"),
        (replies(lambda: busy(503, "draining")), True, "503 draining", "come back"),
    ],
)
async def test_what_is_no_answer_is_named(complete: Complete, stream: bool, kind: str, message: str) -> None:
    with pytest.raises(NoAnswer, match=message) as caught:
        await ask(complete, stream=stream, retry_for_s=0.2)
    assert caught.value.kind == kind


async def no_models(response: web.Response) -> NoAnswer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=response.status, headers=response.headers, body=response.body)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(NoAnswer) as caught:
                await served_model(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    return caught.value


async def test_a_page_in_place_of_models_is_named() -> None:
    error = await no_models(web.Response(text="<html>", content_type="text/html"))
    assert "/v1/models lists no model: is this an OpenAI-compatible server?" in str(error)


async def test_an_error_in_place_of_models_is_named() -> None:
    assert "/v1/models answered with status 404: " in str(await no_models(web.Response(status=404)))
    refused = web.json_response({"error": {"message": "no key", "code": "invalid_api_key"}}, status=401)
    assert "/v1/models answered with status 401: no key" in str(await no_models(refused))


async def test_redirects_without_end_are_named() -> None:
    error = await no_models(web.Response(status=302, headers={"Location": "/v1/models"}))
    assert "/v1/models: it redirects without end" in str(error)


async def test_a_connection_that_breaks_is_named() -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(NoAnswer) as caught:
        await ask(complete)
    assert caught.value.kind == "connection"


async def test_the_first_token_is_timed_at_the_first_text() -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n')
        await asyncio.sleep(0.1)
        await response.write(f"data: {HI}\n\n".encode())
        await asyncio.sleep(0.1)
        await response.write(b"data: [DONE]\n\n")
        return response

    reply = await ask(complete)
    assert reply.text == "hi"
    assert reply.ttft_s is not None
    assert 0.1 <= reply.ttft_s <= reply.total_s - 0.09


def test_comparison_is_of_every_character() -> None:
    tally = Tally("count", 3, max_misses=1)
    for index, got in enumerate(("1, 2", "1, 2 ", "1, 2.")):
        tally.answered(index, "1, 2", Reply(got, 4, None, 0.5))
    assert (tally.num_exact, tally.num_asked, [miss.got for miss in tally.misses]) == (1, 3, ["1, 2 "])
    assert tally.is_complete


def test_a_share_is_never_rounded_up_to_all() -> None:
    assert [percent(share) for share in (None, 0.0, 0.9999, 1.0)] == ["-", "0.0%", "99.9%", "100.0%"]


def test_answers_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally("records", 1)
    tally.answered(7, '[{"item": 1}]', Reply("[red]", 4, None, 0.5))
    show(Console(width=200), [tally])
    shown = capsys.readouterr().out
    assert "expected '[{\"item\": 1}]'" in shown
    assert "got      '[red]'" in shown
