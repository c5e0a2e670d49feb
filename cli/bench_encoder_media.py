"""What the encoder benches ask for: pictures of mixed sizes and kinds, and which request asks for which.

A picture is made once and served under many stamps: a few bytes that no decoder looks at, but that make it another
medium with another key. So a run never finds what an earlier one left in a cache, and costs what it cost.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cli.bench_case import Bars
from cli.bench_inputs import pictures

_KINDS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("JPEG", {"quality": 90}, 0.6),
    ("PNG", {}, 0.2),
    ("WEBP", {"quality": 85}, 0.2),
)
"""What Pillow calls them, how they are made, their share."""
_MAX_ASPECT = 1.8


@dataclass(frozen=True, slots=True)
class Picture:
    """`kind` is JPEG, PNG or WEBP."""

    kind: str
    content: bytes
    height: int
    width: int

    def stamped(self, stamp: bytes) -> bytes:
        """The file with the stamp, at most 60,000 bytes, in it."""
        head = self.content
        match self.kind:
            case "JPEG":  # a comment after the first marker
                return b"%b\xff\xfe%b%b%b" % (head[:2], struct.pack(">H", 2 + len(stamp)), stamp, head[2:])
            case "PNG":  # a text after the header
                text = b"tEXtComment\0" + stamp
                chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
                return head[:33] + chunk + head[33:]
            case "WEBP":  # an unknown chunk at the end
                padded = stamp + b"\0" * (len(stamp) % 2)
                body = head[8:] + b"STMP" + struct.pack("<I", len(padded)) + padded
                return b"RIFF" + struct.pack("<I", len(body)) + body
        raise ValueError(f"no stamp for {self.kind}")


@dataclass(frozen=True, slots=True)
class Album:
    """The site that the benches fetch from: `/INDEX/STAMP` is a picture with a stamp."""

    pictures: tuple[Picture, ...]

    def __call__(self, path: str) -> bytes:
        index, _, stamp = path.removeprefix("/").partition("/")
        return self.pictures[int(index)].stamped(stamp.encode())

    @property
    def in_words(self) -> str:
        sides = [max(picture.height, picture.width) for picture in self.pictures]
        kinds = [picture.kind for picture in self.pictures]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind, _, _ in _KINDS)
        mean_kb = sum(len(picture.content) for picture in self.pictures) / len(self.pictures) / 1000
        return f"{counts}, longer side {min(sides)} to {max(sides)} pixels, {mean_kb:.0f} kB each on average"


def mixed_album(cache_dir: Path, bars: Bars, *, num_pictures: int, min_side: int, max_side: int) -> Album:
    """Longer sides spread evenly on a logarithmic scale, shapes from square to 9:5 either way; always the same ones."""
    chance = np.random.default_rng(23)
    ranks = chance.permutation(num_pictures) / max(1, num_pictures - 1)
    kinds = chance.permutation(np.linspace(0, 1, num_pictures, endpoint=False))
    made = []
    for rank, place in zip(ranks, kinds, strict=True):
        longer = round(min_side * (max_side / min_side) ** rank)
        shorter = max(1, round(longer / chance.uniform(1, _MAX_ASPECT)))
        height, width = (longer, shorter) if chance.random() < 0.5 else (shorter, longer)
        kind, options = _kind_at(place)
        (content,) = pictures(cache_dir, bars, kind=kind, num_files=1, width=width, height=height, **options)
        made.append(Picture(kind, content, height, width))
    return Album(tuple(made))


def _kind_at(place: float) -> tuple[str, dict[str, Any]]:
    for kind, options, share in _KINDS:
        if place < share:
            return kind, options
        place -= share
    return _KINDS[-1][:2]


def paths(num_requests: int, album: Album, *, repeated_share: float, stamp: str) -> list[str]:
    """What each request asks for, in order: pictures in turn, each under a stamp of its own.

    But for that share of the requests, spread evenly by chance, which ask for what one before them asked for.
    """
    chance = np.random.default_rng(29)
    num_repeats = round(repeated_share * num_requests)
    # The first has nothing to repeat.
    repeats = set((1 + chance.permutation(num_requests - 1)[:num_repeats]).tolist())
    asked: list[str] = []
    new: list[str] = []
    for index in range(num_requests):
        if index in repeats:
            asked.append(new[chance.integers(len(new))])
        else:
            new.append(f"/{len(new) % len(album.pictures)}/{stamp}-{len(new)}")
            asked.append(new[-1])
    return asked


def zipf_ranks(num_requests: int, *, num_media: int, exponent: float, seed: int) -> Sequence[int]:
    """Which medium each request asks for: medium k with a probability in proportion to (k + 1) ** -exponent."""
    weights = np.arange(1, num_media + 1) ** -exponent
    ranks: list[int] = np.random.default_rng(seed).choice(num_media, num_requests, p=weights / weights.sum()).tolist()
    return ranks
