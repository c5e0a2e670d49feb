"""Attention of fast towers: whole sequences, and bands cut into blocks of queries that are views of one another.

Queries that share a key head are rows of one product: q is `[B, K, S * G, D]`, the G heads of a position side by side.
A band's queries are cut into blocks; each meets its own keys and one window more on both sides, which is an overlapping
view of the keys, not a copy. Blocks in the middle share one small mask; the outer ones have their own:

    queries        |  block 0  |  block 1  |  block 2  |
    keys    pad W  |           |           |           | W pad
            [-- of block 0 --------]
                         [-- of block 1 --------]

Sequences of a call have one length and never meet, and a kernel's work for one does not depend on how many there are.

Shape legend: B sequences, S positions, K key heads, G query heads per key head, D head dim, N blocks, L keys per block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.config import SinkForm

# Queries of a block: at least so many, whole windows for small windows.
MIN_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a query i sees: i - left <= j <= i + right."""

    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a band over `num_positions` is cut, and the masks of its blocks: fp32 or bf16 `[block * G, keys]`, added."""

    band: Band
    num_positions: int
    num_blocks: int
    block: int
    middle: Tensor
    """Of blocks all of whose keys exist."""
    outer: dict[int, Tensor]
    """Of the others, by number; also of those that see key 0."""

    @property
    def num_padded(self) -> int:
        """Queries of all blocks."""
        return self.num_blocks * self.block

    @property
    def num_keys(self) -> int:
        """Of all blocks, with what is missing on both sides."""
        return self.band.left + self.num_padded + self.band.right

    @property
    def keys_per_block(self) -> int:
        return self.band.left + self.block + self.band.right


def block_size(band: Band, num_positions: int) -> int:
    """Queries of a block."""
    window = max(band.left, band.right, 1)
    size = max(1, -(-MIN_BLOCK // window)) * window
    return min(size, num_positions)


def make_blocks(band: Band, num_positions: int, groups: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    """The cut and the masks for sequences of one length."""
    block = block_size(band, num_positions)
    num_blocks = -(-num_positions // block)
    outer = {}
    for number in range(num_blocks):
        first_key = number * block - band.left
        if first_key <= 0 or first_key + band.left + block + band.right > num_positions:
            outer[number] = _mask(band, number * block, block, num_positions, groups, dtype, device)
    # Any block in the middle of an endless sequence looks alike.
    middle = _mask(band, band.left + 1, block, 2**30, groups, dtype, device)
    return Blocks(band, num_positions, num_blocks, block, middle, outer)


def _mask(
    band: Band, start: int, block: int, num_positions: int, groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Hidden pairs get the smallest finite value, not -inf: rows of padding see nothing and must stay finite."""
    queries = torch.arange(start, start + block, device=device)[:, None]
    keys = torch.arange(start - band.left, start + block + band.right, device=device)[None, :]
    seen = (queries - keys <= band.left) & (keys - queries <= band.right) & (keys >= 0) & (keys < num_positions)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask.repeat_interleave(groups, dim=0)


def whole_attention(q_BKMD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Each of the M = S * G queries sees all keys of its head; `[B, K, M, D]`."""
    return F.scaled_dot_product_attention(q_BKMD, k_BKSD, v_BKSD)


def band_attention(
    q_BKMD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, blocks: Blocks, sinks: Tensor | None, form: SinkForm
) -> Tensor:
    """Queries `[B, K, num_padded * G, D]`, keys and values `[B, K, num_keys, D]`, `left` in front; like the queries.

    `sinks [K * G]` shifts the logit of key 0, or is one more term of the denominator.
    """
    num_sequences, num_heads, num_rows, head_dim = q_BKMD.shape
    rows = num_rows // blocks.num_blocks
    flat = num_sequences * num_heads
    q = q_BKMD.view(flat, blocks.num_blocks, rows, head_dim)
    k, v = (
        x.view(flat, -1, head_dim).unfold(1, blocks.keys_per_block, blocks.block).transpose(2, 3)
        for x in (k_BKLD, v_BKLD)
    )
    groups = rows // blocks.block
    sinks_KG = None if sinks is None else sinks.to(q.dtype).view(num_heads, groups)
    out = torch.empty_like(q)
    if sinks_KG is not None and form == "denominator":
        for number in range(blocks.num_blocks):
            mask = blocks.outer.get(number, blocks.middle)
            one = [torch.unflatten(x[:, number], 0, (num_sequences, num_heads)) for x in (q, k, v)]
            out[:, number] = _with_denominator(one[0], one[1], one[2], mask, sinks_KG).flatten(0, 1)
        return out.view(q_BKMD.shape)
    for number, mask in blocks.outer.items():
        one = [torch.unflatten(x[:, number], 0, (num_sequences, num_heads)) for x in (q, k, v)]
        key_0 = blocks.band.left - number * blocks.block
        if sinks_KG is not None and key_0 >= 0:
            mask = _sunk(mask, key_0, sinks_KG)
        out[:, number] = F.scaled_dot_product_attention(one[0], one[1], one[2], attn_mask=mask).flatten(0, 1)
    middle = slice(*_middle(blocks))
    if middle.start < middle.stop:
        out[:, middle] = F.scaled_dot_product_attention(
            q[:, middle], k[:, middle], v[:, middle], attn_mask=blocks.middle
        )
    return out.view(q_BKMD.shape)


def _middle(blocks: Blocks) -> tuple[int, int]:
    """First and end of the blocks that are not outer ones: those are at the beginning and at the end."""
    inner = [number for number in range(blocks.num_blocks) if number not in blocks.outer]
    return (inner[0], inner[-1] + 1) if inner else (0, 0)


def _sunk(mask: Tensor, key_0: int, sinks_KG: Tensor) -> Tensor:
    """`[1, K, block * G, L]`: the column of key 0 shifted, where it is seen."""
    by_head = mask.expand(1, sinks_KG.shape[0], *mask.shape).clone()
    column = by_head[0, :, :, key_0]
    seen = mask[:, key_0] == 0
    column += sinks_KG.repeat(1, mask.shape[0] // sinks_KG.shape[1]) * seen
    return by_head


def _with_denominator(q_BKRD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, mask: Tensor, sinks_KG: Tensor) -> Tensor:
    """A key of zeros whose logit is the sink and whose value is nothing."""
    num_heads, groups = sinks_KG.shape
    sink = sinks_KG.repeat(1, mask.shape[0] // groups)[..., None]
    bias = torch.cat((mask.expand(num_heads, *mask.shape), sink), dim=-1)[None]
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k_BKLD, v_BKLD))
    return F.scaled_dot_product_attention(q_BKRD, k, v, attn_mask=bias)
