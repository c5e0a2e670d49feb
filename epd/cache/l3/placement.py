"""Which node of the store holds a session: all its pages are on one, so that a node's death costs its sessions alone.

Consistent hashing: a client that knows the same node names places every session alike, whatever their order, and a node
more takes its share of the sessions from all others and moves nothing else. Pure.
"""

from collections.abc import Iterator, Sequence

from encoder import Ring


class Placement:
    """A fixed set of node names."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Raises ValueError for a name given twice: half of what it held would be looked for in another place."""
        self._ring = Ring(nodes)

    def order(self, group: str) -> Iterator[str]:
        """Every node once, the one that should hold `group` first, then who takes its place, and so on.

        So the sessions of a node that is passed over go to others, those of other nodes stay where they are, and all
        return when it does.
        """
        return self._ring.preference(group)
