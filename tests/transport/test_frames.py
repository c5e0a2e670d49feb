"""Torch tensors survive the wire bit for bit."""

import pytest
import torch

from encoder.wire import Codec, TensorFrame
from epd.transport.frames import to_frame, to_tensor
from epd.types import Hello

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4), ()])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    codec = Codec[Hello](Hello)
    frames = codec.encode(Hello(sequence=1), [to_frame(tensor)])
    _, received = codec.decode([bytes(frame) for frame in frames])
    back = to_tensor(received[0])
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_view_is_sent_as_its_values() -> None:
    tensor = torch.arange(24, dtype=torch.float32).view(4, 6)[:, ::2]
    assert torch.equal(to_tensor(to_frame(tensor)), tensor)


def test_misaligned_memory_is_copied() -> None:
    values = torch.tensor([1.5, -2.0])
    raw = bytearray(9)
    raw[1:] = values.numpy().tobytes()
    assert torch.equal(to_tensor(TensorFrame("float32", (2,), memoryview(raw)[1:])), values)
