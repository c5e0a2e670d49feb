"""Memory of passes, kept between them: the system takes longer to give pages than a tower to fill them."""

import torch
from torch import Tensor

# Larger pieces are given back after the pass.
MAX_KEPT_BYTES = 64 * 2**20


class Workspace:
    """Named pieces of memory of one dtype on one device. For one thread; what `take` gave is valid until the next."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, num_rows: int, width: int) -> Tensor:
        """`[num_rows, width]` with any content. The piece of this name that was taken before is void."""
        size = num_rows * width
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = torch.empty(size, dtype=self._dtype, device=self._device)
            if kept.nbytes <= MAX_KEPT_BYTES:
                self._kept[name] = kept
        return kept[:size].view(num_rows, width)

    def placed(self, name: str, shape: tuple[int, int, int, int], before: int, content: Tensor) -> Tensor:
        """`content [B, K, ..., C]` in `[B, K, places, C]` after `before` places; zeros in the places left over."""
        room = self.take(name, shape[0] * shape[1] * shape[2], shape[3]).view(shape)
        units = content.shape[2:-1]
        stop = before + units.numel()
        room[:, :, :before] = 0
        room[:, :, stop:] = 0
        torch.unflatten(room[:, :, before:stop], 2, units).copy_(content)
        return room
