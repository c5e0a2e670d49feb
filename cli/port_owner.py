"""Which process listens on a port, as far as /proc tells this user."""

import os
from pathlib import Path

_LISTENS = "0A"
_STAGE = "cli.stage"
_MAX_GENERATIONS = 4


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """`mimo serve ... (pid 1234)`, None where it cannot be known."""
    inodes = _listening(port, proc)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for entry in sorted(proc.iterdir()):
        if not entry.name.isdigit():
            continue
        try:
            if any(os.readlink(link) in wanted for link in (entry / "fd").iterdir()):
                return _named(int(entry.name), proc)
        except OSError:
            # Another user's, or gone meanwhile.
            continue
    return None


def _named(pid: int, proc: Path) -> str:
    """A stage is named by the `mimo serve` that keeps it, which is what a person ends. Raises OSError."""
    words = _words(pid, proc)
    for _ in range(_MAX_GENERATIONS):
        if _STAGE not in words:
            break
        try:
            # After the name, which may hold anything: state, parent.
            parent = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            words, pid = _words(parent, proc), parent
        except (OSError, IndexError, ValueError):
            # Its supervisor is gone, and it will be soon.
            break
    return f"{_shown(words)[:100]} (pid {pid})"


def _words(pid: int, proc: Path) -> list[str]:
    """Raises OSError."""
    raw = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    return [word for word in raw.split("\0") if word]


def _shown(words: list[str]) -> str:
    """`mimo serve`, whichever interpreter runs it from wherever."""
    for index, word in enumerate(words[:4]):
        if word.rpartition("/")[2] == "mimo" or (index and words[index - 1 : index + 1] == ["-m", "cli"]):
            return " ".join(["mimo", *words[index + 1 :]])
    return " ".join(words)


def _listening(port: int, proc: Path) -> set[str]:
    """Inodes of the sockets that listen on the port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes
