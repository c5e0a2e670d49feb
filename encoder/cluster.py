"""What processes of one cluster know each other by: CURVE keys that all of them derive from one shared secret.

    shared secret --blake2b--> the key pair of every server     who listens proves that it has the secret
                          '--> the key pair of every client     who connects does: no other key is let in

ZMQ encrypts and authenticates every frame with them. Whoever has not the secret gets no further than the handshake,
which is bounded in time and bytes. Unix sockets and memory need none of it: the file system says who may use them.
"""

import base64
import contextlib
import hashlib
import hmac
import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils import z85

logger = logging.getLogger(__name__)

# Of random bytes; of text they are written in, base64 needs 43 characters for as many.
MIN_SECRET_BYTES: Final = 32
_MIN_SECRET_TEXT: Final = 43
# 32 random bytes have more, hexadecimal digits of them, too; words that people type again and again do not.
_MIN_DISTINCT: Final = 10
# A handshake is a matter of milliseconds; whoever says nothing, or nonsense, is cut off after this long.
_HANDSHAKE_MS: Final = 5000
# The system's own limit is minutes, in which a host that was gone for a moment would not be seen to be back.
_CONNECT_MS: Final = 3000
# On a connection that stands; a peer that runs says its part of the handshake in milliseconds.
_SILENT_AFTER_S: Final = 2.0
# A peer that announces a larger frame is disconnected before the memory is taken.
MAX_FRAME_BYTES: Final = 2**30
# Refusals are told at once, then at this interval at most.
_TELL_AGAIN_S: Final = 600.0
_DOMAIN: Final = b"mimo"
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_REFUSED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# After these a client's socket does not try again by itself.
_ENDED: Final = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
CLIENT_EVENTS: Final = (
    zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
)
"""What a monitor of a client's socket must ask for to feed `Handshakes`."""
# One that ends early may have met a peer that was just ending; so many in a row have not.
_REFUSED_AFTER: Final = 3
RETRY_S: Final = 1.0


class WeakSecret(ValueError):
    """A cluster secret that could be guessed. Never holds the secret."""


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKeys:
    """Two CURVE key pairs, Z85 as ZMQ takes them. Never shown, so that no log and no traceback holds them."""

    server_secret: bytes
    server_public: bytes
    client_secret: bytes
    client_public: bytes

    @classmethod
    def derive(cls, secret: bytes) -> "ClusterKeys":
        """Raises WeakSecret for fewer than 32 bytes, or 43 characters of text, or hardly any different ones."""
        secret = secret.strip(b"\r\n\t ")
        is_text = secret.isascii() and secret.decode("ascii", "replace").isprintable()
        if len(secret) < (_MIN_SECRET_TEXT if is_text else MIN_SECRET_BYTES) or len(set(secret)) < _MIN_DISTINCT:
            raise WeakSecret(
                f"the cluster key is too easily guessed; allowed: {MIN_SECRET_BYTES} random bytes, plain or written as "
                "base64 or hexadecimal digits. openssl rand -base64 32 makes one"
            )
        server, client = (_secret_key(secret, person) for person in (b"mimo zmq server", b"mimo zmq client"))
        return cls(server, zmq.curve_public(server), client, zmq.curve_public(client))

    def __repr__(self) -> str:
        return "ClusterKeys(hidden)"


def _secret_key(secret: bytes, person: bytes) -> bytes:
    # Longer keys than blake2b's 64 bytes count in full, as with HMAC.
    key = hashlib.blake2b(secret, digest_size=64).digest()
    return z85.encode(hashlib.blake2b(key=key, digest_size=32, person=person).digest())


def needs_keys(address: str) -> bool:
    """Whether what is said at a ZMQ address leaves the machine, as far as the address tells: a name may be anybody."""
    if not address.startswith("tcp://"):
        return False
    host = host_of(address)
    return not (host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdigit()))


def host_of(address: str) -> str:
    """The host of tcp://HOST:PORT, without the brackets of IPv6."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def limit(socket: "zmq.Socket[Any]", *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
    """Bound what a peer can make this process hold and wait for: frames, and connections that say nothing."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)


def secure_client(socket: "zmq.Socket[Any]", address: str, keys: ClusterKeys | None) -> None:
    """Before `connect`: only a server with the same secret will do. Without keys, and off TCP, nothing changes."""
    if keys is None or not address.startswith("tcp://"):
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)


