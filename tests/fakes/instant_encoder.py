"""A local encoder whose rows come from the content's hash at once, and `mimo` with it in place of the towers.

It starts fast, since it loads no torch. At its end, `mimo` says by how much its memory has grown since it began to
encode.

    python -m tests.fakes.instant_encoder DELAY_MS encode photos --out-dir rows

Content that begins with `bad` is no medium. All else has as many rows as its length says, or, for `big`, a megabyte.
"""

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash

import encoder
from cli.app import main
from preprocess.errors import MediaUndecodable
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality


class Rows(NamedTuple):
    """As `encoder.local.LocalRows`, whose module loads torch."""

    layout: MediaLayout
    content: memoryview
    checksum: int
    warnings: tuple[str, ...]


class InstantEncoder:
    """Counts what it encodes, by content. `delay_s` is what each takes, one at a time, as in a tower."""

    width = 8
    delay_s = 0.0
    first_bytes: int | None = None
    encoded: ClassVar[Counter[bytes]] = Counter()

    def __init__(self, model_dir: object = None, config: Any = None, **_: object) -> None:
        self.dtype = "float32" if config is None else config.dtype
        self._tower = threading.Lock()

    def key(self, content: bytes, modality: Modality, options: MediaOptions) -> MediaKey:
        return MediaKey(xxhash.xxh3_128_hexdigest(f"{modality} {options}".encode() + content))

    def settings(self, modality: Modality, options: MediaOptions) -> str:
        return xxhash.xxh3_128_hexdigest(f"{modality} {options} {self.dtype}".encode())

    def encode_key(self, key: MediaKey, content: bytes, modality: Modality, options: MediaOptions) -> Rows:
        if content.startswith(b"bad"):
            raise MediaUndecodable("this is bad")
        with self._tower:
            InstantEncoder.first_bytes = self.first_bytes or peak_bytes()
            self.encoded[content] += 1
            time.sleep(self.delay_s)
        num_rows = 2**15 if content.startswith(b"big") else 1 + len(content) % 7
        num_bytes = num_rows * self.width * (2 if self.dtype == "bfloat16" else 4)
        rows = memoryview(np.random.default_rng(int(key, 16)).bytes(num_bytes))
        layout = MediaLayout(modality, num_audio_rows=num_rows)
        return Rows(layout, rows, xxhash.xxh3_64_intdigest(rows), ("it hurts",) if b"hurt" in content else ())

    def close(self) -> None:
        pass


def peak_bytes() -> int:
    """The most memory this process has had."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    InstantEncoder.delay_s = float(sys.argv.pop(1)) / 1000
    encoder.LocalEncoder = InstantEncoder  # type: ignore[misc,assignment]
    try:
        main()
    finally:
        if InstantEncoder.first_bytes is not None:
            print(f"grown by {peak_bytes() - InstantEncoder.first_bytes} bytes", file=sys.stderr)
