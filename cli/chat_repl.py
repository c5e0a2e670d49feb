"""A conversation in a terminal: messages, what is attached to the next one, and commands that begin with a slash."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from cli.chat_client import ChatFailed, MessageRefused, Reply, Target, ask
from cli.chat_input import BLOCK, LineReader, dropped_files
from cli.media_files import MediaFileError, recognised_part
from cli.plan_units import seconds
from cli.terminal import counted, os_words, printable_line
from preprocess.types import Modality

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
HELP: Final = (
    "/image FILE...   attach pictures to the next message; so do /video and /audio, and the path of a file by itself",
    "/detach [FILE]   take all attached files back, or one",
    "/system TEXT     begin anew with instructions; without TEXT, show them",
    "/think on|off    let the model reason before it answers",
    "/reset           forget the conversation, keep the instructions",
    "/save FILE       write the conversation, as the body of a request that goes on with it",
    "/stats           what the answers so far took",
    "/exit            leave; so does Ctrl-D",
    "Ctrl-C stops an answer. A line that ends in a backslash goes on in the next one;",
    f"{BLOCK} begins and ends a text of several lines.",
)


class CommandFailed(Exception):
    """A slash command that could not be carried out; the message is one line."""


@dataclass(slots=True)
class Totals:
    """Over the whole session."""

    num_answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, reply: Reply) -> None:
        self.num_answers += 1
        self.prompt_tokens += int(reply.usage.get("prompt_tokens", 0))
        self.completion_tokens += int(reply.usage.get("completion_tokens", 0))
        for tier, count in cached_by_tier(reply.usage).items():
            self.cached[tier] = self.cached.get(tier, 0) + count


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that goes with the next message. `part` is a content part of a chat message."""

    name: str
    modality: Modality
    part: dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """What the next request says."""

    target: Target
    sampling: Mapping[str, Any]
    system: str = ""
    thinks: bool | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    last: Reply | None = None

    def body(self, text: str) -> dict[str, Any]:
        """The request that asks `text` with all that is attached."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        parts = [attachment.part for attachment in self.attached]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        body = {"messages": [*system, *self.messages, {"role": "user", "content": content}], **self.sampling}
        if self.thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        return body

    def answered(self, body: dict[str, Any], reply: Reply) -> None:
        """The answer, whole or as far as it came, is part of the conversation."""
        self.messages.append(body["messages"][-1])
        said = {"role": "assistant", "content": reply.text}
        self.messages.append(said | ({"reasoning_content": reply.reasoning} if reply.reasoning else {}))
        self.attached, self.last = [], reply
        self.totals.add(reply)


class Repl:
    """Reads, asks and shows until the end of input. Errors are a line each, and the conversation goes on."""

    def __init__(self, conversation: Conversation, reader: LineReader, out: TextIO = sys.stdout) -> None:
        self._conversation = conversation
        self._reader = reader
        self._out = out
        self._is_dim = False

    def run(self) -> None:
        self._note(f"{self._conversation.target.model}: /help tells the commands, Ctrl-D leaves")
        while True:
            try:
                text = self._reader.read()
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write("\n")
                continue
            try:
                if self._handled(text) == "exit":
                    return
            except (CommandFailed, MediaFileError, ChatFailed) as error:
                self._note(f"error: {error}")

    def _handled(self, text: str) -> Literal["exit", "done"]:
        if not text.strip():
            return "done"
        if files := dropped_files(text):
            for path in files:
                self._attach(path, None)
            return "done"
        if text.lstrip().startswith("/") and not os.path.exists(text.strip()):
            return self._command(text.strip())
        self._ask(text)
        return "done"

    def _ask(self, text: str) -> None:
        conversation, reply = self._conversation, Reply()
        body = conversation.body(text)
        try:
            ask(conversation.target, body, reply, self._show)
        except KeyboardInterrupt:
            self._end_line()
            self._note("stopped")
        except ChatFailed as error:
            self._end_line()
            if not reply.text:
                self._keep_or_drop(error)
                raise
            conversation.answered(body, reply)
            raise
        else:
            self._end_line()
        conversation.answered(body, reply)
        for warning in reply.warnings:
            self._note(f"warning: {warning.get('message', warning) if isinstance(warning, dict) else warning}")
        if reply.usage:
            self._note(stats_line(reply))

    def _command(self, text: str) -> Literal["exit", "done"]:
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return "exit"
        carry_out = self.commands.get(name)
        if carry_out is None:
            raise CommandFailed(f"there is no {name}; /help tells the commands")
        carry_out(self, rest.strip())
        return "done"

    def _image(self, rest: str) -> None:
        self._attach_all("/image", Modality.IMAGE, rest)

    def _video(self, rest: str) -> None:
        self._attach_all("/video", Modality.VIDEO, rest)

    def _audio(self, rest: str) -> None:
        self._attach_all("/audio", Modality.AUDIO, rest)

    def _attach_all(self, name: str, modality: Modality, rest: str) -> None:
        """The whole rest is one path, if there is such a file; else it is cut as a shell would."""
        paths = [Path(rest).expanduser()] if rest and Path(rest).expanduser().is_file() else dropped_words(rest)
        if not paths:
            raise CommandFailed(f"{name} needs a file: {name} FILE")
        for path in paths:
            self._attach(path, modality)

    def _attach(self, path: Path, modality: Modality | None) -> None:
        """None attaches a file as what its bytes are."""
        found, part = recognised_part(path, modality)
        self._conversation.attached.append(Attachment(path.name, found, part))
        self._note(f"attached {found} {path.name}, {path.stat().st_size:,} bytes; now ask")

    def _keep_or_drop(self, error: ChatFailed) -> None:
        """A message that was refused would be refused for ever with what may be at fault."""
        attached = self._conversation.attached
        if attached and isinstance(error, MessageRefused):
            self._note(f"no longer attached: {_names(attached)}")
            attached.clear()
        elif attached:
            self._note(f"still attached: {_names(attached)}")

    def _detach(self, rest: str) -> None:
        attached = self._conversation.attached
        taken = [attachment for attachment in attached if rest in ("", attachment.name)]
        if not taken:
            raise CommandFailed(
                f"{rest} is not attached; attached: {_names(attached)}" if attached and rest else "nothing is attached"
            )
        self._conversation.attached = [attachment for attachment in attached if attachment not in taken]
        self._note(f"no longer attached: {_names(taken)}")

    def _system(self, rest: str) -> None:
        if not rest:
            self._note(self._conversation.system or "no instructions")
            return
        self._conversation.system = rest
        self._conversation.messages.clear()
        self._note("the conversation begins anew with these instructions")

    def _think(self, rest: str) -> None:
        if rest not in ("on", "off"):
            raise CommandFailed("/think is on or off")
        self._conversation.thinks = rest == "on"
        self._note(f"reasoning is {rest}")

    def _reset(self, rest: str) -> None:
        self._conversation.messages.clear()
        self._conversation.attached.clear()
        self._note("forgotten")

    def _save(self, rest: str) -> None:
        if not rest:
            raise CommandFailed("/save needs a file: /save talk.json")
        conversation = self._conversation
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        body = {"model": conversation.target.model, "messages": [*system, *conversation.messages]}
        try:
            with Path(rest).expanduser().open("x") as file:
                json.dump(body, file, indent=2, ensure_ascii=False)
        except OSError as error:
            raise CommandFailed(f"{rest}: {os_words(error)}") from error
        self._note(f"{counted(len(conversation.messages), 'message')} in {rest}")

    def _stats(self, rest: str) -> None:
        totals = self._conversation.totals
        cached = ", ".join(f"{tier} {count:,}" for tier, count in totals.cached.items() if count)
        self._note(
            f"{counted(totals.num_answers, 'answer')}: {totals.prompt_tokens:,} prompt tokens"
            f"{f' (cached: {cached})' if cached else ''}, {totals.completion_tokens:,} in answers"
        )

    def _help(self, rest: str) -> None:
        for line in HELP:
            self._write(f"{_DIM}{line}{_PLAIN}\n")

    commands: Final[Mapping[str, Callable[["Repl", str], None]]] = {
        "/image": _image,
        "/video": _video,
        "/audio": _audio,
        "/detach": _detach,
        "/system": _system,
        "/think": _think,
        "/reset": _reset,
        "/save": _save,
        "/stats": _stats,
        "/help": _help,
    }

    def _show(self, kind: Literal["text", "reasoning"], piece: str) -> None:
        """Reasoning is dimmed, and parted from the answer by a line."""
        if (kind == "reasoning") != self._is_dim:
            self._write(f"{_PLAIN}\n" if self._is_dim else _DIM)
            self._is_dim = kind == "reasoning"
        self._write(shown(piece))

    def _end_line(self) -> None:
        self._write(f"{_PLAIN}\n" if self._is_dim else "\n")
        self._is_dim = False

    def _note(self, text: str) -> None:
        self._write(f"{_DIM}{printable_line(text)}{_PLAIN}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _names(attached: Sequence[Attachment]) -> str:
    return ", ".join(attachment.name for attachment in attached)


def shown(piece: str) -> str:
    """What a model writes is shown, and no escape sequence of its is obeyed."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in piece)


