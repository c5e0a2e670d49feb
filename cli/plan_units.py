"""GPUs, and quantities as people write them: 80GiB, 32k, 400Gb/s, 1280x720."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cli.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a data sheet says: memory as the driver shows it, dense bfloat16 arithmetic, memory bandwidth."""

    memory_mib: int
    bfloat16_tflops: float
    bandwidth_gb_per_s: float

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


GPUS: Final[Mapping[str, Gpu]] = {
    "b200": Gpu(183_359, 2250.0, 8000.0),
    "h200": Gpu(143_771, 989.0, 4800.0),
    "h100": Gpu(81_559, 989.0, 3350.0),
    "h20": Gpu(97_871, 148.0, 4000.0),
    "a100": Gpu(81_920, 312.0, 2039.0),
    "a100-40": Gpu(40_960, 312.0, 1555.0),
    "l40s": Gpu(46_068, 362.0, 864.0),
    "a6000": Gpu(49_140, 155.0, 768.0),
    "l4": Gpu(23_034, 121.0, 300.0),
    "rtx4090": Gpu(24_564, 165.0, 1008.0),
    "rtx5090": Gpu(32_607, 209.0, 1792.0),
    "mi300x": Gpu(196_592, 1307.0, 5300.0),
}

_DECIMAL: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km])?", re.IGNORECASE)
_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]i?)?(b|B)(?:/s|ps)")
_PICTURE = re.compile(r"(\d+)x(\d+)", re.IGNORECASE)


def parse_bytes(text: str, flag: str) -> int:
    """80GiB, 141GB. Raises ConfigError."""
    found = _BYTES.fullmatch(text.strip())
    if found is None or not (size_bytes := int(float(found[1]) * _scale(found[2]))):
        raise ConfigError(f"{flag} is {text!r}; give bytes with a unit: 80GiB, 141GB")
    return size_bytes


def parse_tokens(text: str, flag: str) -> int:
    """32768, 32k, 1m; k and m are powers of two, as contexts are named. Raises ConfigError."""
    found = _TOKENS.fullmatch(text.strip())
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}[((found[2] or "") if found else "").lower()]
    if found is None or not (num_tokens := int(float(found[1]) * scale)):
        raise ConfigError(f"{flag} is {text!r}; give tokens: 32768, 32k, 1m")
    return num_tokens


def parse_link(text: str) -> float:
    """Bytes per second of 400Gb/s (bits) or 50GB/s (bytes). Raises ConfigError."""
    found = _LINK.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"--link is {text!r}; give bits or bytes per second: 400Gb/s, 50GB/s")
    return float(found[1]) * _scale(found[2]) / (8 if found[3] == "b" else 1)


def parse_picture(text: str, flag: str) -> tuple[int, int]:
    """(height, width) in pixels of WIDTHxHEIGHT. Raises ConfigError."""
    found = _PICTURE.fullmatch(text.strip())
    if found is None or not (int(found[1]) and int(found[2])):
        raise ConfigError(f"{flag} is {text!r}; give WIDTHxHEIGHT in pixels: 1280x720")
    return int(found[2]), int(found[1])


def _scale(prefix: str | None) -> int:
    return (_DECIMAL | _BINARY)[(prefix or "").lower()]


def gib(size_bytes: float) -> str:
    """24.4 MiB, 3.0 GiB."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:,.1f} {unit}"
    return f"{size_bytes:,.0f} B"


def seconds(duration_s: float) -> str:
    """850 us, 3.2 ms, 1.4 s."""
    if not math.isfinite(duration_s):
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if duration_s >= scale:
            return f"{duration_s / scale:.3g} {unit}"
    return "0 s" if not duration_s else f"{duration_s / 1e-6:.2g} us"


def flops(count: float) -> str:
    """1.2 TFLOP."""
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e6:.3g} MFLOP"


def parameters(count: float) -> str:
    """310.8 B, 4.1 M."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f}"
