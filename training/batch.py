"""Samples to token ids, targets and tower inputs, laid out so that all tokens of a step share the matrix products."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import architecture
from training.features import frames_to_patches
from training.tasks.types import Clip, Codes, Image, Mark, Part, Sample
from training.vocabulary import BUILD, DEFAULT_SYSTEM

IDS = architecture.SPECIAL_IDS
TOTAL_STEP = 128
NEAR = 0.12
IGNORED = -100


@dataclass(slots=True)
class Encoded:
    """One conversation: ids, which of them are answer tokens, and its media with the positions they fill."""

    task: str
    marks: tuple[Mark, ...] = ()
    ids: list[int] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    pixels: list[tuple[Tensor, int, int, list[int], Tensor]] = field(default_factory=list)
    sounds: list[tuple[Tensor, list[int]]] = field(default_factory=list)

    def put(self, ids: list[int], wanted: bool = False) -> list[int]:
        """Append ids; returns the positions they took."""
        start = len(self.ids)
        self.ids += ids
        self.wanted += [wanted] * len(ids)
        return list(range(start, start + len(ids)))


def unit_labels(marks: list[Mark], rows: int, columns: int) -> Tensor:
    """Labels of the units of one slice, `[rows*columns, 4]` int64: shape, colour, motion, letter; 0 is none.

    A thing whose centre lies near the border of its unit may be seen in the next one as well: IGNORED there.
    """
    labels = torch.zeros(rows, columns, 4, dtype=torch.long)
    for mark in marks:
        row, column = min(int(mark.y * rows), rows - 1), min(int(mark.x * columns), columns - 1)
        across = [row + (mark.y * rows - row > 1 - NEAR) - (mark.y * rows - row < NEAR)]
        along = [column + (mark.x * columns - column > 1 - NEAR) - (mark.x * columns - column < NEAR)]
        for near_row in {row, *across} & set(range(rows)):
            for near_column in {column, *along} & set(range(columns)):
                if not labels[near_row, near_column].any():
                    labels[near_row, near_column] = IGNORED
        labels[row, column] = torch.tensor([mark.shape, mark.colour, mark.motion, mark.letter])
    return labels.flatten(0, 1)


class Encoder:
    """Renders a sample as the chat template does and tokenises every text piece on its own."""

    def __init__(self, folder: Path = BUILD) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, text: str) -> list[int]:
        """Ids of one piece of text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def __call__(self, sample: Sample) -> Encoded:
        out = Encoded(sample.task, marks=sample.marks)
        pending = f"<|im_start|>system\n{DEFAULT_SYSTEM if sample.system is None else sample.system}<|im_end|>"
        for turn in sample.turns:
            pending += "<|im_start|>user\n"
            for part in turn.question:
                if isinstance(part, str):
                    pending += part
                else:
                    out.put(self.text(pending))
                    pending = ""
                    self.put_medium(out, part)
            out.put(self.text(f"{pending}<|im_end|><|im_start|>assistant\n<think></think>"))
            out.put([*self.text(turn.answer), IDS["<|im_end|>"]], wanted=True)
            pending = ""
        return out

    def put_medium(self, out: Encoded, part: Part) -> None:
        """Expand one picture, clip or sound."""
        if isinstance(part, Image):
            patches, (_, rows, columns) = frames_to_patches(np.stack([part.pixels_HWC] * 2), 262144)
            self.put_slice(out, patches, rows, columns, IDS["<|image_pad|>"], 0)
        elif isinstance(part, Clip):
            patches, (pairs, rows, columns) = frames_to_patches(part.frames_THWC, 65536)
            out.put([IDS["<|mimo_video_start|>"]])
            for pair, slice_patches in enumerate(patches.chunk(pairs)):
                seconds = int(part.timestamps_s[2 * pair])
                out.put(self.text(f"{seconds // 60:02d}:{seconds % 60:02d}"))
                self.put_slice(out, slice_patches, rows, columns, IDS["<|video_pad|>"], pair)
            out.put([IDS["<|mimo_video_end|>"]])
        elif isinstance(part, Codes):
            out.put([IDS["<|mimo_audio_start|>"]])
            places = out.put([IDS["<|audio_pad|>"]] * len(part.groups_GSQ))
            out.sounds.append((part.groups_GSQ, places))
            out.put([IDS["<|mimo_audio_end|>"]])
        else:
            raise TypeError(f"cannot expand {type(part).__name__}; sounds have to be tokenised first")

    def put_slice(self, out: Encoded, patches: Tensor, rows: int, columns: int, pad: int, index: int) -> None:
        """One slice between its vision delimiters."""
        out.put([IDS["<|vision_start|>"]])
        places = out.put([pad] * (rows * columns // 4))
        labels = unit_labels([mark for mark in out.marks if mark.slice_index == index], rows // 2, columns // 2)
        out.pixels.append((patches, rows, columns, places, labels))
        out.put([IDS["<|vision_end|>"]])


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of a step, grouped by length.

    `ids_T` int64; `groups` as (sequences, length); `rows_A` are the positions whose next token is an answer token
    `targets_A`; `sample_A` names the sequence of each; `pixels` maps a grid to its patches, the positions of its
    units and the labels of its slices' units `[S, U, 4]`; `sounds` are code groups and positions.
    """

    ids_T: Tensor  # noqa: N815
    groups: tuple[tuple[int, int], ...]
    rows_A: Tensor  # noqa: N815
    targets_A: Tensor  # noqa: N815
    sample_A: Tensor  # noqa: N815
    tasks: tuple[str, ...]
    pixels: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]
    sounds: tuple[Tensor, Tensor] | None
    spans: tuple[tuple[int, int], ...]


def collate(samples: list[Encoded]) -> Batch:
    """Sort by padded length and concatenate."""

    def padded(sample: Encoded) -> int:
        step = 16 if len(sample.ids) <= 128 else 64
        return -(-len(sample.ids) // step) * step

    ordered = sorted(samples, key=padded)
    ids: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    spans: list[tuple[int, int]] = []
    groups: dict[int, int] = {}
    pixels: dict[tuple[int, int], tuple[list[Tensor], list[int], list[Tensor]]] = {}
    sounds: tuple[list[Tensor], list[int]] = ([], [])
    for number, sample in enumerate(ordered):
        start, length = len(ids), padded(sample)
        groups[length] = groups.get(length, 0) + 1
        spans.append((start, len(sample.ids)))
        ids += sample.ids + [IDS["<|endoftext|>"]] * (length - len(sample.ids))
        for place in range(1, len(sample.ids)):
            if sample.wanted[place]:
                rows.append(start + place - 1)
                targets.append(sample.ids[place])
                owners.append(number)
        for patches, height, width, places, labels in sample.pixels:
            tensors, where, known = pixels.setdefault((height, width), ([], [], []))
            known.append(labels)
            tensors.append(patches)
            where.extend(start + place for place in places)
        for codes, places in sample.sounds:
            sounds[0].append(codes)
            sounds[1].extend(start + place for place in places)
    sequences = [(count, length) for length, count in groups.items()]
    if len(ids) % TOTAL_STEP:  # a filler sequence keeps the number of distinct matrix shapes small
        sequences.append((1, TOTAL_STEP - len(ids) % TOTAL_STEP))
        ids += [IDS["<|endoftext|>"]] * sequences[-1][1]
    return Batch(
        torch.tensor(ids),
        tuple(sequences),
        torch.tensor(rows),
        torch.tensor(targets),
        torch.tensor(owners),
        tuple(sample.task for sample in ordered),
        {
            grid: (torch.cat(tensors), torch.tensor(where), torch.stack(known))
            for grid, (tensors, where, known) in pixels.items()
        },
        (torch.cat(sounds[0]), torch.tensor(sounds[1])) if sounds[0] else None,
        tuple(spans),
    )