def dropped_words(rest: str) -> list[Path]:
    """Paths as a shell cuts them. Raises CommandFailed for quotes that nothing closes."""
    import shlex

    try:
        return [Path(word).expanduser() for word in shlex.split(rest)]
    except ValueError as error:
        raise CommandFailed(f"{rest}: {error}") from error


def cached_by_tier(usage: Mapping[str, Any]) -> dict[str, int]:
    """Cached prompt tokens by where they were; servers other than ours tell only their sum, which counts as device."""
    details = usage.get("prompt_tokens_details") or {}
    host, store = int(details.get("host_tokens") or 0), int(details.get("store_tokens") or 0)
    device = int(details.get("cached_tokens") or 0) - host - store
    return {"device": device, "host": host, "store": store, "healed": int(details.get("healed_tokens") or 0)}


def stats_line(reply: Reply) -> str:
    """One line after an answer."""
    tiers = {tier: count for tier, count in cached_by_tier(reply.usage).items() if count}
    cached = f" ({', '.join(f'{tier} {count:,}' for tier, count in tiers.items())})" if tiers else ""
    words = [
        f"prompt {reply.usage.get('prompt_tokens', 0):,}{cached}",
        f"answer {reply.usage.get('completion_tokens', 0):,}",
    ]
    if reply.ttft_s is not None:
        words.append(f"first token {seconds(reply.ttft_s)}")
    if reply.tokens_per_s is not None:
        words.append(f"{reply.tokens_per_s:.1f} tokens/s")
    if reply.finish_reason not in (None, "stop"):
        words.append(f"ended by {reply.finish_reason}")
    return ", ".join(words)
