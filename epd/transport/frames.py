"""Torch tensors to wire frames and back, bfloat16 and fp8 included. Only engine processes import this."""

import torch

from encoder.wire import TensorFrame

_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_frame(tensor: torch.Tensor) -> TensorFrame:
    """A frame over the tensor's own memory when it is contiguous on the CPU, else over a copy.

    Raises KeyError for a dtype that does not travel.
    """
    host = tensor.detach().to("cpu").contiguous()
    data = host.view(-1).view(torch.uint8) if host.dtype != torch.uint8 else host.view(-1)
    return TensorFrame(_NAMES[host.dtype], tuple(host.shape), data.numpy().data)


def to_tensor(frame: TensorFrame) -> torch.Tensor:
    """The frame's tensor on the CPU: over the frame's memory when that is writable and aligned, else a copy."""
    dtype = _DTYPES[frame.dtype]
    if frame.data.nbytes == 0:
        return torch.empty(frame.shape, dtype=dtype)
    if frame.data.readonly:
        return torch.frombuffer(bytearray(frame.data), dtype=dtype).view(frame.shape)
    raw = torch.frombuffer(frame.data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(frame.shape)
