"""The towers as a server runs them, and the check that media of one pass leave each other alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from encoder.towers.fast_audio import FastAudioEncoder, FastTokenizer
from encoder.towers.fast_vision import FastVision
from encoder.towers.vit import Grid
from encoder.towers.weights import Towers

MediumT = TypeVar("MediumT")

# Two shapes, one of them twice, so that slices share an attention call and rows have another place in every order.
_CHECKED_GRIDS: tuple[Grid, ...] = ((1, 4, 6), (1, 2, 2), (2, 4, 6))
_CHECKED_FRAMES = (37, 8, 37)


class ServingTowers:
    """Fast forms of a checkpoint's towers. Used under `torch.inference_mode`, by one thread."""

    def __init__(self, towers: Towers, *, compiled: bool = False) -> None:
        """Copies what has to be arranged anew. `compiled` concerns the vision tower."""
        self.vision = None if towers.vision is None else FastVision(towers.vision, compiled=compiled)
        self._tokenizer = None if towers.audio_tokenizer is None else FastTokenizer(towers.audio_tokenizer)
        self._encoder = None if towers.audio_encoder is None else FastAudioEncoder(towers.audio_encoder)

    @property
    def hears(self) -> bool:
        """Whether there is an audio tower."""
        return self._encoder is not None

    def rows_of_pictures(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Per medium `[t * h * w / 4, width]`. Raises ValueError if patches and grids disagree."""
        if self.vision is None:
            raise ValueError("the checkpoint has no vision tower")
        return self.vision(patches, grids)

    def rows_of_sounds(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Per log-mel `[T, num_mels]` its rows `[ceil(ceil(ceil(T / 2) / 2) / 4), width]`. Raises ValueError."""
        if self._tokenizer is None or self._encoder is None:
            raise ValueError("the checkpoint has no audio tower")
        return self._encoder(self._tokenizer(mels))

    def keep_media_apart(self) -> bool:
        """Whether rows are the same to the bit in a pass of their own and in company, on this machine as it is set."""
        generator = torch.Generator().manual_seed(0)
        if self.vision is not None:
            device, width = self.vision.device, self.vision.config.patch_width
            pictures = [_noise(t * h * w, width, generator, device) for t, h, w in _CHECKED_GRIDS]
            pairs = list(zip(pictures, _CHECKED_GRIDS, strict=True))
            if not _same_in_company(pairs, lambda chosen: self.rows_of_pictures(*zip(*chosen, strict=True))):
                return False
        if self._tokenizer is not None:
            device, width = self._tokenizer.device, self._tokenizer.config.num_mels
            mels = [_noise(frames, width, generator, device) for frames in _CHECKED_FRAMES]
            return _same_in_company(mels, self.rows_of_sounds)
        return True


def _noise(num_rows: int, width: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(num_rows, width, generator=generator).to(device)


def _same_in_company(media: Sequence[MediumT], rows_of: Callable[[Sequence[MediumT]], list[Tensor]]) -> bool:
    alone = [rows_of([medium])[0] for medium in media]
    orders: Iterable[Sequence[int]] = (range(len(media)), range(len(media) - 1, -1, -1))
    return all(
        torch.equal(rows, alone[index])
        for order in orders
        for index, rows in zip(order, rows_of([media[index] for index in order]), strict=True)
    )
