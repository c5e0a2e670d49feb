"""Page identity: a chained 128-bit digest per full page of tokens.

    key(page i) = xxh3_128(key(page i - 1), 16 bytes per token);   key(page -1) = xxh3_128(seed)

A text token is (token id, 0); token j of a media span is a digest of (media key, j), never the pad id that stands in
the prompt, so two prompts share a page exactly when their text and their media content agree. The seed carries what
else the KV bytes depend on (model fingerprint, KV layout version, a tenant or salt where caches must not be shared).

Because digests are chained, equal keys at page i mean equal prefixes up to page i; the tree relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["KEY_BYTES", "MediaRun", "PageKeyChain", "page_keys"]

KEY_BYTES = 16
_MEDIA_MARK = np.uint64(1)


@dataclass(frozen=True, slots=True)
class MediaRun:
    """Prompt tokens `[start, stop)` stand for rows `[row_start, row_start + stop - start)` of the media named `key`.

    `key` is the media's content key: any non-empty bytes (16 are usual).
    """

    start: int
    stop: int
    key: bytes
    row_start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or self.row_start < 0 or not self.key:
            raise ValueError(f"media run [{self.start}, {self.stop}) from row {self.row_start} is malformed")


class PageKeyChain:
    """The keys of one sequence, grown token by token or in bulk; `keys` lists one digest per completed page."""

    __slots__ = ("_num_tokens", "_page_size", "_parent", "_pending", "keys")

    def __init__(self, *, page_size: int, seed: bytes) -> None:
        """`page_size` in tokens; `seed` names the model, the KV layout version and the sharing domain."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self._page_size = page_size
        self._parent = xxhash.xxh3_128_digest(seed)
        self._pending = b""
        self._num_tokens = 0
        self.keys: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far, those of the incomplete last page included."""
        return self._num_tokens

    def append(self, token_id: int) -> None:
        """Add one text token (decode)."""
        self.extend((token_id,))

    def extend(self, token_ids: Sequence[int], media: Sequence[MediaRun] = ()) -> None:
        """Add tokens; positions in `media` count from the first of `token_ids` and must not overlap."""
        self._pending += _identities(token_ids, media).tobytes()
        self._num_tokens += len(token_ids)
        page_bytes = self._page_size * KEY_BYTES
        num_pages = len(self._pending) // page_bytes
        parent = self.keys[-1] if self.keys else self._parent
        for page in range(num_pages):
            parent = xxhash.xxh3_128_digest(parent + self._pending[page * page_bytes : (page + 1) * page_bytes])
            self.keys.append(parent)
        self._pending = self._pending[num_pages * page_bytes :]


def page_keys(token_ids: Sequence[int], media: Sequence[MediaRun], *, page_size: int, seed: bytes) -> list[bytes]:
    """Keys of the full pages of a prompt: `len(token_ids) // page_size` digests of 16 bytes."""
    chain = PageKeyChain(page_size=page_size, seed=seed)
    chain.extend(token_ids, media)
    return chain.keys


def _identities(token_ids: Sequence[int], media: Sequence[MediaRun]) -> npt.NDArray[np.uint64]:
    """`[num_tokens, 2]` u64: (token id, 0) for text, (media digest half, other half mixed with the row) for media."""
    identities = np.zeros((len(token_ids), 2), dtype="<u8")
    identities[:, 0] = np.asarray(token_ids, dtype=np.int64)
    previous_stop = 0
    for run in sorted(media, key=lambda item: item.start):
        if run.start < previous_stop or run.stop > len(token_ids):
            raise ValueError(f"media run [{run.start}, {run.stop}) overlaps another or leaves {len(token_ids)} tokens")
        previous_stop = run.stop
        rows = range(run.row_start, run.row_start + run.stop - run.start)
        digests = b"".join(xxhash.xxh3_128_digest(run.key + row.to_bytes(8, "little")) for row in rows)
        identities[run.start : run.stop] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        # A set low bit keeps every media identity apart from every text identity, whose second word is zero.
        identities[run.start : run.stop, 1] |= _MEDIA_MARK
    return identities
