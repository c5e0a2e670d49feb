"""Token ids that stand for one medium in a prompt, and which embedding row goes to which of them. Light: no torch.

    image   [vision_start] image_pad x rows [vision_end]
    audio   [audio_start] audio_pad x rows [audio_end]
    video   [video_start] group group ... [video_end]
    group   label, then per pair [vision_start] video_pad x rows [vision_end],
            then, if the group has audio rows, [audio_start] audio_pad x rows [audio_end]

A label is the start of the group's first pair as MM:SS, floored; minutes do not wrap at 60.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from preprocess.ranges import Whole, shown_value
from preprocess.types import MediaLayout, Modality


@dataclass(frozen=True, slots=True)
class MediaTokenIds:
    """Ids of the delimiters and placeholders."""

    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int
    audio_pad: int
    video_start: int
    video_end: int
    audio_start: int
    audio_end: int

    @classmethod
    def from_hf(cls, config: Mapping[str, object], *, vocab_size: int = 2**24) -> MediaTokenIds:
        """Reads `processor_config` of a config.json, and its top level for a key that is absent there.

        Raises ValueError naming the first key that is missing or no id below `vocab_size`.
        """
        allowed = Whole(0, vocab_size - 1)
        section = config.get("processor_config")
        nested: Mapping[str, object] = section if isinstance(section, Mapping) else {}
        ids: dict[str, int] = {}
        for name, key in _HF_KEYS.items():
            found = nested.get(key)
            found = config.get(key) if found is None else found
            if not isinstance(found, int) or found not in allowed:
                raise ValueError(f"processor_config.{key} is {shown_value(found)}, allowed is a token id, {allowed}")
            ids[name] = found
        return cls(**ids)

    @property
    def placeholders(self) -> frozenset[int]:
        """The ids whose embeddings are replaced by tower output."""
        return frozenset({self.image_pad, self.video_pad, self.audio_pad})


_HF_KEYS: Final[Mapping[str, str]] = {
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
    "image_pad": "image_token_id",
    "video_pad": "video_token_id",
    "audio_pad": "audio_token_id",
    "video_start": "video_start_token_id",
    "video_end": "video_end_token_id",
    "audio_start": "audio_start_token_id",
    "audio_end": "audio_end_token_id",
}


@dataclass(frozen=True, slots=True)
class Run:
    """`length` placeholders at `[offset, offset + length)` of the expansion take the medium's embedding rows
    `[row_start, row_start + length)`, in order."""

    offset: int
    length: int
    row_start: int


@dataclass(frozen=True, slots=True)
class Expansion:
    """One medium as tokens. The runs' lengths add up to the layout's `num_rows`, each row used once."""

    token_ids: list[int]
    runs: tuple[Run, ...]


def expand(
    layout: MediaLayout,
    ids: MediaTokenIds,
    encode_label: Callable[[str], list[int]],
    *,
    interleave_s: float = 0.0,
) -> Expansion:
    """Tokens and placeholder runs of one medium.

    `encode_label` turns "MM:SS" into ids, as plain text. `interleave_s` only matters for a video with audio: 0 makes
    every pair its own group, a positive value groups pairs by time windows of that many seconds, -1 makes one group.
    Raises ValueError for any other negative value, and for a layout that contradicts itself.
    """
    if interleave_s < 0 and interleave_s != -1:
        raise ValueError(f"interleave_s is {interleave_s}, allowed is -1, 0 or a number of seconds")
    builder = _Builder()
    match layout.modality:
        case Modality.IMAGE:
            builder.delimited(ids.vision_start, ids.image_pad, layout.num_vision_tokens, ids.vision_end, row_start=0)
        case Modality.AUDIO:
            builder.delimited(ids.audio_start, ids.audio_pad, layout.num_audio_rows, ids.audio_end, row_start=0)
        case Modality.VIDEO:
            _expand_video(builder, layout, ids, encode_label, interleave_s)
    placed = sum(run.length for run in builder.runs)
    if placed != layout.num_rows:
        raise ValueError(f"layout has {layout.num_rows} embedding rows, its expansion has {placed} placeholders")
    return Expansion(builder.token_ids, tuple(builder.runs))


@dataclass(slots=True)
class _Builder:
    token_ids: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def delimited(self, start: int, pad: int, num_rows: int, end: int, *, row_start: int) -> None:
        self.token_ids.append(start)
        self.runs.append(Run(offset=len(self.token_ids), length=num_rows, row_start=row_start))
        self.token_ids.extend([pad] * num_rows)
        self.token_ids.append(end)


def _expand_video(
    builder: _Builder,
    layout: MediaLayout,
    ids: MediaTokenIds,
    encode_label: Callable[[str], list[int]],
    interleave_s: float,
) -> None:
    num_pairs = len(layout.timestamps_s)
    if layout.grid_thw is None or layout.grid_thw[0] != num_pairs:
        raise ValueError(f"video layout has grid {layout.grid_thw} and {num_pairs} timestamps")
    if layout.audio_slices and len(layout.audio_slices) != num_pairs:
        raise ValueError(f"video layout has {num_pairs} pairs and {len(layout.audio_slices)} audio slices")
    rows_per_pair = layout.num_vision_tokens // num_pairs
    # Without audio there is nothing to interleave: every pair carries its own label.
    groups = _group(layout.timestamps_s, interleave_s if layout.audio_slices else 0.0)
    audio_row = layout.num_vision_tokens
    builder.token_ids.append(ids.video_start)
    for group in groups:
        builder.token_ids.extend(encode_label(label(layout.timestamps_s[group[0]])))
        for pair in group:
            row_start = pair * rows_per_pair
            builder.delimited(ids.vision_start, ids.video_pad, rows_per_pair, ids.vision_end, row_start=row_start)
        num_audio = sum(layout.audio_slices[pair][1] for pair in group) if layout.audio_slices else 0
        if num_audio:
            builder.delimited(ids.audio_start, ids.audio_pad, num_audio, ids.audio_end, row_start=audio_row)
            audio_row += num_audio
    builder.token_ids.append(ids.video_end)


def slice_audio(
    timestamps_s: NDArray[np.float32], *, num_audio_tokens: int, tokens_per_s: float
) -> tuple[tuple[int, int], ...]:
    """(start, length) of every pair's share of a video's audio rows.

    `timestamps_s` [frames] float32 are those of the sampled frames, before an odd count was padded. A share runs from
    its pair's start to the next one's; the last ends one frame step after the last frame. Boundaries are products in
    float32, truncated. Sound after the last share belongs to no frame and is dropped.

    A share is cut where the audio track ends, so pairs after that end get length 0 and keep their place: they carry no
    audio rows. (Published engines fail on such files.)
    """
    rate = np.float32(tokens_per_s)
    one = np.float32(1.0)
    # The step goes through its reciprocal and back, as in the published processor; the rounding shows.
    frame_rate = one / (timestamps_s[1] - timestamps_s[0]) if len(timestamps_s) > 1 else one
    end_s = timestamps_s[-1] + one / frame_rate
    bounds = [int(start_s * rate) for start_s in timestamps_s[::2]]
    bounds.append(int(end_s * rate))
    return tuple((start, max(min(stop, num_audio_tokens) - start, 0)) for start, stop in itertools.pairwise(bounds))


def label(timestamp_s: float) -> str:
    """The time label of a group: 605.9 -> "10:05", 6000.0 -> "100:00"."""
    minutes, seconds = divmod(int(timestamp_s), 60)
    return f"{minutes:02d}:{seconds:02d}"


def _group(timestamps_s: tuple[float, ...], interleave_s: float) -> list[list[int]]:
    """Pair indices of each group, in order."""
    if interleave_s == 0:
        return [[pair] for pair in range(len(timestamps_s))]
    if interleave_s == -1:
        return [list(range(len(timestamps_s)))]
    windows: dict[int, list[int]] = {}
    for pair, timestamp_s in enumerate(timestamps_s):
        windows.setdefault(int(timestamp_s // interleave_s), []).append(pair)
    return list(windows.values())
