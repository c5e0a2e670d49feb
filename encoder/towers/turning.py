"""Rotary position for fast towers: on q and k of a tile while they are in the cache, before attention lays them out."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tables(NamedTuple):
    """cos and sin of every row of a pass, fp32 `[N, 1, width / 2]`: channel c is paired with c + width / 2."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, parts: list[tuple[Tensor, Tensor]], num_rows: int) -> "Tables":
        """Tables `[length, width / 2]` of consecutive rows; rows after them are filled up."""
        joined = []
        for which in (0, 1):
            pieces = [part[which] for part in parts]
            missing = num_rows - sum(len(piece) for piece in pieces)
            pieces.append(pieces[0].new_zeros(missing, pieces[0].shape[1]))
            joined.append(torch.cat(pieces)[:, None])
        return cls(*joined)

    def rows(self, chosen: slice) -> "Tables":
        """Of one tile."""
        return Tables(self.cos[chosen], self.sin[chosen])


def turn_into(out: Tensor, made: Tensor, tables: Tables, head_dim: int, num_values: int) -> None:
    """Copies q, k and v `[T, heads * head_dim]` to `out`; all but the last `num_values` columns are turned, in fp32.

    Of a head, the first channels turn, as many as the tables are for; the others stay.
    """
    num_turned, half = made.shape[1] - num_values, tables.cos.shape[-1]
    heads = made[:, :num_turned].view(made.shape[0], -1, head_dim)
    target = out[:, :num_turned].view(heads.shape)
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    target[..., :half] = torch.addcmul(first * tables.cos, second, tables.sin, value=-1)
    target[..., half : 2 * half] = torch.addcmul(second * tables.cos, first, tables.sin)
    if 2 * half < head_dim:
        target[..., 2 * half :] = heads[..., 2 * half :]
    out[:, num_turned:] = made[:, num_turned:]
