"""The shelf against the plainest one that keeps the same promises."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.gateway.media_shelf import NAME_BYTES, MediaShelf, Shelved
from preprocess.types import MediaKey, MediaOptions, Modality

CAPACITY = 10 * NAME_BYTES


@dataclass
class PlainShelf:
    """Names in a list, the last used last; sizes are counted anew every time."""

    names: list[tuple[str, tuple[str, str], Shelved]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    """Of those with anything here, in the order they came: of two that have as much, the first gives way."""

    def size(self, owner: str | None = None) -> int:
        of_owner = [entry for entry in self.names if owner in (None, entry[0])]
        contents = {(entry[0], entry[2].content) for entry in of_owner}
        return sum(len(content) for _, content in contents) + sum(NAME_BYTES + len(entry[1][1]) for entry in of_owner)

    def put(self, owner: str, medium: Shelved, names: list[tuple[str, str]]) -> None:
        self.names = [entry for entry in self.names if not (entry[0] == owner and entry[1] in names)]
        if len(medium.content) + sum(NAME_BYTES + len(name[1]) for name in names) > CAPACITY:
            self._leave()
            return
        self._leave()
        self.names += [(owner, name, medium) for name in names]
        if names and owner not in self.owners:
            self.owners.append(owner)
        while self.size() > CAPACITY:
            free = [entry for entry in self.names if not (entry[0] == owner and entry[1] in names)]
            largest = max(
                dict.fromkeys(who for who in self.owners if who in {entry[0] for entry in free}), key=self.size
            )
            self.names.remove(next(entry for entry in free if entry[0] == largest))
            self._leave()

    def _leave(self) -> None:
        self.owners = [owner for owner in self.owners if any(entry[0] == owner for entry in self.names)]

    def find(self, owner: str, name: tuple[str, str]) -> Shelved | None:
        for entry in self.names:
            if entry[:2] == (owner, name):
                self.names.remove(entry)
                self.names.append(entry)
                return entry[2]
        return None


OWNERS = st.sampled_from(["", "", "", "a", "bb"])
NAMES = st.sampled_from(["x", "yy", "zzz"])
CONTENTS = st.integers(0, 9).map(lambda n: bytes([n]) * (n * NAME_BYTES // 2 + n + 1))
PUT = st.tuples(st.just("put"), OWNERS, CONTENTS, st.none() | NAMES, st.none() | NAMES)
GET = st.tuples(st.just("get"), OWNERS, st.sampled_from(["uuid", "key"]), NAMES)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(PUT | GET, max_size=30))
def test_it_does_what_the_plain_shelf_does(steps: list[tuple[Any, ...]]) -> None:
    shelf, plain = MediaShelf(CAPACITY), PlainShelf()
    for step in steps:
        match step:
            case ("put", owner, bytes() as content, uuid, key):
                medium = Shelved(content, Modality.IMAGE, MediaOptions(max_pixels=2048))
                names = [(kind, name) for kind, name in (("uuid", uuid), ("key", key)) if name is not None]
                shelf.put(owner, medium, uuid=uuid, key=None if key is None else MediaKey(key))
                plain.put(owner, medium, names)
            case ("get", owner, kind, name):
                found = shelf.by_uuid(owner, name) if kind == "uuid" else shelf.by_key(owner, MediaKey(name))
                assert found == plain.find(owner, (kind, name))
        shelf.check()
        assert shelf.size_bytes == plain.size()


def image(content: bytes) -> Shelved:
    return Shelved(content, Modality.IMAGE)


def test_a_uuid_means_what_came_with_it_last() -> None:
    shelf = MediaShelf(CAPACITY)
    shelf.put("", image(b"one"), uuid="u", key=MediaKey("1"))
    shelf.put("", image(b"two"), uuid="u", key=MediaKey("2"))
    assert shelf.by_uuid("", "u") == image(b"two")
    assert shelf.by_key("", MediaKey("1")) == image(b"one")


def test_names_belong_to_one_owner() -> None:
    shelf = MediaShelf(CAPACITY)
    shelf.put("a", image(b"one"), uuid="u")
    shelf.put("b", image(b"two"), uuid="u")
    assert (shelf.by_uuid("a", "u"), shelf.by_uuid("b", "u")) == (image(b"one"), image(b"two"))
    assert shelf.by_uuid("", "u") is None


def test_who_has_much_gives_way_and_who_has_little_keeps_it() -> None:
    shelf = MediaShelf(CAPACITY)
    shelf.put("small", image(b"mine"), uuid="u")
    for number in range(100):
        shelf.put("large", image(bytes([number]) * NAME_BYTES), uuid=str(number))
    assert shelf.by_uuid("small", "u") == image(b"mine")
    assert shelf.by_uuid("large", "99") is not None
    assert shelf.by_uuid("large", "0") is None
    assert (shelf.num_hits, shelf.num_misses) == (2, 1)
    assert shelf.num_evicted > 90


def test_what_is_brought_now_finds_its_place_whoever_brings_it() -> None:
    shelf = MediaShelf(CAPACITY)
    shelf.put("small", image(b"x" * 4 * NAME_BYTES), uuid="u")
    shelf.put("large", image(b"y" * 7 * NAME_BYTES), uuid="u", key=MediaKey("k"))
    assert shelf.by_uuid("large", "u") is not None
    assert shelf.by_uuid("small", "u") is None


def test_what_fits_no_shelf_is_not_kept_and_the_old_meaning_is_gone() -> None:
    for capacity in (0, CAPACITY):
        shelf = MediaShelf(capacity)
        shelf.put("", image(b"small"), uuid="u")
        shelf.put("", image(b"x" * CAPACITY), uuid="u")
        assert shelf.by_uuid("", "u") is None
        assert (shelf.size_bytes, shelf.num_names) == (0, 0)
