"""Pictures to patches as tensor operations, on the device of the tower that takes them.

The same arithmetic as `PatchWriter`, product by product and sum by sum, so a picture has the same patches wherever it
is resized. What travels to the device is bytes: an eighth of the patches of an image.

Pictures are batched over media: those with equal sizes before and after are one upload and one set of kernels, in
batches of bounded memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from preprocess.bilinear import axis, normalising
from preprocess.types import MERGE_SIZE, PATCH_SIZE, PATCH_WIDTH, TEMPORAL_PATCH_SIZE, Pixels

_BATCH_PIXELS: Final = 32 * 1024 * 1024
"""Of the largest stage of a batch; intermediate values take about 24 bytes for each, 800 MB."""
_CELL: Final = (3, TEMPORAL_PATCH_SIZE, PATCH_SIZE, PATCH_SIZE)


class _Placed(NamedTuple):
    """A frame and the places it is wanted at, counted in frames of the output."""

    frame: NDArray[np.uint8]
    places: list[int]


def patches_on(pictures: Sequence[Pixels], device: torch.device | str) -> list[torch.Tensor]:
    """[P, 1536] float32 on `device` for every picture, as `PatchWriter` makes them.

    Results of pictures that are resized to one size are parts of one tensor. Returns while the device may still be
    working.
    """
    device = torch.device(device)
    results: dict[int, torch.Tensor] = {}
    of_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, picture in enumerate(pictures):
        of_size[picture.height, picture.width].append(number)
    for (height, width), numbers in of_size.items():
        rows = _one_size([pictures[number] for number in numbers], height, width, device)
        results.update(zip(numbers, rows, strict=True))
    return [results[number] for number in range(len(pictures))]


# N pictures of a batch, H W pixels before and Y X after, C channels; T pairs, F = 2 frames, G groups along height or
# width, M = 2 patches of a group, D values of a patch


def _one_size(pictures: Sequence[Pixels], height: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    num_pairs = [len(picture.frames) // TEMPORAL_PATCH_SIZE for picture in pictures]
    h, w = height // PATCH_SIZE, width // PATCH_SIZE
    rows_PD = torch.empty((sum(num_pairs) * h * w, PATCH_WIDTH), dtype=torch.float32, device=device)
    groups = (h // MERGE_SIZE, w // MERGE_SIZE, MERGE_SIZE, MERGE_SIZE)
    cells_TGhGwMhMwCFYX = rows_PD.view(sum(num_pairs), *groups, *_CELL)
    # [T, F, C, Gh, Mh, Y, Gw, Mw, X]: by frame, then in the order of the pixels of a picture.
    frames = cells_TGhGwMhMwCFYX.permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    for batch in _batches(pictures, width):
        values_NCYX = _resized([placed.frame for placed in batch], height, width, device)
        values = values_NCYX.view(-1, 3, groups[0], MERGE_SIZE, PATCH_SIZE, groups[1], MERGE_SIZE, PATCH_SIZE)
        taken = torch.tensor([number for number, placed in enumerate(batch) for _ in placed.places])
        places = torch.tensor([place for placed in batch for place in placed.places])
        values = values if len(taken) == len(values) else values[taken.to(device)]
        frames[(places // TEMPORAL_PATCH_SIZE).to(device), (places % TEMPORAL_PATCH_SIZE).to(device)] = values
    return torch.split(rows_PD, [pairs * h * w for pairs in num_pairs])


def _batches(pictures: Sequence[Pixels], width: int) -> Iterator[list[_Placed]]:
    """Frames of equal size together, each array once however often a medium repeats it."""
    by_array: dict[int, _Placed] = {}
    place = 0
    for picture in pictures:
        for frame in picture.frames:
            by_array.setdefault(id(frame), _Placed(frame, [])).places.append(place)
            place += 1
    of_shape: dict[tuple[int, ...], list[_Placed]] = defaultdict(list)
    for placed in by_array.values():
        of_shape[placed.frame.shape].append(placed)
    for shape, found in of_shape.items():
        most = max(1, _BATCH_PIXELS // (shape[0] * max(shape[1], width)))
        for start in range(0, len(found), most):
            yield found[start : start + most]


def _resized(frames: Sequence[NDArray[np.uint8]], height: int, width: int, device: torch.device) -> torch.Tensor:
    """[N, 3, height, width], normalised; the pass across first, as `bilinear` has it, so that the bits are equal."""
    bytes_NHWC = torch.empty((len(frames), *frames[0].shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for number, frame in enumerate(frames):
        np.copyto(bytes_NHWC[number].numpy(), frame)
    picture_NCHW = bytes_NHWC.to(device, non_blocking=True).permute(0, 3, 1, 2)

    def moved(array: NDArray[Any]) -> torch.Tensor:
        return torch.tensor(array).to(device, non_blocking=True)

    across = axis(frames[0].shape[1], width)
    first_CX, second_CX, bias_C = (moved(array) for array in normalising(across))
    if across.is_copy:
        lines_NCHX = picture_NCHW * first_CX[:, None]
    else:
        lines_NCHX = picture_NCHW[..., moved(across.first)] * first_CX[:, None]
        lines_NCHX += picture_NCHW[..., moved(across.second)] * second_CX[:, None]
    lines_NCHX += bias_C[:, None, None]
    down = axis(frames[0].shape[0], height)
    if down.is_copy:
        return lines_NCHX.contiguous()
    values_NCYX = lines_NCHX.index_select(2, moved(down.first)).mul_(moved(down.first_weight)[:, None])
    values_NCYX += lines_NCHX.index_select(2, moved(down.second)).mul_(moved(down.second_weight)[:, None])
    return values_NCYX
