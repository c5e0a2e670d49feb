"""Dequantisation against one-value-at-a-time decoders."""

import math

import pytest
import torch

from epd.kernels import quantized
from epd.kernels.quantized import dequantize_fp8, dequantize_mxfp4
from tests.fakes.quantized_files import random_mxfp4
from tests.oracles.mxfp4 import decode_mxfp4, e2m1


@pytest.mark.parametrize("columns", [8, 7, 3])
def test_fp8_is_the_formula(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(5, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(5, -(-columns // 4), generator=generator)
    expected = [[float(weight[r, c].float() * scale[r, c // 4]) for c in range(columns)] for r in range(5)]
    assert dequantize_fp8(weight, scale, block_columns=4).tolist() == expected


def test_every_fp8_code() -> None:
    """Sign, four exponent bits with bias 7, three mantissa bits; all ones is not a number."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = dequantize_fp8(codes.view(torch.float8_e4m3fn)[None], torch.ones(1, 2), block_columns=128)[0].tolist()
    for code, value in enumerate(values):
        exponent, mantissa = (code >> 3) & 15, code & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if code & 127 == 127:
            assert math.isnan(value)
        else:
            assert value == math.copysign(magnitude, -1 if code >> 7 else 1)


def test_rows_of_a_larger_matrix_need_not_be_contiguous() -> None:
    weight = torch.randn(4, 16).to(torch.float8_e4m3fn)
    scale = torch.rand(4, 2)
    out = dequantize_fp8(weight[::2], scale[::2], block_columns=8)
    assert torch.equal(out, dequantize_fp8(weight, scale, block_columns=8)[::2])


@pytest.mark.parametrize("columns", [32, 96, 48])
def test_mxfp4_equals_the_slow_decoder(columns: int) -> None:
    packed, exponents = random_mxfp4(9, columns, torch.Generator().manual_seed(columns))
    out = dequantize_mxfp4(packed, exponents, block_columns=32)
    assert torch.equal(out, decode_mxfp4(packed, exponents))


def test_every_nibble_and_the_ends_of_the_exponents() -> None:
    packed = torch.arange(16, dtype=torch.uint8)[:, None]
    out = dequantize_mxfp4(packed, torch.full((16, 1), 127, dtype=torch.uint8), block_columns=2)
    assert out[:, 0].tolist() == [e2m1(nibble) for nibble in range(16)]
    assert out[:, 1].tolist() == [0.0] * 16
    ends = dequantize_mxfp4(
        torch.full((3, 1), 0x22, dtype=torch.uint8), torch.tensor([[0], [254], [255]]), block_columns=2
    )
    assert ends[:2].tolist() == [[2.0**-127] * 2, [2.0**127] * 2]
    assert bool(ends[2].isnan().all())


def test_the_switch_swaps_the_columns_of_each_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, exponents = random_mxfp4(3, 32, torch.Generator().manual_seed(0))
    low_first = dequantize_mxfp4(packed, exponents, block_columns=32)
    monkeypatch.setattr(quantized, "MXFP4_EVEN_COLUMN_IS_LOW_NIBBLE", False)
    high_first = dequantize_mxfp4(packed, exponents, block_columns=32)
    assert torch.equal(high_first.view(3, 16, 2).flip(2).reshape(3, 32), low_first)
    assert not torch.equal(high_first, low_first)