def secure_server(socket: "zmq.Socket[Any]", address: str, keys: ClusterKeys | None) -> None:
    """Before `bind`: only clients with the same secret get in. Without keys, and off TCP, nothing changes.

    Starts a thread that ends with the socket's context. One socket of a context may be a server.
    """
    if keys is None or not address.startswith("tcp://"):
        return
    _Doorkeeper(socket, address, keys)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
    # Without anybody who decides on the domain everybody is refused.
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class _Doorkeeper:
    """Decides who gets in (ZMQ's authentication protocol, RFC 27), and says in the log that somebody did not."""

    def __init__(self, socket: "zmq.Socket[Any]", address: str, keys: ClusterKeys) -> None:
        # Shadowed: whoever destroys the context closes the sockets it knows, and these belong to the thread.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(socket.context.underlying)
        self._client_public = z85.decode(keys.client_public)
        self._reply = context.socket(zmq.REP)
        self._reply.setsockopt(zmq.LINGER, 0)
        self._reply.bind(_ZAP_ADDRESS)
        watched = f"inproc://refused-{uuid.uuid4().hex}"
        socket.monitor(watched, _REFUSED)
        self._refused = context.socket(zmq.PAIR)
        self._refused.setsockopt(zmq.LINGER, 0)
        self._refused.connect(watched)
        self._log = RefusalLog(f"refused a connection to {address}: its peer did not show this cluster's key")
        threading.Thread(target=self._run, name=f"doorkeeper {address}", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._reply, zmq.POLLIN)
        poller.register(self._refused, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._reply in ready:
                    self._reply.send_multipart(self._decide(self._reply.recv_multipart()))
                if self._refused in ready:
                    self._refused.recv_multipart()
                    self._log.tell()
        except zmq.ContextTerminated:
            # The server has closed.
            pass
        finally:
            self._reply.close(0)
            self._refused.close(0)

    def _decide(self, asked: list[bytes]) -> list[bytes]:
        # version, request id, domain, address, identity, mechanism, then what the mechanism knows: the client's key.
        request_id = asked[1] if len(asked) > 1 else b""
        is_known = (
            len(asked) == 7
            and asked[0] == b"1.0"
            and asked[5] == b"CURVE"
            and hmac.compare_digest(asked[6], self._client_public)
        )
        code, text = (b"200", b"") if is_known else (b"400", b"another cluster's key")
        return [b"1.0", request_id, code, text, b"", b""]


def reconnect(socket: "zmq.Socket[Any]", address: str) -> None:
    """After a refusal that ZMQ takes for final; a second `connect` alone would do nothing."""
    with contextlib.suppress(zmq.ZMQError):
        socket.disconnect(address)
    socket.connect(address)


class RefusalLog:
    """One sentence, told at once and then seldom: peers that are refused try again several times a second."""

    def __init__(self, text: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._clock = clock
        self._told_s: float | None = None
        self.num_refused = 0

    def tell(self) -> None:
        self.num_refused += 1
        now_s = self._clock()
        if self._told_s is None or now_s - self._told_s >= _TELL_AGAIN_S:
            self._told_s = now_s
            logger.warning("%s (%d so far)", self._text, self.num_refused)


class Handshakes:
    """A client's connection as its monitor tells it: up, down, or never let in."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_up = False
        self._clock = clock
        self._num_refused = 0
        self._reached_s: float | None = None
        self._was_silent = False
        self._log = RefusalLog(f"{address} lets nobody in: its cluster key is not the one of this process")

    @property
    def is_refused(self) -> bool:
        """The peer is there, and ends every connection before it is set up."""
        return self._num_refused >= _REFUSED_AFTER

    @property
    def is_silent(self) -> bool:
        """The peer's host takes the connection and the peer says nothing on it: it hangs, or was stopped."""
        return not self.is_up and (self._was_silent or self._waited_s() > _SILENT_AFTER_S)

    def _waited_s(self) -> float:
        """Since the connection was taken, while nothing was said on it."""
        return 0.0 if self._reached_s is None else self._clock() - self._reached_s

    def take(self, event: int) -> bool:
        """One event of `CLIENT_EVENTS`; whether the socket must be told to connect again, after `RETRY_S`."""
        if event == zmq.EVENT_CONNECTED:
            self._reached_s = self._clock()
        elif event == zmq.EVENT_CLOSED:
            # Nobody took the connection.
            self._reached_s, self._was_silent = None, False
        elif event & _REFUSED:
            # A peer that was stopped lets the time for the handshake run out; one that refuses says so at once.
            self._was_silent = self._waited_s() > _SILENT_AFTER_S
            self._reached_s = None
            self._num_refused += not self._was_silent
            if self.is_refused and not self._was_silent:
                self._log.tell()
        else:
            self._reached_s, self._was_silent = None, False
            self.is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.is_up:
                self._num_refused = 0
        return bool(event & _ENDED)


def new_secret() -> str:
    """A secret that `ClusterKeys.derive` takes: 32 random bytes as base64."""
    return base64.b64encode(secrets.token_bytes(MIN_SECRET_BYTES)).decode()
