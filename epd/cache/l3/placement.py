"""Which node of the store holds a session: all its pages are on one, so that a node's death costs its sessions alone.

Consistent hashing: a client that knows the same node names places every session alike, whatever their order, and a node
more takes its share of the sessions from all others and moves nothing else. Pure.
"""

from collections.abc import Container, Iterator, Sequence

from encoder import Ring


class Placement:
    """A fixed set of node names."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Raises ValueError for a name given twice: half of what it held would be looked for in another place."""
        self._ring = Ring(nodes)

    def node(self, group: str, blocked: Container[str] = ()) -> str | None:
        """Where `group` lives. Nodes in `blocked` are passed over: each of their sessions goes to the next node on the
        ring, those of other nodes stay where they are, and all return when the node does. None when all are blocked."""
        return next((name for name in self._ring.preference(group) if name not in blocked), None)

    def order(self, group: str) -> Iterator[str]:
        """Every node once, the one that should hold `group` first, then who takes its place, and so on."""
        return self._ring.preference(group)
