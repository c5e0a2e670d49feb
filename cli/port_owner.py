"""Which process listens on a port, as far as /proc tells this user."""

import os
from pathlib import Path

_LISTENS = "0A"


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
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return f"{' '.join(word for word in words if word)[:100]} (pid {entry.name})"
        except OSError:
            # Another user's, or gone meanwhile.
            continue
    return None


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
