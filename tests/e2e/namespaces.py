"""Two machines on this one: network namespaces joined by a cable, each with shared memory and host names of its own."""

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")
_CLONE_NEWNET = 0x40000000
# Of RFC 2544: nobody's.
_NETWORK = "198.18.77"


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the two. `addresses` are its own, on the cable."""

    name: str
    addresses: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """What to put before a command that is to run there."""
        own_memory = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", own_memory, "sh"]

    def set_hosts(self, hosts: dict[str, Sequence[str]]) -> None:
        """What names stand for there from now on, for processes that run already, too: the file is written in place."""
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ips in hosts.items() for ip in ips)]
        path = Path("/etc/netns") / self.name / "hosts"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

    def plug(self, *, in_: bool) -> None:
        """Connect the cable, or pull it: nothing is closed, nothing is answered any more."""
        _ip("-n", self.name, "link", "set", "cable", "up" if in_ else "down")

    def run_inside(self, function: Callable[[], ResultT]) -> ResultT:
        """Call it on a thread that sees this machine's network; so do the threads it starts."""

        def enter() -> None:
            with Path("/run/netns", self.name).open() as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns failed")

        with ThreadPoolExecutor(1, initializer=enter) as thread:
            return thread.submit(function).result()


def why_impossible() -> str | None:
    """What this machine lacks for it; None where it can be done."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 (ip) and util-linux (unshare)"
    probe = f"mimo-{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", probe)
        inside = ["ip", "netns", "exec", probe, "unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
        subprocess.run(inside, check=True, capture_output=True)
        _ip("link", "add", f"{probe}a"[:15], "type", "veth", "peer", "name", f"{probe}b"[:15], "netns", probe)
    except subprocess.CalledProcessError as error:
        return f"this machine does not allow network namespaces: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """The second has two addresses, so that something may move."""
    tag = uuid.uuid4().hex[:6]
    first = Machine(f"mimo-{tag}-1", (f"{_NETWORK}.1",))
    second = Machine(f"mimo-{tag}-2", (f"{_NETWORK}.2", f"{_NETWORK}.3"))
    try:
        for machine in (first, second):
            _ip("netns", "add", machine.name)
            machine.set_hosts({})
        # Both ends go into their namespaces as they are made: nothing appears on this machine's own network.
        _ip("-n", first.name, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second.name)
        for machine in (first, second):
            for address in machine.addresses:
                _ip("-n", machine.name, "address", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", machine.name, "link", "set", link, "up")
        yield first, second
    finally:
        for machine in (first, second):
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / machine.name, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
