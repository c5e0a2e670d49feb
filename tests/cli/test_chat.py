"""`mimo chat` in a terminal of its own, talking to a server that says what the test wants."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.chat_client import ChatFailed, Reply, Target, ask, first_model, server_root
from cli.chat_input import dropped_files
from cli.chat_repl import cached_by_tier, shown, stats_line
from cli.errors import ConfigError

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "samples" / "picture.png"
USAGE = {
    "prompt_tokens": 1100,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 900, "host_tokens": 300, "store_tokens": 100, "healed_tokens": 50},
}


@dataclass
class Fake:
    """What was asked, and how many answers their readers broke off."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_broken_off: int = 0


@contextmanager
def fake_server() -> Iterator[Fake]:
    """Answers by the words of the question: slow, fail, break, reason; else it says how many messages there were."""
    fake = Fake()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "fake-model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            fake.keys.append(self.headers.get("Authorization"))
            content = body["messages"][-1]["content"]
            text = content if isinstance(content, str) else content[-1]["text"]
            if "fail" in text:
                self._send(400, {"error": {"message": "messages[0]: this cannot be"}})
                return
            if body["model"] == "nobody":
                self._send(404, {"error": {"message": "model 'nobody' is not served", "code": "model_not_found"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self._stream(text, len(body["messages"]))
            except (BrokenPipeError, ConnectionResetError):
                fake.num_broken_off += 1

        def _stream(self, text: str, num_messages: int) -> None:
            if "reason" in text:
                self._event(choices=[{"delta": {"reasoning_content": "hm, let me see"}}])
            for index in range(200 if "slow" in text else 1):
                self._event(choices=[{"delta": {"content": f"piece {index} "}}])
                if "slow" in text:
                    time.sleep(0.02)
            if "break" in text:
                return
            self._event(choices=[{"delta": {"content": f"of {num_messages}\x1b[31m"}, "finish_reason": "stop"}])
            self._event(choices=[], usage=USAGE)
            self.wfile.write(b": heartbeat\n\ndata: [DONE]\n\n")

        def _event(self, **event: Any) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def _send(self, status: int, body: Any) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, command: list[str], home: Path, cwd: Path = ROOT) -> None:
        self.master, slave = pty.openpty()
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=environ | {"MIMO_CACHE_DIR": str(home), "TERM": "xterm", "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.seen = ""
        self._read_to = 0

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        """What has been shown since the last call, up to and with `text`."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.seen[self._read_to :]:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self.seen[self._read_to :][-2000:]!r}"
            if select.select([self.master], [], [], left_s)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended before {text!r}: {self.seen[self._read_to :]!r}") from None
        end = self.seen.index(text, self._read_to) + len(text)
        found, self._read_to = self.seen[self._read_to : end], end
        return found

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def type_until(self, text: str, expected: str, attempts: int = 20) -> None:
        """Type it, and again where nothing came of it: Python's readline sees no signal that comes between the prompt
        and its wait for a key."""
        for _ in range(attempts - 1):
            self.type(text)
            with suppress(AssertionError):
                self.until(expected, 3.0)
                return
        self.type(text)
        self.until(expected, 3.0)

    def answer(self, text: str, expected: str) -> str:
        """Type a line, wait for `expected` and the next prompt."""
        self.type(f"{text}\r")
        found = self.until(expected)
        return found + self.until("you> ")

    def close(self) -> int:
        self.type("\x04")
        code = self.process.wait(30)
        os.close(self.master)
        return code


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


CHAT = [sys.executable, "-m", "cli", "chat"]


@contextmanager
def talking(home: Path, *words: str) -> Iterator[tuple[Terminal, Fake]]:
    with fake_server() as fake:
        terminal = Terminal([*CHAT, "--url", fake.url, *words], home)
        try:
            terminal.until("you> ")
            yield terminal, fake
        finally:
            if terminal.process.poll() is None:
                terminal.process.kill()
                terminal.process.wait()


def test_a_conversation_with_commands(tmp_path: Path) -> None:
    with talking(tmp_path, "--system", "be kind") as (terminal, fake):
        assert "fake-model: /help" in terminal.seen
        said = terminal.answer("hello there", "piece 0 of 2")
        assert "\x1b[2mprompt 1,100 (device 500, host 300, store 100, healed 50), answer 3, first token" in said
        assert "\\x1b[31m" in said
        terminal.answer("and again", "of 4")
        assert [message["role"] for message in fake.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
        terminal.answer("this must fail", "error: messages[0]: this cannot be")
        terminal.answer("/nonsense", "error: there is no /nonsense; /help tells the commands")
        terminal.answer("/help", "/save FILE")
        terminal.answer(
            "/stats", "2 answers: 2,200 prompt tokens (cached: device 1,000, host 600, store 200, healed 100)"
        )
        terminal.answer("/think on", "reasoning is on")
        said = terminal.answer("please reason", "of 6")
        assert "\x1b[2mhm, let me see\x1b[0m\r\npiece 0" in said
        assert fake.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": True}
        terminal.answer("/think maybe", "error: /think is on or off")
        terminal.answer("/reset", "forgotten")
        terminal.answer("fresh", "of 2")
        terminal.answer(f"/save {tmp_path / 'talk.json'}", "2 messages in")
        terminal.answer(f"/save {tmp_path / 'talk.json'}", "error:")
        saved = json.loads((tmp_path / "talk.json").read_text())
        assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
        terminal.answer("/system be brief", "begins anew")
        terminal.answer("go", "of 2")
        assert fake.bodies[-1]["messages"][0] == {"role": "system", "content": "be brief"}
        assert terminal.close() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with talking(tmp_path) as (terminal, fake):
        terminal.type("a slow one\r")
        terminal.until("piece 3")
        terminal.type("\x03")
        terminal.until("stopped")
        terminal.until("you> ")
        terminal.type_until("\x03", "you> ")
        terminal.answer("go on", "of 3")
        assert fake.bodies[-1]["messages"][1]["content"].startswith("piece 0 piece 1 ")
        deadline_s = time.monotonic() + 10
        while not fake.num_broken_off:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert terminal.close() == 0


def test_files_are_attached(tmp_path: Path) -> None:
    odd = tmp_path / "my 'odd' picture.png"
    odd.write_bytes(PICTURE.read_bytes())
    with talking(tmp_path) as (terminal, fake):
        terminal.answer(f"/image {odd}", "attached image my 'odd' picture.png")
        terminal.answer(str(odd).replace(" ", "\\ ").replace("'", "\\'"), "attached image my 'odd' picture.png")
        terminal.answer(f'"{ROOT}/samples/tones.wav"', "attached audio tones.wav")
        terminal.answer("/video nowhere.mp4", "error: nowhere.mp4: No such file or directory")
        terminal.answer("/video", "error: /video needs a file")
        terminal.answer("/image README.md", "error: README.md is no picture, video or sound but text")
        terminal.answer("/image samples/tones.wav", "tones.wav is a sound (WAV): attach it as audio")
        terminal.answer("what is there?", "of 1")
        kinds = [part["type"] for part in fake.bodies[-1]["messages"][0]["content"]]
        assert kinds == ["image_url", "image_url", "audio_url", "text"]
        terminal.answer("and now?", "of 3")
        assert fake.bodies[-1]["messages"][-1]["content"] == "and now?"
        assert terminal.close() == 0


def test_files_are_taken_back_and_dropped_with_a_message_that_is_refused(tmp_path: Path) -> None:
    with talking(tmp_path) as (terminal, fake):
        terminal.answer("/detach", "error: nothing is attached")
        terminal.answer("/image samples/picture.png", "attached image picture.png")
        terminal.answer("/audio samples/tones.wav", "attached audio tones.wav")
        terminal.answer("/detach other.png", "error: other.png is not attached; attached: picture.png, tones.wav")
        terminal.answer("/detach picture.png", "no longer attached: picture.png")
        terminal.answer("this must fail", "no longer attached: tones.wav")
        terminal.answer("go on", "of 1")
        assert fake.bodies[-1]["messages"][-1]["content"] == "go on"
        assert terminal.close() == 0


@pytest.mark.parametrize(("span_s", "rate"), [(0.0, None), (0.002, 4000.0), (2.0, 4.0)])
def test_two_tokens_and_time_between_them_have_a_rate(span_s: float, rate: float | None) -> None:
    reply = Reply(ttft_s=1.0, total_s=1.0 + span_s, usage={"completion_tokens": 9})
    assert reply.tokens_per_s == (rate if rate is None else pytest.approx(rate))


def test_several_lines(tmp_path: Path) -> None:
    with talking(tmp_path) as (terminal, fake):
        terminal.type("one\\\r")
        terminal.until("...> ")
        terminal.answer("two", "of 1")
        assert fake.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
        terminal.type('"""first\r')
        terminal.until("...> ")
        terminal.type("second\r")
        terminal.until("...> ")
        terminal.answer('third"""', "of 3")
        assert fake.bodies[-1]["messages"][-1]["content"] == "first\nsecond\nthird"
        terminal.type("\x1b[200~pasted\ntext\x1b[201~")
        terminal.answer("", "of 5")
        assert fake.bodies[-1]["messages"][-1]["content"] == "pasted\ntext"
        assert terminal.close() == 0


def test_history_is_kept_for_the_user_alone_and_tab_completes(tmp_path: Path) -> None:
    with talking(tmp_path) as (terminal, _):
        terminal.answer("remember this", "of 1")
        assert terminal.close() == 0
    history = tmp_path / "chat_history"
    assert "remember this" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    with talking(tmp_path) as (terminal, fake):
        terminal.type("\x1b[A")
        terminal.until("remember this")
        terminal.answer("", "of 1")
        assert fake.bodies[-1]["messages"][-1]["content"] == "remember this"
        terminal.type("/ima\t")
        terminal.until("/image ")
        terminal.type("samples/pic\t")
        terminal.until("samples/picture.png")
        terminal.answer("", "attached image picture.png")
        assert terminal.close() == 0


def test_a_server_that_breaks_off_costs_its_answer_only(tmp_path: Path) -> None:
    with talking(tmp_path) as (terminal, _):
        terminal.answer("break it", "ended the answer before it was finished")
        terminal.answer("go on", "of 3")
        assert terminal.close() == 0


def piped(stdin: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
    return subprocess.run(
        [*CHAT, *words], cwd=ROOT, env=own | environ, input=stdin, capture_output=True, text=True, check=False
    )


def test_standard_input_is_one_question() -> None:
    with fake_server() as fake:
        done = piped("two\nlines\n", "--url", f"{fake.url}/v1", "--model", "mine", OPENAI_API_KEY="secret")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "piece 0 of 1\x1b[31m\n"
        assert fake.bodies[0]["messages"] == [{"role": "user", "content": "two\nlines"}]
        assert fake.bodies[0]["model"] == "mine"
        assert fake.keys == ["Bearer secret"]


def test_an_answer_as_json() -> None:
    with fake_server() as fake:
        done = piped("", "--url", fake.url, "--json", "--no-think", "--image", str(PICTURE), "reason")
        report = json.loads(done.stdout)
        assert (done.returncode, report["model"], report["finish_reason"]) == (0, "fake-model", "stop")
        assert (report["reasoning"], report["usage"]) == ("hm, let me see", USAGE)
        assert 0 < report["ttft_s"] <= report["total_s"]
        assert fake.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
        failed = piped("", "--url", fake.url, "--json", "fail")
        error = json.loads(failed.stderr)["error"]
        assert (failed.returncode, failed.stdout) == (1, "")
        assert error == {"command": "mimo chat", "message": "messages[0]: this cannot be", "exit_code": 1}


def test_a_model_that_the_server_lacks_is_a_wrong_command() -> None:
    with fake_server() as fake:
        done = piped("", "--url", fake.url, "--model", "nobody", "hi")
    assert (done.returncode, done.stderr) == (2, "mimo chat: model 'nobody' is not served\n")


def test_ctrl_c_ends_a_single_question() -> None:
    with fake_server() as fake:
        command = [*CHAT, "--url", fake.url, "slow"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.read(7) == "piece 0"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""


@pytest.mark.parametrize("words", [("--url", "http://127.0.0.1:1", "hello"), ("--url", "http://127.0.0.1:1")])
def test_a_server_that_is_not_there_is_one_line(words: tuple[str, ...]) -> None:
    done = piped("hi", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mimo chat: cannot connect to http://127.0.0.1:1: Connection refused\n"


def test_talking_to_a_server_loads_no_torch() -> None:
    with fake_server() as fake:
        probe = f"import sys; sys.argv = ['mimo', 'chat', '--url', {fake.url!r}, 'hi']; from cli.app import main\n"
        probe += "try: main()\nfinally: print([m for m in ('torch', 'aiohttp', 'zmq') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_client_alone() -> None:
    with fake_server() as fake:
        reply, pieces = Reply(), []
        ask(
            Target(fake.url, "m"),
            {"messages": [{"role": "user", "content": "x"}]},
            reply,
            lambda *piece: pieces.append(piece),
        )
        assert [kind for kind, _ in pieces] == ["text", "text"]
        assert reply.text == "".join(piece for _, piece in pieces)
        assert first_model(fake.url, "") == "fake-model"
        with pytest.raises(ChatFailed, match="this cannot be"):
            ask(
                Target(fake.url, "m"), {"messages": [{"role": "user", "content": "fail"}]}, Reply(), lambda *piece: None
            )


def test_paths_that_are_dropped(tmp_path: Path) -> None:
    odd = tmp_path / "a b.png"
    odd.touch()
    (tmp_path / "notes.txt").touch()
    assert dropped_files(f"'{odd}'") == dropped_files(odd.as_uri()) == [odd]
    assert dropped_files(f"{PICTURE} '{odd}'") == [PICTURE, odd]
    for text in ("", "what is it?", f"{PICTURE} what?", str(tmp_path / "notes.txt"), "it's", "x" * 5000, "a\0.png"):
        assert dropped_files(text) == []


def test_addresses_of_servers() -> None:
    assert server_root("http://h:8000/v1/") == server_root("http://h:8000") == "http://h:8000"
    assert server_root("https://h/api/v1") == "https://h/api"
    for wrong in ("127.0.0.1:8000", "ftp://h", "http://", "http://h:0", "http://h:x", "http://h?x=1"):
        with pytest.raises(ConfigError, match="--url"):
            server_root(wrong)


def test_words_of_the_figures() -> None:
    assert cached_by_tier({}) == {"device": 0, "host": 0, "store": 0, "healed": 0}
    assert shown("a\n\x1b]0;title\x07é") == "a\n\\x1b]0;title\\x07é"
    usage = {"prompt_tokens": 5, "completion_tokens": 11}
    line = stats_line(Reply(usage=usage, ttft_s=0.5, total_s=1.5, finish_reason="length"))
    assert line == "prompt 5, answer 11, first token 500 ms, 10.0 tokens/s, ended by length"
