"""Content that clients may ask for again by name: by their own uuid, or by the key they were told.

A name belongs to one API key, and so does what it stands for. Content is counted once however many names it has, and
goes when its last name does. When there is too much, names go: of the API key that has most, the one that was used
least recently. So nobody's media are pushed out by a client that has more on the shelf, unless by what that one brings
at the moment, which always finds its place.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from xxhash import xxh3_128_digest

from preprocess.types import MediaKey, MediaOptions, Modality

NAME_BYTES: Final = 256
"""What a name is counted as, besides its letters."""

Kind = Literal["uuid", "key"]
_Name = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Shelved:
    """A medium. A uuid stands for content; `options` count only for a key, which stands for content and options."""

    content: bytes
    modality: Modality
    options: MediaOptions = field(default_factory=MediaOptions)


@dataclass(slots=True)
class _Content:
    content: bytes
    num_names: int = 0


@dataclass(slots=True)
class _Named:
    digest: bytes
    modality: Modality
    options: MediaOptions


@dataclass(slots=True)
class _Shelf:
    """What one API key has; names in the order of their last use."""

    names: OrderedDict[_Name, _Named] = field(default_factory=OrderedDict)
    contents: dict[bytes, _Content] = field(default_factory=dict)
    size_bytes: int = 0


class MediaShelf:
    """On one event loop. `capacity_bytes` of 0 keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._shelves: dict[str, _Shelf] = {}
        self.size_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evicted = 0

    @property
    def num_names(self) -> int:
        return sum(len(shelf.names) for shelf in self._shelves.values())

    def put(self, owner: str, medium: Shelved, *, uuid: str | None = None, key: MediaKey | None = None) -> None:
        """Remember a medium under the names given. What they stood for before is forgotten.

        Content that would not fit an empty shelf is not kept, and then its names stand for nothing.
        """
        names: list[_Name] = []
        if uuid is not None:
            names.append(("uuid", uuid))
        if key is not None:
            names.append(("key", key))
        for name in names:
            self._forget(owner, name)
        if not names or len(medium.content) + sum(map(_cost, names)) > self._capacity_bytes:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        digest = xxh3_128_digest(medium.content)
        for name in names:
            content = shelf.contents.get(digest)
            if content is None:
                content = shelf.contents[digest] = _Content(medium.content)
                self._count(shelf, len(medium.content))
            content.num_names += 1
            shelf.names[name] = _Named(digest, medium.modality, medium.options)
            self._count(shelf, _cost(name))
        while self.size_bytes > self._capacity_bytes:
            self._evict(owner, names)

    def by_uuid(self, owner: str, uuid: str) -> Shelved | None:
        return self._find(owner, ("uuid", uuid))

    def by_key(self, owner: str, key: MediaKey) -> Shelved | None:
        return self._find(owner, ("key", key))

    def has_uuid(self, owner: str, uuid: str) -> bool:
        """Whether it stands for something now. A look that is no use of it."""
        shelf = self._shelves.get(owner)
        return shelf is not None and ("uuid", uuid) in shelf.names

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        for shelf in self._shelves.values():
            assert shelf.names, "a shelf without names is gone"
            held = sum(len(content.content) for content in shelf.contents.values())
            assert shelf.size_bytes == held + sum(map(_cost, shelf.names))
            for digest, content in shelf.contents.items():
                assert content.num_names == sum(named.digest == digest for named in shelf.names.values()) > 0
        assert self.size_bytes == sum(shelf.size_bytes for shelf in self._shelves.values()) <= self._capacity_bytes

    def _find(self, owner: str, name: _Name) -> Shelved | None:
        shelf = self._shelves.get(owner)
        named = None if shelf is None else shelf.names.get(name)
        if shelf is None or named is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        shelf.names.move_to_end(name)
        return Shelved(shelf.contents[named.digest].content, named.modality, named.options)

    def _evict(self, newcomer: str, spared: Sequence[_Name]) -> None:
        oldest = {owner: next(iter(shelf.names)) for owner, shelf in self._shelves.items()}
        if oldest.get(newcomer) in spared:
            del oldest[newcomer]
        # Of several that have as much, the one that came first.
        owner = max(oldest, key=lambda owner: self._shelves[owner].size_bytes)
        self._forget(owner, oldest[owner])
        self.num_evicted += 1

    def _forget(self, owner: str, name: _Name) -> None:
        shelf = self._shelves.get(owner)
        named = None if shelf is None else shelf.names.pop(name, None)
        if shelf is None or named is None:
            return
        self._count(shelf, -_cost(name))
        content = shelf.contents[named.digest]
        content.num_names -= 1
        if not content.num_names:
            del shelf.contents[named.digest]
            self._count(shelf, -len(content.content))
        if not shelf.names:
            del self._shelves[owner]

    def _count(self, shelf: _Shelf, change_bytes: int) -> None:
        shelf.size_bytes += change_bytes
        self.size_bytes += change_bytes


def _cost(name: _Name) -> int:
    return NAME_BYTES + len(name[1])
