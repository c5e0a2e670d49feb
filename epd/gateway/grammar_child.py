"""The process in which grammars are made: `python -m epd.gateway.grammar_child TOKENIZER END_TOKEN_IDS`.

Reads wishes from standard input and writes what became of them to standard output, in order, each after its length
(4 bytes). It ends when its input does, or at once when the gateway does, however that happens.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from epd.errors import InvalidRequest
from epd.gateway.grammar import Form, GrammarMaker, Wish
from epd.gateway.vocabulary import Vocabulary

_LENGTH: Final = struct.Struct("<I")
# Beyond what it has once it is ready.
_MORE_BYTES: Final = 1 << 30
_NICENESS: Final = 10
_PR_SET_PDEATHSIG: Final = 1


class Made(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A grammar, or why there is none and of which field."""

    grammar: str | None = None
    refusal: str | None = None
    param: str | None = None


def send(pipe: IO[bytes], message: object) -> None:
    raw = msgspec.json.encode(message)
    pipe.write(_LENGTH.pack(len(raw)) + raw)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """None at the end."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    raw = pipe.read(_LENGTH.unpack(header)[0])
    return raw if len(raw) == _LENGTH.unpack(header)[0] else None


def main() -> None:
    path, *end_token_ids = sys.argv[1:]
    # Whoever is busy with a wish does not see the end of its input.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # Answers go where nothing else is ever printed.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    maker = GrammarMaker(Vocabulary.load(Path(path)), [int(token_id) for token_id in end_token_ids])
    # What all grammars need is made before anybody's time is counted.
    with contextlib.suppress(InvalidRequest):
        maker.grammar(Wish(Form("choice", ("a",), "")))
    os.nice(_NICENESS)
    virtual_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_bytes = virtual_bytes + _MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(answers, Made())
    while (raw := receive(sys.stdin.buffer)) is not None:
        try:
            made = Made(grammar=maker.grammar(msgspec.json.decode(raw, type=Wish)))
        except InvalidRequest as error:
            made = Made(refusal=error.message, param=error.param)
        send(answers, made)


if __name__ == "__main__":
    main()
