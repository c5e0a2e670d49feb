"""The slow truth of three block formats: 32 weights to a block, one weight at a time, arithmetic in fp32 like ggml's.

Q4_0  fp16 scale; 16 bytes of two nibbles         weight = scale * (q - 8)
Q4_1  fp16 scale, fp16 minimum; 16 bytes of two   weight = scale * q + minimum
Q8_0  fp16 scale; 32 signed bytes                 weight = scale * q

The low nibbles are weights 0 to 15, the high ones 16 to 31.
"""

import struct

import numpy as np

_SIZE_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def dequantize_slowly(data: bytes, kind: str) -> list[np.float32]:
    """Weights of whole blocks, in order."""
    size_bytes = _SIZE_BYTES[kind]
    assert len(data) % size_bytes == 0
    return [w for at in range(0, len(data), size_bytes) for w in _block(data[at : at + size_bytes], kind)]


def _block(block: bytes, kind: str) -> list[np.float32]:
    scale = np.float32(struct.unpack_from("<e", block)[0])
    if kind == "Q8_0":
        return [scale * np.float32(q) for q in struct.unpack_from("<32b", block, 2)]
    packed = block[-16:]
    nibbles = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    if kind == "Q4_0":
        return [scale * np.float32(q - 8) for q in nibbles]
    minimum = np.float32(struct.unpack_from("<e", block, 2)[0])
    return [np.float32(scale * np.float32(q)) + minimum for q in nibbles]
